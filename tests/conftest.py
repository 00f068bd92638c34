"""Fixtures shared by the tests; each starts on first use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clusters
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


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of one node with 2 CPUs and no dashboard. Mark the test `ray`; it removes nodes that it adds."""
    import ray

    with clusters.cluster(num_cpus=2) as cluster:
        yield cluster
        ray.shutdown()
