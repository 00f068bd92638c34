"""Fixtures shared by the tests; each starts on first use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import servers


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    """A SeaweedFS server with an empty bucket; use a prefix of your own. Mark the test `s3`."""
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tiny checkpoints, see models.tiny_model."""
    return tmp_path_factory.mktemp("checkpoints")
