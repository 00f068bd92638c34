"""The run that an export reads: what it captured, and whether a trainer can use that."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_extract.capture.boundaries import from_boundary
from ray_extract.counts import read_counts
from ray_extract.errors import ConfigError, NotFound
from ray_extract.ledger import Ledger, RunIdentity, latest_manifest, read_manifest
from ray_extract.presets import DraftConfig, Target, check_boundaries, default_boundaries, needs
from ray_extract.shards.image import FP8, ITEMSIZE, TORCH_TO_CODE
from ray_extract.store import open_store


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A committed run.

    Args:
        url: absolute.
        identity: of the run.
        manifest: key of the manifest that was read.
        rows: lines of the manifest, so rows of the data set.
        not_ok: those without states, by kind of reason.
        vocab_size: tokens of the model's vocabulary, or None if the run has no token counts.
        fingerprint: sha256 hex of the run's identity and of which rows have which digests: equal for equal states,
            wherever the output lies.
    """

    url: str
    identity: RunIdentity
    manifest: str
    rows: int
    not_ok: dict[str, int]
    vocab_size: int | None
    fingerprint: str

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Captured, ascending."""
        return tuple(self.identity.capture["boundaries"])

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of one token, as readers give it."""
        return int(self.identity.capture["hidden"]) * ITEMSIZE[TORCH_TO_CODE[self.dtype]]

    @property
    def dtype(self) -> str:
        """Torch's name of the states' type, as readers give them: of fp8, bfloat16."""
        stored = str(self.identity.capture["dtype"])
        return "bfloat16" if TORCH_TO_CODE[stored] == FP8 else stored


def open_source(url: str, storage_options: Mapping[str, Any]) -> Source:
    """Read a run's identity and its latest manifest.

    Raises:
        ConfigError: not the output of a run.
        ShardError: the run has not finished.
        StoreError: the store failed.
    """
    store = open_store(url, dict(storage_options))
    identity = Ledger(store).identity()
    if identity is None:
        raise ConfigError(f"{url}: no run.json there; name the output.url of a run")
    table = read_manifest(store)
    bad = table.filter(pc.not_equal(table.column("status"), "ok"))
    kinds = Counter(
        f"{'skipped by' if status == 'skipped' else 'failed in'} the run: {(reason or 'unknown').partition(':')[0]}"
        for status, reason in zip(bad.column("status").to_pylist(), bad.column("reason").to_pylist(), strict=True)
    )
    try:
        vocab_size = len(read_counts(store)[0].all)
    except NotFound:
        vocab_size = None
    manifest = latest_manifest(store) or ""
    return Source(store.url, identity, manifest, len(table), dict(kinds), vocab_size, _fingerprint(identity, table))


def _fingerprint(identity: RunIdentity, table: pa.Table) -> str:
    digest = hashlib.sha256(json.dumps(identity.to_json(), sort_keys=True).encode())
    for name in ("row_id", "status"):
        digest.update("\n".join(table.column(name).to_pylist()).encode())
    lists = table.column("digests").combine_chunks()
    for numbers in (table.column("row"), pc.fill_null(pc.list_value_length(lists), 0), lists.flatten()):
        digest.update(np.ascontiguousarray(numbers.to_numpy()).tobytes())
    return digest.hexdigest()


def num_layers(identity: RunIdentity) -> int:
    """N of the model that a run captured.

    Raises:
        ConfigError: the run began before this was recorded.
    """
    found = identity.model.get("num_layers")
    if isinstance(found, int):
        return found
    raise ConfigError(
        "this run does not say how many layers its model has (run.json: model.num_layers); extract it again"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Which states an export writes.

    Args:
        boundaries: in the trainer's order.
        states: their names, in the same order.
        last: name of the state after the last layer, or None.
        layer_ids: the boundaries in the trainer's numbering.
    """

    boundaries: tuple[int, ...]
    states: tuple[str, ...]
    last: str | None
    layer_ids: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All states, the last one last."""
        return (*self.states, *([self.last] if self.last else []))


def choose(
    source: Source, target: Target, boundaries: Sequence[int] | None = None, draft: DraftConfig | None = None
) -> Choice:
    """Which of a run's states a target reads.

    Args:
        source: the run.
        target: the trainer and its strategy.
        boundaries: asked for, in the trainer's order.
        draft: the draft's config, which says the same by its layer ids. Without both, the boundaries of the run if
            there are as many as the target reads, else the trainer's default.

    Raises:
        ConfigError: the run lacks a state, or has not all tokens; says what to capture.
    """
    layers = num_layers(source.identity)
    captured, capture = source.boundaries, source.identity.capture
    if draft is not None:
        bounds = draft.boundaries(target, layers)
        if boundaries is not None and tuple(boundaries) != bounds:
            raise ConfigError(
                f"--boundaries {','.join(map(str, boundaries))} contradicts --draft-config {draft.path}, which means "
                f"{','.join(map(str, bounds))}; leave one of the two out"
            )
    elif boundaries is not None:
        bounds = tuple(boundaries)
        check_boundaries(bounds, target, layers)
    else:
        inner = tuple(b for b in captured if b < layers)
        if inner and target.count in (None, len(inner)):
            bounds = inner
        else:
            bounds = default_boundaries(target, layers)
            if target.count is not None and len(inner) > target.count and set(bounds) <= set(inner):
                raise ConfigError(
                    f"{source.url}: has the boundaries {list(captured)}, and {target.name} reads {target.count}; say "
                    f"which with --boundaries (the trainer's default is {','.join(map(str, bounds))}) or --draft-config"
                )
    need = needs(target, layers, bounds)
    if capture["keep"] != "all":
        raise ConfigError(
            f"{source.url}: has the states of some tokens only (capture.keep = {capture['keep']}), and a draft "
            f"attends to every token before them; extract again into another output.url with {need}"
        )
    missing = [f"boundary {b}" for b in need.boundaries if b not in captured]
    if need.final and not capture["final"]:
        missing.append("the final state (after the norm)")
    if missing:
        norm = {"after": " after the final norm", "before": f" before the final norm, boundary {layers}", None: ""}
        last = f", and the last state{norm[target.last]}" if target.last else ""
        has = f"{list(captured)}{' and final' if capture['final'] else ''}"
        raise ConfigError(
            f"{source.url}: {target.name} reads the boundaries {list(bounds)}{last}; the run lacks "
            f"{', '.join(missing)} (it has {has}). Extract again into another output.url with {need}"
        )
    return Choice(
        bounds,
        tuple(f"state.{b}" for b in bounds),
        target.last_state(layers),
        tuple(from_boundary(b, target.numbering, layers) for b in bounds),
    )
