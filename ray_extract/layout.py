"""Names: object keys under the output prefix, /dev/shm folders and request ids. Pure functions.

Everything that must sort is zero-padded, since object stores and loaders sort keys as strings.
"""

import dataclasses
import re

RUN_KEY = "run.json"
PLAN_KEY = "plan/plan.json"
UNITS_KEY = "plan/units.parquet"
PROGRESS_KEY = "progress.json"
SUMMARY_KEY = "summary.json"
SUCCESS_KEY = "_SUCCESS"
HEAD_KEY = "head.safetensors"
COUNTS_KEY = "token-counts.safetensors"
SHARDS_PREFIX = "shards/"
COMMITS_PREFIX = "commits/"
SEGMENTS_PREFIX = "segments/"
DRIVES_PREFIX = "drives/"

SHM_PREFIX = "ray_extract-"
EXTENSIONS = {"raw": "safetensors", "parquet": "parquet"}

_INPUT = "plan/input-"
_COMMIT = re.compile(r"^commits/((?:u|r\d{4}-)\d{8}(?:\.\d+)*)\.json$")
_SEGMENT = re.compile(r"^segments/((?:u|r\d{4}-)\d{8}(?:\.\d+)*)-([0-9a-f]{64})\.parquet$")
_ROUND = re.compile(r"^plan/retry-(\d{4})\.json$")
_SPLIT = re.compile(r"^plan/split-((?:u|r\d{4}-)\d{8}(?:\.\d+)*)\.json$")
_MANIFEST = re.compile(r"^manifest-(\d{6})\.parquet$")
_RID = re.compile(r"rx1\.([0-9a-z]+)\.([0-9]{4})\.([0-9]{6,})\.([0-9]{8})\.([0-9]{2})\.")


def rows_key(part: int) -> str:
    """Key of one part of the prepared rows."""
    return f"plan/rows-{part:06d}.parquet"


def input_key(part: int) -> str:
    """Key of one part of the rows in the order of the input, while the plan is made, where it has another order."""
    return f"{_INPUT}{part:06d}.parquet"


def is_input(key: str) -> bool:
    """Whether a key is one of input_key."""
    return key.startswith(_INPUT)


def unit_id(number: int) -> str:
    """Identifier of a planned unit."""
    return f"u{number:08d}"


def child_id(unit: str, number: int) -> str:
    """Identifier of a part of a unit that was split; parts sort where the unit did."""
    return f"{unit}.{number}"


def ancestors(unit: str) -> list[str]:
    """The units that were split for this one to be, the largest first."""
    parts = unit.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def split_key(unit: str) -> str:
    """Key of the parts of a unit that was split."""
    return f"plan/split-{unit}.json"


def unit_of_split(key: str) -> str | None:
    """Inverse of split_key, or None if the key is of something else."""
    match = _SPLIT.match(key)
    return match[1] if match else None


def retry_unit_id(round_number: int, number: int) -> str:
    """Identifier of a unit of a retry round; these sort by round, and before those of the plan."""
    return f"r{round_number:04d}-{number:08d}"


def round_of_unit(unit: str) -> int | None:
    """Number of the retry round that a unit is of, or None if it is of the plan."""
    return int(unit[1:5]) if unit.startswith("r") else None


def round_key(number: int) -> str:
    """Key of the units of a retry round; rounds count from 1."""
    return f"plan/retry-{number:04d}.json"


def round_of_key(key: str) -> int | None:
    """Inverse of round_key, or None if the key is of something else."""
    match = _ROUND.match(key)
    return int(match[1]) if match else None


def shard_key(unit: str, attempt: str, fmt: str) -> str:
    """Key of the shard that one attempt at a unit writes."""
    return f"{SHARDS_PREFIX}{unit}.{attempt}.{EXTENSIONS[fmt]}"


def unit_of_shard(key: str) -> str:
    """The unit in a shard's key. Its name may hold dots, those of an attempt and an ending do not."""
    return key.removeprefix(SHARDS_PREFIX).rsplit(".", 2)[0]


def commit_key(unit: str) -> str:
    """Key of the only commit point of a unit."""
    return f"{COMMITS_PREFIX}{unit}.json"


def unit_of_commit(key: str) -> str | None:
    """Inverse of commit_key; None for what is no commit, such as a file that a copy or a network share left there."""
    match = _COMMIT.match(key)
    return match[1] if match else None


def segment_key(first: str, sha256: str) -> str:
    """Key of a segment of commits, by the first of its units and the hex digest of its bytes."""
    return f"{SEGMENTS_PREFIX}{first}-{sha256}.parquet"


def parse_segment(key: str) -> tuple[str, str] | None:
    """Inverse of segment_key, or None if the key is of something else."""
    match = _SEGMENT.match(key)
    return (match[1], match[2]) if match else None


def drive_key(nonce: str) -> str:
    """Key of what one driver says that it did."""
    return f"{DRIVES_PREFIX}{nonce}.json"


def manifest_key(number: int) -> str:
    """Key of the manifest with this number; manifests are never overwritten."""
    return f"manifest-{number:06d}.parquet"


def manifest_number(key: str) -> int | None:
    """The number in a manifest's key, or None if the key is no manifest."""
    match = _MANIFEST.match(key)
    return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestId:
    """What a request's id says: which row of which generation of which extent it fills.

    The text form has fixed width and ends in a dot, because SGLang matches the ids of aborts by prefix.
    """

    nonce: str
    slot: int
    generation: int
    row: int
    attempt: int

    def __str__(self) -> str:
        return f"{extent_prefix(self.nonce, self.slot, self.generation)}{self.row:08d}.{self.attempt % 100:02d}."


def extent_prefix(nonce: str, slot: int, generation: int) -> str:
    """The common prefix of the ids of all rows of one generation of an extent."""
    return f"rx1.{nonce}.{slot:04d}.{generation:06d}."


def parse_rid(rid: str) -> RequestId | None:
    """Parse a request id; None for ids that are not ours (warm-up, health checks, other clients)."""
    match = _RID.fullmatch(rid)
    if match is None:
        return None
    nonce, slot, generation, row, attempt = match.groups()
    return RequestId(nonce, int(slot), int(generation), int(row), int(attempt))
