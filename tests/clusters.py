"""Ray clusters of fake nodes on loopback, for tests; each stops its own processes only.

Ray reads these variables when it is imported, so this module must be imported before Ray. Children inherit them: every
Ray that tests start binds loopback, asks for a token that only they know, and keeps its files in a folder of its own.
"""

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

if "ray" in sys.modules:
    raise RuntimeError("import clusters before ray: Ray reads its environment once")

_FOLDER = tempfile.mkdtemp(prefix="rxt")  # short: it holds Unix sockets, whose names may have 107 characters
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux this makes the node's address 127.0.0.1
    "RAY_TMPDIR": _FOLDER,
    "RAY_USAGE_STATS_ENABLED": "0",
}

OBJECT_STORE_BYTES = 100 << 20
_STARTS = 4  # Ray gives its agents 15 s to start, which a busy machine exceeds now and then

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def cluster(**head: Any) -> Iterator[Any]:
    """A ray.cluster_utils.Cluster with a head node.

    Args:
        head: fields of Ray's RayParams, such as num_cpus, include_dashboard.
    """
    # In pytest's process: `ray start --address` refuses further nodes on loopback.
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=False)
    try:
        add_node(started, **{"include_dashboard": False, "no_monitor": True, "include_log_monitor": False, **head})
        yield started
    finally:
        started.shutdown()


def add_node(to: Any, **fields: Any) -> Any:
    """Add a node to a cluster; returns it. An attempt that is too slow for Ray's patience is made again."""
    fields = {"object_store_memory": OBJECT_STORE_BYTES, "dashboard_agent_listen_port": 0, **fields}
    for left in reversed(range(_STARTS)):
        try:
            return to.add_node(**fields)
        except Exception as error:
            if "timed out during startup" not in str(error) or not left:
                raise
            logger.warning("a Ray node did not start in time, trying again")
    raise AssertionError("unreachable")
