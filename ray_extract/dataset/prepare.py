"""Records -> prepared rows: every record of the input becomes exactly one row, in order, usable or with a reason.

Rows are tokenized once and stored under the output prefix, so that every worker and every resumed run sees the same
token ids whatever tokenizer, template or clock it has.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_extract.config import Job
from ray_extract.dataset.chat import Encoder, Tokens, Unusable
from ray_extract.dataset.source import SourceRecord, read_records
from ray_extract.errors import ConfigError
from ray_extract.model import ModelShape

# SGLang keeps a few positions of its context for output: it takes prompts of up to context - 6 tokens.
CONTEXT_SLACK = 8

MAX_REASON = 200
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
        truncated: whether the end was cut off (`overlong: truncate`).
    """

    index: int
    row_id: str
    source: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    reason: str | None = None
    truncated: bool = False

    def kept(self, keep: str) -> int:
        """Tokens whose states are stored under `capture.keep`."""
        return len(self.input_ids) if keep == "all" else int(np.count_nonzero(self.loss_mask))


def reason_kind(reason: str) -> str:
    """The part of a skip reason to count by."""
    return reason.partition(":")[0]


def row_id(input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8]) -> str:
    """Identity of a usable row: 32 hex characters of sha256(ids as i32 little-endian, a zero byte, mask)."""
    digest = hashlib.sha256(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(b"\0")
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.hexdigest()[:32]


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


def prepare(job: Job, shape: ModelShape) -> Iterator[PreparedRow]:
    """Tokenize the whole data set, one row at a time.

    Raises:
        ConfigError, DatasetError: the data set as a whole cannot be prepared.
    """
    limit = token_limit(job, shape)
    encoder = Encoder(job.model, shape.path, job.dataset, shape.vocab_size)
    for index, record in enumerate(read_records(job.dataset)):
        try:
            if record.value is None:
                raise Unusable(record.reason or "malformed record")
            tokens, truncated = _fit(encoder.encode(record.value), limit, job.dataset.overlong)
            _require_kept(tokens, truncated, job)
        except Unusable as unusable:
            yield _skipped(index, record, str(unusable))
            continue
        yield PreparedRow(
            index=index,
            row_id=row_id(tokens.input_ids, tokens.loss_mask),
            source=record.source,
            input_ids=tokens.input_ids,
            loss_mask=tokens.loss_mask,
            truncated=truncated,
        )


def _fit(tokens: Tokens, limit: int, overlong: str) -> tuple[Tokens, bool]:
    length = len(tokens.input_ids)
    if length == 0:
        raise Unusable("empty row")
    if length <= limit:
        return tokens, False
    if overlong == "skip":
        raise Unusable(f"overlong: {length} > {limit} tokens")
    # Copies, since a view would keep the whole row in memory.
    return Tokens(tokens.input_ids[:limit].copy(), tokens.loss_mask[:limit].copy()), True


def _require_kept(tokens: Tokens, truncated: bool, job: Job) -> None:
    # A mask that a data set brings along may be all zero on purpose, unless only supervised tokens are stored.
    if (truncated or job.capture.keep == "supervised") and not tokens.loss_mask.any():
        detail = f": all of them lie beyond token {len(tokens.loss_mask)}, where the row was cut" if truncated else ""
        raise Unusable(f"no supervised token{detail}")


def _skipped(index: int, record: SourceRecord, reason: str) -> PreparedRow:
    raw = json.dumps(record.value, sort_keys=True, default=_jsonable) if record.value is not None else reason
    return PreparedRow(
        index=index,
        row_id=hashlib.sha256(raw.encode("utf-8", "replace")).hexdigest()[:32],
        source=record.source,
        input_ids=np.empty(0, np.int32),
        loss_mask=np.empty(0, np.uint8),
        reason=_one_line(reason),
    )


def _jsonable(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def _one_line(reason: str) -> str:
    """Reasons quote the input, which may be long, have line breaks, or not be encodable."""
    clean = _SPACE.sub(" ", reason[: 2 * MAX_REASON]).encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_REASON else clean[: MAX_REASON - 1] + "…"
