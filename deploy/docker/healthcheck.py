"""Whether this container can run an engine: exit code 0, or 1 and a line for each thing that is missing."""

import importlib.metadata
import shutil
import sys
from pathlib import Path

GIB = 1 << 30


def missing(plugins: set[str], shm_bytes: int, devices: Path) -> list[str]:
    """What is missing.

    Args:
        plugins: names of the plugins that SGLang would load.
        shm_bytes: size of /dev/shm.
        devices: where the driver's devices are.
    """
    found = []
    if "ray_extract" not in plugins:
        found.append("SGLang would not load the capture plugin: ray-extract is not installed in this Python")
    if shm_bytes < GIB:
        found.append(
            f"/dev/shm has {shm_bytes >> 20} MiB; start the container with the --shm-size that ray-extract plan says"
        )
    if not (devices / "nvidiactl").exists():
        found.append("no NVIDIA driver is here; start the container with --gpus all")
    return found


def main() -> int:
    """The check. Returns the exit code."""
    plugins = {entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    found = missing(plugins, shutil.disk_usage("/dev/shm").total, Path("/dev"))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
