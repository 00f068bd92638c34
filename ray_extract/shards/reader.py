"""Open a shard of either format."""

from ray_extract.errors import ShardError
from ray_extract.shards.base import Shard
from ray_extract.shards.parquet import open_parquet
from ray_extract.shards.raw import open_raw
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
    raise ShardError(f"{key}: format {format!r} is unknown to this release; it reads raw and parquet")
