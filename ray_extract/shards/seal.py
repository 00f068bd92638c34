"""Sealing an image: the last step before it is a shard. Pure functions on memory."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ray_extract.capture.digest import digest_ids
from ray_extract.records import RowStatus
from ray_extract.shards.base import RowStats, sha256_of
from ray_extract.shards.image import ImageLayout
from ray_extract.shards.raw import image_shard

U8 = npt.NDArray[np.uint8]


def seal(
    layout: ImageLayout,
    buffer: memoryview,
    *,
    covered: npt.NDArray[np.integer],
    n_tokens: npt.NDArray[np.integer],
    digests: npt.NDArray[np.uint64],
    stats: RowStats,
    statuses: U8,
) -> U8:
    """Write what is known of each row into the image, and zero the states of rows that are not OK.

    Fails closed: a row that the caller calls OK is not, unless all its tokens were covered, the digest of the ids
    that the engine ran is that of the image's ids, and every stored value is finite.

    Args:
        layout, buffer: an image whose table is written and whose states are filled as far as they go.
        covered: [R], prompt tokens that the engine published.
        n_tokens: [R], prompt tokens of the plan.
        digests: u64 [R, 1+K], as published by the engine.
        stats: as published by the engine.
        statuses: u8 [R], RowStatus as far as the caller knows.

    Returns:
        u8 [R], the final statuses, as written. Digests and statistics of rows that are not OK are written as 0.
    """
    final = np.array(statuses, dtype=np.uint8)
    ids, seqlens = layout.small(buffer, "input_ids"), layout.small(buffer, "cu_seqlens")
    for row in np.flatnonzero(final == RowStatus.OK):
        if covered[row] != n_tokens[row]:
            final[row] = RowStatus.INCOMPLETE
        elif int(digests[row, 0]) != digest_ids(
            ids[int(seqlens[row]) : int(seqlens[row + 1])].astype(np.int32, copy=False)
        ):
            final[row] = RowStatus.MISMATCH
        elif stats.nonfinite[row].any():
            final[row] = RowStatus.NONFINITE
    ok = final == RowStatus.OK
    kept = layout.small(buffer, "cu_kept")
    for column in layout.columns:
        state = layout.state_bytes(buffer, column)
        for row in np.flatnonzero(~ok):
            state[int(kept[row]) : int(kept[row + 1])] = 0
    layout.small(buffer, "status")[...] = final
    for name, values in (
        ("digest", digests),
        ("sumsq", stats.sumsq),
        ("amax", stats.amax),
        ("nonfinite", stats.nonfinite),
        ("zero", stats.zero),
    ):
        layout.small(buffer, name)[...] = np.where(ok[:, None], values, np.zeros((), values.dtype))
    return final


def check_digests(layout: ImageLayout, buffer: memoryview, rows: Iterable[int]) -> list[int]:
    """The rows of a sealed image, out of `rows`, whose bytes do not have the digests sealed with them.

    Takes about 0.2 CPU-seconds a GiB. The states of a row that is not OK must be zero.

    Args:
        layout, buffer: the image.
        rows: places in it, ascending.
    """
    return list(image_shard(layout, buffer).differences(rows))


def sha256_other(layout: ImageLayout, buffer: memoryview) -> str:
    """Hex SHA-256 of every byte of the image that is not a state."""
    return sha256_of(layout.other_bytes(buffer))
