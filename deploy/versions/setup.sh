#!/usr/bin/env bash
# Makes an environment with another SGLang than deploy/cpu's, for the truth tests: setup.sh VERSION, in
# .cache/sglang-VERSION. It holds that SGLang alone and takes everything else from the environment of deploy/cpu/setup.sh,
# which must be there: 10 seconds and 70 to 220 MB each. A second run with unchanged inputs does nothing.
#
# So every version runs beside the torch and transformers of deploy/cpu, whatever its own pins say (docs/capture.md).
set -euo pipefail

version=${1:?usage: setup.sh VERSION}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
base=${RAY_EXTRACT_VENV:-$repo/.venv}/bin/python
venv=$repo/.cache/sglang-$version
stamp=$venv/.ray-extract-setup

say() { printf 'versions: %s\n' "$*"; }

inputs_hash() {
    {
        printf '%s\n' "$repo" "$version" "$base"
        cat "$here/setup.sh"
        "$base" -V 2>&1
    } | sha256sum | cut -d' ' -f1
}

[ -x "$base" ] || { say "$base is missing: run make setup first" >&2; exit 1; }
mkdir -p "$(dirname "$venv")"
if command -v flock >/dev/null; then # one setup at a time; the second finds the work done
    exec 9<"$(dirname "$venv")"
    flock 9
fi
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(inputs_hash)" ]; then
    say "$venv is up to date"
    exit 0
fi

say "making $venv"
trap '[ -f "$stamp" ] || rm -rf "$venv"' EXIT
"$base" -m venv --clear --without-pip "$venv"
"$base" -m uv pip install --quiet --python "$venv/bin/python" --no-deps --compile-bytecode "sglang==$version"
# Behind this environment's own packages, with the .pth files there: those of the shims and of ray_extract itself.
"$base" - "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PY'
import pathlib, sys, sysconfig
line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
pathlib.Path(sys.argv[1], "ray_extract_base.pth").write_text(line)
PY
"$venv/bin/python" - "$version" <<'PY'
import importlib.metadata, importlib.util, pathlib, sys
found = pathlib.Path(importlib.util.find_spec("sglang").origin)
if importlib.metadata.version("sglang") != sys.argv[1] or pathlib.Path(sys.prefix) not in found.parents:
    sys.exit(f"versions: sglang would be imported from {found}")
plugins = [e.name for e in importlib.metadata.entry_points(group="sglang.srt.plugins")]
if plugins != ["ray_extract"]:
    sys.exit(f"versions: SGLang would load the plugins {plugins}")
PY
inputs_hash >"$stamp"
say "$venv is ready"
