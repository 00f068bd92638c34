"""A local store that tells what is asked of it, and lets others act in between."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ray_extract.store import LocalStore, ObjectInfo, Upload


class WatchedStore(LocalStore):
    """A folder.

    Args:
        path: of the folder.
        before: called before each operation with its name and key; one at a time.
    """

    def __init__(self, path: str | Path, before: Callable[[str, str], Any] = lambda name, key: None) -> None:
        super().__init__(path)
        self.asked: Counter[str] = Counter()  # by `name folder/`
        self._before, self._lock = before, threading.Lock()

    def _ask(self, name: str, key: str) -> None:
        with self._lock:
            self.asked[f"{name} {key.partition('/')[0]}"] += 1
            self._before(name, key)

    def _put(self, key: str, data: memoryview, create: bool) -> None:
        self._ask("put", key)
        super()._put(key, data, create)

    def _begin(self, key: str, create: bool) -> Upload:
        if key.startswith("manifest"):
            self._ask("put", key)
        return super()._begin(key, create)

    def _get(self, key: str) -> bytes:
        self._ask("get", key)
        return super()._get(key)

    def _get_range(self, key: str, start: int, length: int) -> bytes:
        self._ask("get", key)
        return super()._get_range(key, start, length)

    def _size(self, key: str) -> int:
        self._ask("head", key)
        return super()._size(key)

    def _list(self, folder: str, recursive: bool) -> Iterator[ObjectInfo]:
        self._ask("list", folder)
        yield from super()._list(folder, recursive)
