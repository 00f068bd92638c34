"""The nouns that cross process borders. Standard library only; no record ever carries a tensor.

Row        one prompt or conversation, by its position in the prepared data set
Unit       an ordered range of rows that makes one shard
Attempt    one try at a unit; its name is part of the shard's key
Receipt    what a successful attempt hands back, and what a commit stores
Split      what a commit stores of a unit that no attempt succeeds at
"""

import base64
import dataclasses
import enum
from typing import Any, Self

RECORD_VERSION = 1


class RowStatus(enum.IntEnum):
    """Why a row's states are or are not in its shard; stored as u8 in the shard's `status` column."""

    OK = 0
    REJECTED = 1  # the engine answered with an error, or aborted the request
    INCOMPLETE = 2  # a normal answer, but not every token was captured
    MISMATCH = 3  # the engine ran other token ids than the plan's
    FAULT = 4  # the capture plugin reported a fault code
    ENGINE_DIED = 5  # the engine died with this row in flight, more often than allowed
    NONFINITE = 6  # a state holds NaN or infinity


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """An ordered range of prepared rows that makes one shard.

    Rows `first <= index < end` of the prepared data set, without those that carry a skip reason; of a unit of a retry
    round, its members alone.

    Args:
        unit: identifier, see layout.unit_id and layout.retry_unit_id.
        first: first prepared row.
        end: one past the last prepared row.
        rows: usable rows in the range.
        tokens: prompt tokens of the usable rows.
        kept: tokens whose states are stored.
        nbytes: bytes of states in the shard (the image adds headers, ids and masks).
        members: rows of a unit of a retry round, ascending; None for a unit of the plan.
    """

    unit: str
    first: int
    end: int
    rows: int
    tokens: int
    kept: int
    nbytes: int
    members: tuple[int, ...] | None = None

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Inverse of dataclasses.asdict and JSON."""
        members = record["members"]
        return cls(**{**record, "members": None if members is None else tuple(members)})


@dataclasses.dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that is in its shard by place only: zeroed states, a status other than OK."""

    row: int
    status: RowStatus
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """Proof of one attempt's shard; stored as the unit's commit.

    Args:
        unit, attempt, key: what was done, and the object that holds it.
        format: `raw` or `parquet`.
        size: bytes of the object.
        sha256: hex digest of every byte of the image that is not a state (for Parquet: of the same bytes of the
            image that the file was written from).
        rows: rows in the shard, failed ones included.
        tokens: prompt tokens of the rows that are OK.
        kept: stored tokens of the rows that are OK.
        failures: the rows that are not OK.
        digests: u64 little-endian [rows, 1 + states]; column 0 digests the token ids, see capture.digest.
        environment: versions and hardware; recorded, never compared.
        seconds: where the time went, by stage.
    """

    unit: str
    attempt: str
    key: str
    format: str
    size: int
    sha256: str
    rows: int
    tokens: int
    kept: int
    failures: tuple[RowFailure, ...]
    digests: bytes
    environment: dict[str, str]
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form; digests are base64: 440 KB for 8192 rows of five numbers, against 800 KB in decimal."""
        record = dataclasses.asdict(self)
        record["version"] = RECORD_VERSION
        record["failures"] = [[f.row, f.status.name.lower(), f.reason] for f in self.failures]
        record["digests"] = base64.b64encode(self.digests).decode()
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Inverse of to_json. Raises ValueError for another version."""
        fields = dict(record)
        version = fields.pop("version", None)
        if version != RECORD_VERSION:
            raise ValueError(f"receipt version {version!r}; this release reads {RECORD_VERSION}")
        fields["failures"] = tuple(
            RowFailure(row, RowStatus[name.upper()], why) for row, name, why in fields["failures"]
        )
        fields["digests"] = base64.b64decode(fields["digests"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Says that a unit is extracted in parts; stored as its commit.

    Args:
        unit: the unit.
        split: identifiers of the parts, which are units themselves.
        reason: why it could not be extracted whole.
    """

    unit: str
    split: tuple[str, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {"version": RECORD_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Inverse of to_json. Raises ValueError for another version."""
        fields = dict(record)
        version = fields.pop("version", None)
        if version != RECORD_VERSION:
            raise ValueError(f"split version {version!r}; this release reads {RECORD_VERSION}")
        return cls(**{**fields, "split": tuple(fields["split"])})
