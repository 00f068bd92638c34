"""Records -> prepared rows: every record of the input becomes exactly one row, in order, usable or with a reason.

Rows are tokenized once and stored under the output prefix, so that every worker and every resumed run sees the same
token ids whatever tokenizer, template or clock it has.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_extract.config import Job
from ray_extract.dataset.chat import Encoder, Overlong, Tokens, Unusable
from ray_extract.dataset.source import SourceRecord, read_records
from ray_extract.errors import ConfigError, DatasetError
from ray_extract.model import ModelShape
from ray_extract.shards.image import kept_tokens, row_digest

# SGLang keeps a few positions of its context for output: it takes prompts of up to context - 6 tokens.
CONTEXT_SLACK = 8

MAX_REASON = 200
MAX_RENDERED = 400
_SPACE = re.compile(r"\s+")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PreparedRow:
    """One record of the input, tokenized, or the reason why it cannot be used.

    Args:
        index: position among all records, from 0.
        row_id: 32 hex characters; of the token ids and mask, or for a skipped row of the record.
        source: file and record number, see source.SourceRecord.
        input_ids: i32 [n]; empty if skipped.
        loss_mask: u8 [n].
        reason: why the row is skipped; the text before the first colon is its kind.
        truncated: whether a part was cut off (`overlong`: `right` or `left`).
        rendered: of a skipped conversation, its text, where that shows why; shortened, and not stored with it.
    """

    index: int
    row_id: str
    source: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    reason: str | None = None
    truncated: bool = False
    rendered: str | None = None

    def kept(self, keep: str) -> int:
        """Tokens whose states are stored under `capture.keep`."""
        return kept_tokens(self.loss_mask, keep)


def reason_kind(reason: str) -> str:
    """The part of a skip reason to count by."""
    return reason.partition(":")[0]


def row_id(input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8]) -> str:
    """Identity of a usable row: the first 32 hex characters of its digest."""
    return row_digest(input_ids, loss_mask).hex()[:32]


def chance(seed: int, purpose: str, index: int) -> int:
    """A number of 64 random bits that only its arguments decide."""
    return int.from_bytes(hashlib.blake2b(f"{purpose} {seed} {index}".encode(), digest_size=8).digest(), "big")


def token_limit(job: Job, shape: ModelShape) -> int:
    """Longest row in tokens.

    Raises:
        ConfigError: `dataset.max_tokens` is more than the engine takes, or the context leaves no room at all.
    """
    context = job.engine.context_length or shape.context_length
    most = context - CONTEXT_SLACK
    if most < 1:
        raise ConfigError(f"engine.context_length = {context}: must be more than {CONTEXT_SLACK}")
    wanted = job.dataset.max_tokens
    if wanted is not None and wanted > most:
        raise ConfigError(
            f"dataset.max_tokens = {wanted}: a context of {context} tokens takes rows of {most} at most; "
            "lower it, or raise engine.context_length if the model allows"
        )
    return wanted or most


class Preparer:
    """Turns records into rows, each by itself.

    Args:
        job, shape: what by.

    Raises:
        ConfigError: see token_limit.
    """

    def __init__(self, job: Job, shape: ModelShape) -> None:
        self._job = job
        self._limit = token_limit(job, shape)
        # What is cut must be tokenized whole: where its tokens end, its beginning alone does not say.
        limit = self._limit if job.dataset.overlong in ("skip", "refuse") else None
        self._encoder = Encoder(job.model, shape.path, job.dataset, shape.vocab_size, limit)

    def __call__(self, index: int, record: SourceRecord) -> PreparedRow:
        """One record as a row.

        Raises:
            ConfigError, DatasetError: the data set as a whole cannot be prepared.
        """
        return _prepare(index, record, self._encoder, self._limit, self._job)


def prepare(job: Job, shape: ModelShape) -> Iterator[PreparedRow]:
    """Stream the rows of a data set in the order of the input, without storing any.

    Raises:
        ConfigError, DatasetError: the data set as a whole cannot be prepared.
    """
    return itertools.starmap(Preparer(job, shape), enumerate(read_records(job.dataset)))


def _prepare(index: int, record: SourceRecord, encoder: Encoder, limit: int, job: Job) -> PreparedRow:
    data = job.dataset
    try:
        if record.value is None:
            raise Unusable(record.reason or "malformed record")
        if data.sample < 1 and chance(data.seed, "sample", index) >= data.sample * (1 << 64):
            raise Unusable("not sampled")
        whole = encoder.encode(record.value)
        if data.overlong == "refuse" and len(whole.input_ids) > limit:
            raise _refused(record, f"{len(whole.input_ids)} tokens are more than {limit}")
        tokens, truncated = _fit(whole, limit, data.overlong)
        _require(tokens, whole, job)
    except Unusable as unusable:
        if data.overlong == "refuse" and isinstance(unusable, Overlong):
            raise _refused(record, unusable.told) from None
        return _skipped(index, record, unusable)
    return PreparedRow(
        index=index,
        row_id=row_id(tokens.input_ids, tokens.loss_mask),
        source=record.source,
        input_ids=tokens.input_ids,
        loss_mask=tokens.loss_mask,
        truncated=truncated,
    )


def _refused(record: SourceRecord, what: str) -> DatasetError:
    return DatasetError(
        f"{record.source}: {what}, and dataset.overlong = refuse; "
        "set it to skip, right or left, or raise dataset.max_tokens"
    )


def _fit(tokens: Tokens, limit: int, overlong: str) -> tuple[Tokens, bool]:
    length = len(tokens.input_ids)
    if length == 0:
        raise Unusable("empty row")
    if length <= limit:
        return tokens, False
    if overlong == "skip":
        raise Unusable(f"overlong: {length} > {limit} tokens")
    part = slice(None, limit) if overlong == "right" else slice(-limit, None)
    # Copies, since a view would keep the whole row in memory.
    return Tokens(tokens.input_ids[part].copy(), tokens.loss_mask[part].copy()), True


def _require(tokens: Tokens, whole: Tokens, job: Job) -> None:
    """Raises Unusable for a row that would teach nothing, or that a filter leaves out."""
    length, supervised = len(tokens.input_ids), int(np.count_nonzero(tokens.loss_mask))
    if not supervised and whole.loss_mask.any():
        side = "beyond token" if job.dataset.overlong == "right" else "before the last"
        raise Unusable(f"no supervised token: all of them lie {side} {length}, where the row was cut")
    # A mask that a data set brings along may be all zero on purpose, unless only supervised tokens are stored.
    if not supervised and job.capture.keep == "supervised":
        raise Unusable("no supervised token")
    if length < job.dataset.min_tokens:
        raise Unusable(f"too short: {length} < {job.dataset.min_tokens} tokens")
    if supervised < job.dataset.min_supervised:
        raise Unusable(f"too few supervised tokens: {supervised} < {job.dataset.min_supervised}")


def _skipped(index: int, record: SourceRecord, unusable: Unusable) -> PreparedRow:
    reason = str(unusable)
    raw = json.dumps(record.value, sort_keys=True, default=_jsonable) if record.value is not None else reason
    return PreparedRow(
        index=index,
        row_id=hashlib.sha256(raw.encode("utf-8", "replace")).hexdigest()[:32],
        source=record.source,
        input_ids=np.empty(0, np.int32),
        loss_mask=np.empty(0, np.uint8),
        reason=_one_line(reason),
        rendered=None if unusable.rendered is None else _shortened(unusable.rendered),
    )


def _jsonable(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def _one_line(reason: str) -> str:
    """Reasons quote the input, which may be long, have line breaks, or not be encodable."""
    clean = _SPACE.sub(" ", reason[: 2 * MAX_REASON]).encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_REASON else clean[: MAX_REASON - 1] + "…"


def _shortened(text: str) -> str:
    """A rendering's beginning and end on one line, its line breaks visible."""
    half = MAX_RENDERED // 2
    short = text if len(text) <= MAX_RENDERED else f"{text[:half]} … {text[-half:]}"
    return json.dumps(short.encode("utf-8", "replace").decode(), ensure_ascii=False)
