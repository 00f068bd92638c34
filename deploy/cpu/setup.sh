#!/usr/bin/env bash
# Makes the environment in which the demo and the tests run on a machine without a GPU: a venv in .venv, or in
# $RAY_EXTRACT_VENV. A second run with unchanged inputs does nothing. PYTHON=... names the interpreter to use.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
venv=${RAY_EXTRACT_VENV:-$repo/.venv}
stamp=$venv/.ray-extract-setup

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

suitable() { # Python 3.11 to 3.13, the ones that every pinned package has wheels for
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if suitable "$name"; then
            command -v "$name"
            return
        fi
    done
    die "no ${PYTHON:-Python 3.11, 3.12 or 3.13} found (on Debian and Ubuntu: apt-get install python3 python3-venv);" \
        "PYTHON=/path/to/python names another"
}

# Debian and Ubuntu ship Python without ensurepip, so `python -m venv` fails until this package is there.
ensure_venv_module() {
    local python=$1 package
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $package"
        apt-get update -qq </dev/null || say "apt-get update failed; trying with the lists that are here"
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" </dev/null >/dev/null ||
            die "apt-get install $package failed; install it and run this again"
    else
        die "$python cannot make venvs: install it first (on Debian and Ubuntu: sudo apt-get install $package)"
    fi
}

inputs_hash() {
    {
        printf '%s\n' "$repo"
        sha256sum <"$here/setup.sh"
        sha256sum <"$here/requirements.txt"
        sha256sum <"$here/requirements-nodeps.txt"
        sha256sum <"$repo/pyproject.toml"
        "$venv/bin/python" -V 2>&1 || true
    } | sha256sum | cut -d' ' -f1
}

up_to_date() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(inputs_hash)" ]; }

make_venv() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && suitable "$venv/bin/python" && return
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        die "$venv exists and is no venv; move it away, or set RAY_EXTRACT_VENV"
    fi
    local python
    python=$(find_python)
    ensure_venv_module "$python"
    say "making $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv"
}

# A .pth file, because PYTHONPATH would have to be set by everyone: Ray's workers, SGLang's children and notebooks all
# start this venv's Python. In front of site-packages, because one shim stands before the real torchvision.
install_shims() {
    "$venv/bin/python" - "$here/shims" <<'PY'
import pathlib, sys, sysconfig
line = f"import sys; p = {sys.argv[1]!r}; p in sys.path or sys.path.insert(0, p)\n"
pathlib.Path(sysconfig.get_path("purelib"), "ray_extract_cpu_shims.pth").write_text(line)
PY
}

check() {
    "$venv/bin/python" - <<'PY'
import importlib.metadata, sys, torch
names = [entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")]
if "ray_extract" not in names:
    sys.exit(f"setup: SGLang would not find the capture plugin (plugins: {names}); remove the venv and run this again")
if torch.version.cuda is not None:
    print(f"setup: torch {torch.__version__} is a CUDA build: it works, but takes several GB more than the CPU build,"
          " which pip takes when its settings name PyTorch's index of CPU wheels (extra-index-url)")
PY
}

main() {
    if up_to_date; then
        say "$venv is up to date"
        return
    fi
    mkdir -p "$(dirname "$venv")"
    if command -v flock >/dev/null; then # one setup at a time; the second finds the work done
        exec 9<"$(dirname "$venv")"
        flock 9
        up_to_date && return
    fi
    make_venv
    rm -f "$stamp" # written last, so an interrupted setup is taken up again
    local python=$venv/bin/python pins
    mapfile -t pins < <(grep -E '^(torch|uv)==' "$here/requirements.txt")
    say "installing ${pins[*]}"
    "$python" -m pip install --quiet "${pins[@]}"
    say "installing the pinned requirements"
    "$python" -m uv pip install --quiet --python "$python" --no-deps \
        -r "$here/requirements.txt" -r "$here/requirements-nodeps.txt"
    say "installing ray_extract itself (editable)"
    "$python" -m uv pip install --quiet --python "$python" --no-deps --no-build-isolation -e "$repo"
    install_shims
    check
    inputs_hash >"$stamp"
    say "$venv is ready"
}

main
