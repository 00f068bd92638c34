"""A finished run's output, made with the real plan, shards and ledger, but without an engine."""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from images import seal_image
from plain_reader import read_output

from ray_extract import views
from ray_extract.capture.digest import splitmix64
from ray_extract.capture.fp8 import encode
from ray_extract.config import Job
from ray_extract.dataset.prepare import PreparedRow
from ray_extract.dataset.prepared import PreparedRows, RowIndex, RowLength
from ray_extract.layout import round_of_unit, shard_key
from ray_extract.ledger import Ledger, last_manifest, run_identity
from ray_extract.model import ModelShape
from ray_extract.plan import claim_round, halve, load_or_make_plan, load_plan, read_rounds, store_parts
from ray_extract.readers.dataset import HiddenStates
from ray_extract.readers.head import load_token_counts
from ray_extract.records import Receipt, RowFailure, RowStatus, Split, Unit
from ray_extract.shards.image import TORCH_TO_CODE, Column, lay_out, row_table, state_columns, write_table
from ray_extract.shards.parquet import write_parquet
from ray_extract.shards.raw import write_raw
from ray_extract.shards.seal import sha256_other
from ray_extract.store import Store, open_store
from ray_extract.verify import verify

BOUNDARIES = (1, 3)
NAMES = ("state.1", "state.3", "state.final")
ATTEMPT = "a0"

States = Callable[[str, npt.NDArray[np.int32]], npt.NDArray[np.float32]]
"""(state's name, token ids) -> f32 [n, hidden]."""


@dataclasses.dataclass(frozen=True)
class Output:
    """What was written.

    Args:
        url: where.
        store: the same, open.
        job: its job.
        index, units: its plan.
        stored: for each row that is ok, the bytes of each state by name; u8 [kept, bytes per token].
        columns, dtype: of its shards.
        states: what its model computes.
        vocab: tokens of its vocabulary.
    """

    url: str
    store: Store
    job: Job
    index: RowIndex
    units: list[Unit]
    stored: dict[int, dict[str, npt.NDArray[np.uint8]]]
    columns: tuple[Column, ...]
    dtype: str
    states: States
    vocab: int


def random_states(hidden: int) -> States:
    """States that depend on the name and the ids alone."""

    def states(name: str, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        rng = np.random.default_rng([NAMES.index(name), *ids.tolist()])
        return rng.standard_normal((len(ids), hidden), dtype=np.float32)

    return states


def stored_bytes(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """Values in a stored type, bf16 by truncation, fp8 from that; u8 [n, bytes per token]."""
    if dtype == "float8_e4m3":
        return encode(torch.from_numpy(stored_bytes(values, "bfloat16")).view(torch.bfloat16)).numpy()
    if dtype == "bfloat16":
        narrow = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    else:
        narrow = values.astype(dtype)
    return np.ascontiguousarray(narrow).view(np.uint8).reshape(len(values), -1)


def make_output(
    folder: Path,
    *,
    url: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    lengths: Sequence[int] = (5, 12, 0, 1, 30, 7),
    format: str = "raw",
    keep: str = "all",
    dtype: str = "bfloat16",
    hidden: int = 16,
    vocab: int = 1000,
    failed: Sequence[int] = (),
    rows_per_unit: int = 2,
    states: States | None = None,
    finish: bool = True,
    leave_out: Sequence[str] = (),
    boundaries: Sequence[int] = BOUNDARIES,
    final: bool = True,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
) -> Output:
    """Write an output.

    Args:
        folder: for the input, and for the output if no `url` is given.
        storage_options: of the output.
        lengths: prompt tokens of the rows; a row of 0 is skipped as unusable.
        dtype: stored; an engine that computes in bf16, if it is float8_e4m3.
        failed: rows that failed, by index.
        finish: write the manifest too.
        leave_out: units without a commit.
        boundaries, final: what is captured; give `states` for others than NAMES.
        rows: token ids and loss mask of each row, in place of random ones of these lengths.
    """
    rng = np.random.default_rng(0)
    records = []
    for length in lengths if rows is None else ():
        mask = rng.integers(0, 2, length)
        mask[-1:] = 1
        records.append({"input_ids": rng.integers(0, vocab, length).tolist(), "loss_mask": mask.tolist()})
    for ids, given in rows or ():
        records.append({"input_ids": list(ids), "loss_mask": list(given)})
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    url = url or str(folder / "out")
    fp8 = dtype == "float8_e4m3"
    job = Job.model_validate(
        {
            "model": {"path": "made-up"},
            "dataset": {"paths": [str(data)]},
            "capture": {
                "boundaries": boundaries,
                "final": final,
                "keep": keep,
                "dtype": "float8_e4m3" if fp8 else "model",
            },
            "output": {"url": url, "format": format, "max_rows": rows_per_unit},
        }
    )
    computed = "bfloat16" if fp8 else dtype
    shape = ModelShape("made-up", "LlamaForCausalLM", "llama", 8, hidden, computed, 4096, vocab, "0" * 64)
    columns = state_columns(boundaries, final, TORCH_TO_CODE[dtype], hidden)
    store = open_store(url, storage_options or {})
    ledger = Ledger(store)
    ledger.claim(run_identity(job, shape, boundaries, [{"path": "rows.jsonl"}], ""), {"ray_extract": "test"})
    index, units = load_or_make_plan(store, job, shape, sum(c.token_bytes for c in columns))
    output = Output(url, store, job, index, units, {}, columns, dtype, states or random_states(hidden), vocab)
    for unit in units:
        if unit.unit not in leave_out:
            commit_unit(output, unit, failed)
    if finish and not leave_out:
        write_views(output)
    return output


def kept_positions(row: PreparedRow, keep: str) -> npt.NDArray[np.int64]:
    """Which of a row's tokens are stored, by another road than the image's."""
    n = len(row.input_ids)
    if keep.startswith("random:"):
        seed = int.from_bytes(bytes.fromhex(row.row_id)[:8], "little")
        order = sorted(range(n), key=lambda p: int(splitmix64(np.array([(seed + p) % 2**64], np.uint64))[0]))
        return np.array(sorted(order[: int(keep.removeprefix("random:"))]), np.int64)
    chosen = {"all": np.ones(n), "supervised": row.loss_mask, "last": np.arange(n) == n - 1}[keep]
    return np.flatnonzero(chosen)


def commit_unit(output: Output, unit: Unit, failed: Sequence[int] = ()) -> None:
    """Write a unit's shard and commit it; rows of `failed` are zeroed."""
    ledger, store, columns = Ledger(output.store), output.store, output.columns
    keep, format = output.job.capture.keep, output.job.output.format
    usable = PreparedRows(store, output.index).of(unit)
    table = row_table([r.index for r in usable], [r.input_ids for r in usable], [r.loss_mask for r in usable], keep)
    layout = lay_out(table, columns, {"unit": unit.unit})
    buffer = memoryview(bytearray(layout.nbytes))
    write_table(layout, table, buffer)
    for place, row in enumerate(usable):
        positions = kept_positions(row, keep)
        for column in columns:
            values = output.states(column.name, row.input_ids)[positions]
            part = stored_bytes(values, output.dtype)
            layout.state_bytes(buffer, column)[table.cu_kept[place] : table.cu_kept[place + 1]] = part
            if row.index not in failed:
                output.stored.setdefault(row.index, {})[column.name] = part
    image = seal_image(table, columns, buffer, layout, [i for i, r in enumerate(usable) if r.index in failed])
    key = shard_key(unit.unit, ATTEMPT, format)
    size = (
        write_raw(store, key, buffer)
        if format == "raw"
        else write_parquet(store, key, layout, buffer, piece_bytes=10 * sum(c.token_bytes for c in columns))
    )
    ok = image.statuses == RowStatus.OK
    ledger.commit(
        Receipt(
            unit=unit.unit,
            attempt=ATTEMPT,
            key=key,
            format=format,
            size=size,
            sha256=sha256_other(layout, buffer),
            rows=len(usable),
            tokens=int(np.diff(table.cu_seqlens)[ok].sum()),
            kept=int(np.diff(table.cu_kept)[ok].sum()),
            failures=tuple(
                RowFailure(r.index, RowStatus.INCOMPLETE, "one token is missing") for r in usable if r.index in failed
            ),
            digests=layout.small(buffer, "digest").tobytes(),
            environment={},
            seconds={},
        )
    )


def write_views(output: Output) -> None:
    """Write manifest, token counts and _SUCCESS, as a run does at its end."""
    ledger, after = Ledger(output.store), last_manifest(output.store)
    listing = ledger.listing()
    units, rounds = load_plan(output.store)[1], read_rounds(output.store)
    assert views.write_views(ledger, output.index, units, rounds, after, listing, output.vocab) is not None


def claim(output: Output, rows: Collection[int], number: int = 1) -> list[Unit]:
    """Claim a retry round of these rows; returns its units."""
    token_bytes = sum(column.token_bytes for column in output.columns)
    claim_round(output.store, output.job, output.index, token_bytes, rows, number)
    return [unit for unit in read_rounds(output.store) if round_of_unit(unit.unit) == number]


def retry(output: Output, rows: Sequence[int], number: int = 1, failed: Sequence[int] = ()) -> list[Unit]:
    """Commit a retry round of these rows and write the manifest anew; returns the round's units."""
    units = claim(output, rows, number)
    for unit in units:
        commit_unit(output, unit, failed)
    write_views(output)
    return units


def split(output: Output, unit: Unit) -> tuple[Unit, Unit]:
    """Commit a unit as split; returns its parts, which are not committed."""
    rows = PreparedRows(output.store, output.index).of(unit)
    keep = output.job.capture.keep
    parts = halve(unit, [RowLength(r.index, len(r.input_ids), r.kept(keep), True) for r in rows])
    store_parts(output.store, unit, parts)
    assert Ledger(output.store).commit_split(Split(unit.unit, tuple(part.unit for part in parts), "it kills workers"))
    return parts


def check_rows(output: Output, rows: Sequence[int]) -> None:
    """Assert that verify and the readers find these rows, with their states, and no others."""
    report = verify(output.url)
    assert report.ok, report.problems
    assert (report.rows_ok, report.rows_failed) == (len(rows), output.index.usable - len(rows))
    data = HiddenStates(output.url, check=True)
    assert [item["row"] for item in data] == list(rows)
    for item in data:
        for name in NAMES:
            assert item[name].view(torch.uint8).numpy().tobytes() == output.stored[item["row"]][name].tobytes()
    assert list(read_output(Path(output.url))) == list(rows)
    assert load_token_counts(output.url).rows == len(rows)
