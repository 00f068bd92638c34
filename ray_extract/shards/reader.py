"""Open a shard of either format, from a store or from memory."""

from ray_extract.errors import ShardError
from ray_extract.shards.base import Shard
from ray_extract.shards.parquet import open_parquet, open_parquet_image
from ray_extract.shards.raw import open_raw, open_raw_image
from ray_extract.store import Store


def open_shard(store: Store, key: str, format: str) -> Shard:
    """Open a shard by its format, `raw` or `parquet`, as the manifest and the receipt name it.

    Raises:
        NotFound: no such object.
        ShardError: truncated, altered, or not a shard of this release; an unknown format.
        StoreError: the store failed.
    """
    if format == "raw":
        return open_raw(store, key)
    if format == "parquet":
        return open_parquet(store, key)
    raise _unknown(f"{store.url}/{key}", format)


def open_image(where: str, format: str, image: memoryview) -> Shard:
    """Open a shard whose object lies in memory, as open_shard does; nothing is copied.

    Args:
        where: the object's URL and key, for messages.
        format: `raw` or `parquet`.
        image: its bytes. A raw shard's states are views of it, so bytes of states that are not read may be missing.

    Raises:
        ShardError: truncated, altered, or not a shard of this release; an unknown format.
    """
    if format == "raw":
        return open_raw_image(where, image)
    if format == "parquet":
        return open_parquet_image(where, image)
    raise _unknown(where, format)


def _unknown(where: str, format: str) -> ShardError:
    return ShardError(f"{where}: format {format!r} is unknown to this release; it reads raw and parquet")
