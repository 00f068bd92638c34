#!/usr/bin/env bash
# Makes the environment of the acceptance tests: SpecForge and speculators on the CPU, without their engines, in a venv of
# their own: .cache/trainers, or $RAY_EXTRACT_TRAINERS_VENV. A second run with unchanged inputs does nothing; `setup.sh check`
# only says by its exit code whether that is so. Needs the environment of deploy/cpu/setup.sh for its Python and uv.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
base=${RAY_EXTRACT_VENV:-$repo/.venv}/bin/python
venv=${RAY_EXTRACT_TRAINERS_VENV:-$repo/.cache/trainers}
stamp=$venv/.ray-extract-setup

say() { printf 'trainers: %s\n' "$*"; }

inputs_hash() {
    {
        printf '%s\n' "$repo"
        cat "$here/setup.sh" "$here/requirements.txt"
        "$base" -V 2>&1
    } | sha256sum | cut -d' ' -f1
}

up_to_date() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(inputs_hash)" ]; }

if up_to_date; then
    [ "${1:-}" = check ] || say "$venv is up to date"
    exit 0
fi
[ "${1:-}" != check ] || exit 1

say "making $venv"
mkdir -p "$(dirname "$venv")"
"$base" -m venv --clear "$venv"
mapfile -t torch < <(grep -E '^torch==' "$here/requirements.txt")
"$venv/bin/python" -m pip install --quiet "${torch[@]}"
"$base" -m uv pip install --quiet --python "$venv/bin/python" --no-deps -r "$here/requirements.txt"
"$base" -m uv pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation -e "$repo"
"$venv/bin/python" -c 'import specforge, hs_connectors, ray_extract.exporters.export'
inputs_hash >"$stamp"
say "$venv is ready"
