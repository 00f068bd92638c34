#!/usr/bin/env bash
# The main job on this machine's CPU, from nothing to verified shards. A second run finds the output finished.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
deploy/cpu/setup.sh
venv=${RAY_EXTRACT_VENV:-.venv}
python=$venv/bin/python
model=.cache/smollm2-135m-instruct
engines=2

"$python" deploy/cpu/demo/make_model.py "$model"
"$python" deploy/cpu/demo/make_prompts.py .cache/humaneval.jsonl

threads=$(($(nproc) / engines))
export DEMO_THREADS=$((threads > 0 ? threads : 1))
export RAY_USAGE_STATS_ENABLED=0
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 # a Ray that the job starts listens on 127.0.0.1 only
"$python" -m ray_extract.run --config deploy/cpu/demo/job.yaml model.path="$model" engine.count="$engines"
"$venv/bin/ray-extract" verify demo-output

cat <<TEXT

The states are in demo-output/. What to run next:
  the rows, units and commits
    $venv/bin/ray-extract status demo-output
  eight rows again with Transformers in fp32, and the error of each state
    $venv/bin/ray-extract verify demo-output --recompute 8 --model $model
  the same as raw tensors
    $python -m ray_extract.run --config deploy/cpu/demo/job.yaml output.url=demo-raw output.format=raw
  everything from the start
    rm -r demo-output && make demo
TEXT
