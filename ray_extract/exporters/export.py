"""`ray-extract export`: a committed run in the format of a trainer. Streams rows; holds one in memory at a time.

Rows in = exported + left out, each with its reason. Run again, it writes what is missing and compares what is there
with the run's states, bit by bit. Every state is checked against its digest as it is read.
"""

import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ray_extract.errors import ConfigError, OutOfSpace, ShardError
from ray_extract.exporters import specforge, speculators
from ray_extract.exporters.folder import LEFT_OUT_NAME, ExportFolder
from ray_extract.exporters.rows import why_left_out
from ray_extract.exporters.source import Choice, Source, choose, open_source
from ray_extract.plan import show_bytes
from ray_extract.presets import TARGETS, DraftConfig, Target
from ray_extract.readers.dataset import HiddenStates
from ray_extract.readers.vocab import add_counts, vocab_maps

log = logging.getLogger(__name__)

_PROGRESS_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What to export.

    Args:
        url: output of the run.
        target: a name in presets.TARGETS.
        out: the folder.
        boundaries: which, in the draft's order; see source.choose.
        draft_config: the draft's config.json; gives boundaries and vocabulary sizes.
        draft_vocab: tokens of the draft's vocabulary; its config's `draft_vocab_size` when absent. No maps are written
            for none, or the target's own size.
        vocab_size: tokens of the target's vocabulary; the draft config's `vocab_size` or that of the run's
            token counts when absent.
        max_length: cut rows to this many tokens, as the trainer would.
        min_supervised: leave out rows with fewer supervised tokens.
        link: speculators only: write no states; speculators_backend reads them from the run.
        fp8: speculators only: write the states as its backend `fp8` reads them.
        storage_options: of the run's store.
    """

    url: str
    target: str
    out: str
    boundaries: tuple[int, ...] | None = None
    draft_config: str | None = None
    draft_vocab: int | None = None
    vocab_size: int | None = None
    max_length: int | None = None
    min_supervised: int = 1
    link: bool = False
    fp8: bool = False
    storage_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What became of the rows.

    Args:
        out: the folder.
        target: name of it.
        choice: what was written.
        rows: rows of the run's data set.
        exported: those in the export.
        left_out: the others, by reason.
        tokens: exported.
        nbytes: of their states.
        outcomes: files written, kept (there, and equal) and replaced (there, and different).
        link: whether the states stayed in the run.
        warning: what will keep the trainer from using it, or None.
    """

    out: str
    target: str
    choice: Choice
    rows: int
    exported: int
    left_out: dict[str, int]
    tokens: int
    nbytes: int
    outcomes: dict[str, int]
    link: bool
    warning: str | None = None

    def check(self) -> None:
        """Raises ShardError unless rows = exported + left out."""
        if self.rows != self.exported + sum(self.left_out.values()):
            left_out = sum(self.left_out.values())
            raise ShardError(f"{self.rows} rows, but {self.exported} exported + {left_out} left out: rows got lost")

    def lines(self) -> list[str]:
        """For people."""
        reasons = _shown(self.left_out)
        written, kept, replaced = (self.outcomes.get(name, 0) for name in ("written", "kept", "replaced"))
        ids = ", ".join(map(str, self.choice.layer_ids))
        where = "left in the run, for the backend ray_extract" if self.link else show_bytes(self.nbytes)
        return [
            f"rows        {self.rows:,}",
            f"  exported  {self.exported:,}",
            f"  left out  {sum(self.left_out.values()):,}" + (f"   ({reasons})" if reasons else ""),
            f"tokens      {self.tokens:,}",
            f"states      {', '.join(self.choice.names)}; {where}",
            f"files       {written:,} written, {kept:,} there and equal, {replaced:,} there and different, so replaced",
            f"layer ids   [{ids}] in the numbering of {self.target}; the draft's config must say the same",
            f"output      {self.out}",
            *([f"warning     {self.warning}"] if self.warning else []),
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Selection:
    """Which rows are exported.

    Args:
        chosen: i64 [exported], indices into the reader's items.
        rows: i64 [exported], indices in the prepared data set.
        lengths: i64 [exported], exported tokens of each.
        left_out: (row, row id, reason) of usable rows that are not.
        counts: i64 [V], supervised tokens of the exported rows; None without a vocabulary.
    """

    chosen: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    left_out: list[tuple[int, str, str]]
    counts: npt.NDArray[np.int64] | None


def export(request: Request) -> Report:
    """Export a run, or what is left of it.

    Raises:
        ConfigError: the run lacks what the target reads, or the folder holds something else.
        ShardError: a shard's bytes are not what was captured, or a state of a row is zero throughout.
        StoreError: the run's store or the folder failed.
    """
    target = _target(request)
    draft = DraftConfig.read(request.draft_config) if request.draft_config else None
    source = open_source(request.url, request.storage_options)
    draft_vocab, vocab_size = _vocabulary(request, draft, source)
    choice = choose(source, target, request.boundaries, draft)
    identity = {
        "run": source.fingerprint,
        "target": target.name,
        "states": list(choice.names),
        "max_length": request.max_length,
        "min_supervised": request.min_supervised,
        "draft_vocab": draft_vocab,
        "vocab_size": vocab_size if draft_vocab else None,
        "link": request.link,
        "fp8": request.fp8,
    }
    notes = {
        "source": {"url": source.url, "manifest": source.manifest},
        "layer_ids": list(choice.layer_ids),
        "last_state": {None: None, "after": "after the final norm", "before": "before the final norm"}[target.last],
    }
    inside = Path(request.out).expanduser().absolute()
    if "://" not in source.url and inside.resolve().is_relative_to(Path(source.url).resolve()):
        raise ConfigError(f"--out {request.out}: lies inside the run {source.url}; choose a folder outside")
    # Ids and masks alone: no state is read to find out which rows are left out.
    rows = HiddenStates(request.url, states=[], storage_options=request.storage_options)
    with ExportFolder(request.out, identity, notes) as folder:
        selection = _select(rows, target, request, vocab_size if draft_vocab else None)
        if not len(selection.chosen):
            reasons = Counter(reason for _, _, reason in selection.left_out)
            why = _shown(reasons + Counter(source.not_ok))
            raise ConfigError(f"{source.url}: none of its {source.rows} rows can be exported: {why}")
        token_bytes = len(choice.names) * source.state_bytes
        if request.fp8:
            token_bytes = len(choice.names) * int(source.identity.capture["hidden"]) + 4
        if not request.link:
            _check_space(folder, int(selection.lengths.sum()) * token_bytes)
            _write_states(folder, request, target, choice, selection)
        _write_rest(folder, request, target, rows, selection, draft_vocab, source)
        _check_files(folder, target, request, selection)
        report = Report(
            out=str(folder.path),
            target=target.name,
            choice=choice,
            rows=source.rows,
            exported=len(selection.chosen),
            left_out=dict(Counter(reason for _, _, reason in selection.left_out) + Counter(source.not_ok)),
            tokens=int(selection.lengths.sum()),
            nbytes=int(selection.lengths.sum()) * token_bytes,
            outcomes={str(name): count for name, count in folder.outcomes.items()},
            link=request.link,
            warning=_warning(source, target),
        )
    report.check()
    return report


def _target(request: Request) -> Target:
    target = TARGETS.get(request.target)
    if target is None:
        raise ConfigError(f"no export to {request.target}; known: {', '.join(TARGETS)}")
    if request.link and target.trainer != "speculators":
        raise ConfigError(f"--link: only speculators can read states that stay in the run, not {target.trainer}")
    if request.fp8 and (target.trainer != "speculators" or request.link):
        raise ConfigError(
            "--fp8: writes files of states for speculators' backend fp8; "
            + ("--link writes none" if request.link else f"{target.trainer} has nothing that reads it")
        )
    for name, value in (
        ("max-length", request.max_length),
        ("min-supervised", request.min_supervised),
        ("draft-vocab", request.draft_vocab),
        ("vocab-size", request.vocab_size),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1")
    return target


def _vocabulary(request: Request, draft: DraftConfig | None, source: Source) -> tuple[int | None, int | None]:
    """Sizes of the draft's vocabulary, if it is a reduced one, and of the target's."""
    vocab = request.vocab_size or (draft.number("vocab_size") if draft else None) or source.vocab_size
    size = request.draft_vocab or (draft.number("draft_vocab_size") if draft else None)
    if size is None:
        return None, vocab
    if vocab is None:
        raise ConfigError(
            f"--draft-vocab {size}: the target's vocabulary must be known for its map, and this run has no token "
            "counts; give --vocab-size, or --draft-config with vocab_size"
        )
    return (None if size == vocab else size), vocab


def cut(item: Mapping[str, Any], max_length: int | None) -> dict[str, Any]:
    """An item of HiddenStates, its first tokens only; a state depends on no later token, so it stays right."""
    return {name: value if name in ("row", "row_id") else value[:max_length] for name, value in item.items()}


def check_states(item: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raises ShardError if a state of a row is zero throughout, which no model gives: something captured nothing."""
    for name in names:
        state = item[name]
        # The first token settles it almost always.
        if not state[:1].any() and not state.any():
            raise ShardError(
                f"{where}: {name} of row {item['row']} is zero throughout; this is no capture to train on "
                "(a model that hands over nothing at this layer?)"
            )


def _select(rows: HiddenStates, target: Target, request: Request, vocab_size: int | None) -> _Selection:
    chosen: list[int] = []
    numbers: list[int] = []
    lengths: list[int] = []
    left_out: list[tuple[int, str, str]] = []
    counts = np.zeros(vocab_size, dtype=np.int64) if vocab_size else None
    for index in range(len(rows)):
        item = cut(rows[index], request.max_length)
        ids, mask = item["input_ids"].numpy(), item["loss_mask"].numpy()
        reason = why_left_out(mask, target, request.min_supervised)
        if reason:
            left_out.append((item["row"], item["row_id"], reason))
            continue
        chosen.append(index)
        numbers.append(item["row"])
        lengths.append(len(ids))
        if counts is not None:
            add_counts(counts, ids, mask)
    return _Selection(
        np.array(chosen, np.int64), np.array(numbers, np.int64), np.array(lengths, np.int64), left_out, counts
    )


def _warning(source: Source, target: Target) -> str | None:
    if target.trainer != "specforge" or source.dtype == "bfloat16":
        return None
    if target.strategy == "eagle3":
        # modeling/target/target_head.py
        return f"SpecForge's LM head is bfloat16 and these states are {source.dtype}: it will fail; capture in bfloat16"
    return f"SpecForge trains in bfloat16 by default and these states are {source.dtype}: set its model.torch_dtype"


def _write_states(
    folder: ExportFolder, request: Request, target: Target, choice: Choice, selection: _Selection
) -> None:
    data = HiddenStates(request.url, states=choice.names, check=True, storage_options=request.storage_options)
    told = time.monotonic()
    for line, (index, row) in enumerate(zip(selection.chosen.tolist(), selection.rows.tolist(), strict=True)):
        item = cut(data[index], request.max_length)
        check_states(item, choice.names, request.url)
        if target.trainer == "specforge":
            name = specforge.row_name(row)

            def write(out: BinaryIO, item: dict[str, Any] = item) -> None:
                specforge.write_features(out, item, choice, target.strategy)
        else:
            name = speculators.row_name(line)

            def write(out: BinaryIO, item: dict[str, Any] = item) -> None:
                speculators.write_states(out, item, choice, request.fp8)

        if folder.put(name, write) == "replaced":
            log.warning("%s/%s was not what the run holds; replaced", folder.path, name)
        if time.monotonic() - told > _PROGRESS_S:
            told = time.monotonic()
            log.info("%d of %d rows", line + 1, len(selection.chosen))


def _write_rest(
    folder: ExportFolder,
    request: Request,
    target: Target,
    rows: HiddenStates,
    selection: _Selection,
    draft_vocab: int | None,
    source: Source,
) -> None:
    """Everything but the states; what makes a loader take the folder for whole comes last."""
    maps = vocab_maps(selection.counts, draft_vocab) if draft_vocab and selection.counts is not None else None
    left_out = "".join(
        json.dumps({"row": row, "row_id": row_id, "reason": reason}) + "\n"
        for row, row_id, reason in selection.left_out
    ).encode()
    folder.put(LEFT_OUT_NAME, lambda out: _write(out, left_out))
    if target.trainer == "specforge":
        if maps:
            folder.put(specforge.VOCAB_FILE, lambda out: specforge.write_vocab(out, *maps))
        return

    def lines() -> Iterator[speculators.Line]:
        for index in selection.chosen.tolist():
            item = cut(rows[index], request.max_length)
            yield item["input_ids"].numpy(), item["loss_mask"].numpy()

    if maps and draft_vocab:
        for name, array in zip(speculators.vocab_names(draft_vocab), maps, strict=True):
            folder.put(name, lambda out, array=array: np.save(out, array, allow_pickle=False))  # type: ignore[misc]
    numbers = np.stack([selection.chosen, selection.rows], axis=1)
    folder.put(speculators.ROWS_FILE, lambda out: np.save(out, numbers, allow_pickle=False))
    folder.put(speculators.DATA_FILE, lambda out: speculators.write_data(out, lines()))
    folder.put(speculators.INFO_FILE, lambda out: _write(out, speculators.info_json()))
    folder.put(speculators.STATE_FILE, lambda out: _write(out, speculators.state_json(source.fingerprint)))


def _check_files(folder: ExportFolder, target: Target, request: Request, selection: _Selection) -> None:
    """The trainer takes every file of its kind for a row, so there must be no others."""
    if target.trainer == "specforge":
        wanted = {folder.path / specforge.row_name(row) for row in selection.rows.tolist()}
        found = folder.files(specforge.ENDING) + folder.files(f"{specforge.ENDING}.gz")
    else:
        count = 0 if request.link else len(selection.rows)
        wanted = {folder.path / speculators.row_name(line) for line in range(count)}
        found = folder.files(".safetensors")
    for path in found:
        if path not in wanted:
            raise ConfigError(f"{path}: is no file of this export, and the trainer would read it as a row; remove it")
    if len(found) != len(wanted):
        raise ShardError(
            f"{folder.path}: {len(found)} files of rows, {len(wanted)} expected; run the same command again"
        )


def _check_space(folder: ExportFolder, needed: int) -> None:
    there = sum(path.stat().st_size for path in folder.files(""))
    free = folder.free_bytes()
    if needed - there > free:
        raise OutOfSpace(
            f"{folder.path}: the states take {show_bytes(needed)}, {show_bytes(there)} are there, and "
            f"{show_bytes(free)} are free; choose a larger disk (for speculators, --link leaves the states in the run)"
        )


def _write(out: BinaryIO, data: bytes) -> None:
    out.write(data)


def _shown(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} x {reason}" for reason, count in sorted(reasons.items()))
