"""A trial before a run: what an engine of the job does in a second, with nothing left behind."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_model
from simulated import hosts, make_rows, make_work
from test_prepare import MemoryStore, job
from test_prepare import make_rows as as_rows

from ray_extract import cli
from ray_extract.dataset.prepared import PreparedRows, write_rows
from ray_extract.plan import sample_units


@settings(max_examples=60, deadline=None)
@given(usable=st.lists(st.booleans(), min_size=1, max_size=60), count=st.integers(1, 80), part=st.integers(1, 9))
def test_rows_of_a_trial_are_usable_ones_at_even_distances(usable, count, part):
    rows = as_rows([([1] * 9, [1] * 9) if one else "empty row" for one in usable])
    store = MemoryStore()
    index = write_rows(store, rows, part_rows=part)
    asked = job("x")
    asked = asked.model_copy(update={"output": asked.output.model_copy(update={"max_rows": 4})})
    units = sample_units(store, index, asked, 8, count)
    chosen = [row.index for unit in units for row in PreparedRows(store, index).of(unit)]
    places = np.flatnonzero(usable)
    assert len(chosen) == min(count, len(places)) and chosen == sorted(set(chosen) & set(places.tolist()))
    assert all(unit.rows <= 4 for unit in units)
    even = (np.arange(len(chosen)) + 0.5) / max(1, len(chosen)) * len(places)
    assert np.all(np.abs(np.searchsorted(places, chosen) + 0.5 - even) <= 0.5)


def trial(args, capsys):
    code = cli.main(["plan", *args])
    return code, *map(str.splitlines, capsys.readouterr())


def speed_of(lines):
    (line,) = (line for line in lines if line.startswith("trial"))
    return float(re.match(r"trial     ([\d,]+) tokens/s", line)[1].replace(",", "")), line


@pytest.mark.ray
def test_trial_measures_an_engine_and_leaves_nothing(ray_cluster, tmp_path, capsys):
    """The simulated engine is as fast as it is told."""
    work = make_work(
        tmp_path,
        [*make_rows(40), [3] * 50, []],
        ray_cluster.address,
        engine={"cpus": 0.25, "count": 4, "args": {"tokens_per_s": 3000, "reject_token": 3}},
    )
    before = sorted(tmp_path.rglob("*"))
    code, out, err = trial(["--trial", "16", *work.args()], capsys)
    assert (code, err) == (0, [])
    speed, line = speed_of(out)
    assert 1000 < speed < 3100
    assert re.search(r"by one engine: 16 rows of [\d,]+ tokens in [\d.]+ s, after \d+ s to start$", line)
    tokens = int(next(x for x in out if x.startswith("tokens")).split()[1].rstrip(",").replace(",", ""))
    hours = next(x for x in out if x.startswith("hours"))
    assert hours == f"hours     {tokens / speed / 4 / 3600:,.2f} at {speed:,.0f} tokens/s an engine"
    assert sorted(tmp_path.rglob("*")) == before and not hosts(work.mark)
    # What fails is said, and nothing can be computed from nothing.
    _, out, _ = trial(["--trial", "100", *work.args()], capsys)
    assert "41 rows" not in speed_of(out)[1] and ", 1 failed: rejected by the simulated engine" in speed_of(out)[1]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [3]}) + "\n")
    assert trial(["--trial", "1", *work.args()], capsys)[2] == [
        "error: --trial: no row came through, 1 failed: rejected by the simulated engine"
    ]
    code, _, err = trial(["--trial", "1", *work.args("engine.gpus=3")], capsys)
    assert code == 2 and err[0].startswith(
        "error: --trial: no node has 3 GPU and 0.25 CPU: the most GPU of a node is 0"
    )
    assert not hosts(work.mark)


@pytest.mark.engine
@pytest.mark.ray
def test_trial_measures_the_real_engine(ray_cluster, checkpoints, tmp_path, capsys):
    model = tiny_model("llama", checkpoints)
    config = tmp_path / "job.yaml"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": r}) + "\n" for r in make_rows(8)))
    tree = {
        "model": {"path": str(model)},
        "dataset": {"paths": str(tmp_path / "rows.jsonl")},
        "engine": {"device": "cpu", "cpus": 1},
        "capture": {"boundaries": [1]},
        "output": {"url": str(tmp_path / "out")},
        "run": {"address": ray_cluster.address},
    }
    config.write_text(json.dumps(tree))
    code, out, err = trial(["--trial", "4", "--config", str(config)], capsys)
    assert (code, err) == (0, [])
    assert speed_of(out)[0] > 0 and ": 4 rows of" in speed_of(out)[1]
    assert not (tmp_path / "out").exists()


def test_speed_is_told_or_found_out(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--trial", "3", "--tokens-per-second", "5"])
    assert "not allowed with argument --trial" in capsys.readouterr().err
