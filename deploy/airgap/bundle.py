#!/usr/bin/env python3
"""Gather all that a GPU host without a network needs to run ray_extract: bundle.py OUT [--requirements FILE].

OUT gets wheels/ (the pinned stack, and ray_extract built from this checkout), requirements.txt, install.sh, and
SHA256SUMS over them. Needs pip and hatchling here, and the network; the host needs Python 3.12 and coreutils.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REPO = HERE.parents[1]
PYTHON = "3.12"
# pip takes a wheel only if it knows its platform by name, and knows no "or older" for a foreign one.
GLIBC = (39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 27, 26, 24, 17, 12, 5)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]


def download_command(requirements: Path, wheels: Path) -> list[str]:
    """What fetches the wheels of a list for the host."""
    foreign = [f"--platform={platform}" for platform in PLATFORMS]
    foreign += [f"--python-version={PYTHON}", "--implementation=cp", "--only-binary=:all:", "--no-deps"]
    return [sys.executable, "-m", "pip", "download", "--quiet", *foreign, "-r", str(requirements), "-d", str(wheels)]


def build_command(wheels: Path) -> list[str]:
    """What builds our own wheel."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    return [*pip, "--wheel-dir", str(wheels), str(REPO)]


def write_sums(out: Path) -> None:
    """SHA256SUMS over all other files, as sha256sum reads it."""
    lines = []
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name != "SHA256SUMS":
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(out)}\n")
    (out / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--requirements", type=Path, default=REPO / "deploy/gpu/requirements.txt")
    args = parser.parse_args()
    wheels = args.out / "wheels"
    try:
        wheels.mkdir(parents=True)
    except FileExistsError:
        sys.exit(f"bundle: {args.out} is there already; name a new folder")
    for command in (download_command(args.requirements, wheels), build_command(wheels)):
        if (code := subprocess.run(command, check=False).returncode) != 0:
            sys.exit(f"bundle: `{' '.join(command[2:5])}` failed with exit code {code}; see above")
    shutil.copy(args.requirements, args.out / "requirements.txt")
    shutil.copy(HERE / "install.sh", args.out / "install.sh")
    write_sums(args.out)
    print(f"bundle: {len(list(wheels.iterdir()))} wheels in {args.out}; on the host: {args.out.name}/install.sh VENV")


if __name__ == "__main__":
    main()
