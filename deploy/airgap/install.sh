#!/usr/bin/env bash
# On the host: install.sh VENV, from a bundle made by bundle.py. Nothing is fetched. PYTHON=... names the interpreter.
set -euo pipefail

venv=${1:?usage: install.sh VENV}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3.12}

die() {
    printf 'install: %s\n' "$*" >&2
    exit 1
}

[ ! -e "$venv" ] || die "$venv is there already; remove it, or name another folder"
(cd "$here" && sha256sum --check --quiet SHA256SUMS) || die "the bundle is damaged or not whole; copy it again"
"$python" -m venv "$venv" || die "$python cannot make a venv; install it, or name another one by PYTHON=..."
"$venv/bin/python" -m pip install --quiet --no-index --find-links "$here/wheels" --no-deps \
    -r "$here/requirements.txt" ray-extract
"$venv/bin/python" -m pip check || die "what is installed does not fit together"
"$venv/bin/python" - <<'PY'
import importlib.metadata, sys
names = [entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")]
if "ray_extract" not in names:
    sys.exit(f"install: SGLang would not find the capture plugin (plugins: {names})")
PY
printf 'install: %s is ready; try %s/bin/ray-extract --help\n' "$venv" "$venv"
