"""speculators reads our shards where they are: a hidden-states backend named `ray_extract`, without conversion.

    ray-extract export URL --to speculators --link --out DIR    # the data set alone, no states
    python -m ray_extract.exporters.speculators_train --hidden-states-backend ray_extract --data-path DIR ...

speculators 0.9.0 finds backends in the registry of hs-connectors 0.9.0 (`transfer.py`: HiddenStatesBackend) when its
configuration is imported, so `register` must run before; speculators_train does that. The classes below follow those
interfaces by their methods, so that this module imports without hs-connectors.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_extract.errors import ConfigError, NotFound, ShardError
from ray_extract.exporters.export import check_states, cut
from ray_extract.exporters.folder import read_record
from ray_extract.exporters.source import Choice, open_source
from ray_extract.exporters.speculators import ROWS_FILE, stacked
from ray_extract.readers.dataset import HiddenStates

NAME = "ray_extract"


class ShardTransfer:
    """States of the lines of an exported data set, from a run's shards. Follows hs_connectors.HiddenStatesTransfer.

    Can be pickled, and opens the run when it is first used, so each data-loader worker has a store of its own.

    Args:
        data_path: folder of `ray-extract export --to speculators`.
        url: of the run, if it has moved since.
        storage_options: of its store.
        check: compare each row that is read with its digests (about 0.2 CPU-seconds a GiB).

    Raises:
        ConfigError: the folder is no such export, or an unfinished one.
    """

    def __init__(
        self,
        data_path: str,
        url: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        check: bool = True,
    ) -> None:
        record = read_record(Path(data_path))
        identity = record["identity"]
        if not identity["target"].startswith("speculators"):
            raise ConfigError(
                f"{data_path}: an export for {identity['target']}; the backend reads those for speculators"
            )
        self._where = data_path
        self._url = url or record["source"]["url"]
        self._options = dict(storage_options or {})
        self._check = check
        self._run = identity["run"]
        self._max_length = identity["max_length"]
        self._choice = Choice((), tuple(identity["states"][:-1]), identity["states"][-1], ())
        try:
            self._rows = np.load(Path(data_path) / ROWS_FILE, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            raise ConfigError(
                f"{data_path}: no readable {ROWS_FILE} in it, so the export did not end; run the same command again"
            ) from None
        self._data: HiddenStates | None = None
        self._pid = 0

    def setup(self) -> None:
        """Open the run, once in each process.

        Raises:
            ConfigError: no run is there, or not the one that was exported; says how to name another place.
        """
        if self._data is not None and self._pid == os.getpid():
            return
        with self._found():
            source = open_source(self._url, self._options)
        if source.fingerprint != self._run:
            raise ConfigError(
                f"{self._url}: not the run, or no longer the rows, that {self._where} was made from; export again into "
                "an empty folder"
            )
        self._data = HiddenStates(
            self._url, states=self._choice.names, check=self._check, storage_options=self._options
        )
        self._pid = os.getpid()

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        """A line's states: `hidden_states` [T, K+1, H] in the stored type, `token_ids` i64 [T].

        Raises:
            ConfigError: see setup.
            IndexError: no such line.
            NotFound: a shard is missing; says how to name another place.
            ShardError: the bytes are not what was captured, or a state is zero throughout.
        """
        self.setup()
        assert self._data is not None
        index, row = self._rows[file_idx].tolist()
        with self._found():
            item = cut(self._data[index], self._max_length)
        if item["row"] != row:
            raise ShardError(f"{self._where}/{ROWS_FILE}: item {index} of {self._url} is row {item['row']}, not {row}")
        check_states(item, self._choice.names, self._url)
        return {"hidden_states": stacked(item, self._choice), "token_ids": item["input_ids"]}

    @contextlib.contextmanager
    def _found(self) -> Iterator[None]:
        """Say what to do about a run that is not, or not whole, where the export left it."""
        try:
            yield
        except (ConfigError, NotFound) as error:
            raise type(error)(
                f"{error}; if the run has moved, tell the trainer by --ray-extract-url URL, or run "
                f"`ray-extract export URL --to speculators --link --out {self._where}` with its options again"
            ) from None

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Never: the states are there. Raises ConfigError."""
        raise ConfigError(f"{self._where}: its states are stored, none are generated; train with --on-missing raise")

    def delete(self, handle: str) -> None:
        """Nothing to delete."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None}


class Backend:
    """Follows hs_connectors.HiddenStatesBackend."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Flags of the trainer."""
        parser.add_argument(
            "--ray-extract-url", type=str, default=None, help="the run's output.url, if it has moved since the export"
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """None: no server is launched."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> ShardTransfer:
        """What the trainer reads from."""
        return ShardTransfer(data_path, url=getattr(args, "ray_extract_url", None))

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Never: no server is launched. Raises ConfigError."""
        raise ConfigError("the backend ray_extract reads a finished run; there is no vLLM server to configure")


def register() -> None:
    """Make the backend known under its name, once; before speculators.train.config is imported.

    Raises:
        ConfigError: hs-connectors is not installed.
    """
    try:
        from hs_connectors import HiddenStatesBackend
    except ImportError:
        raise ConfigError(
            "speculators' backends need the package hs-connectors, which speculators 0.9 installs"
        ) from None
    if NAME not in HiddenStatesBackend.registry:
        HiddenStatesBackend.register(NAME)(Backend)
