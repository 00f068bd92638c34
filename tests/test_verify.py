"""verify: a right output passes, and everything that can be altered in one is found and named."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from models import VOCAB, hf_states, tiny_model
from outputs import NAMES, make_output, random_states
from safetensors.torch import load_file, save_file

from ray_extract import cli, layout
from ray_extract.config import ModelConfig
from ray_extract.errors import ConfigError
from ray_extract.model import describe_model
from ray_extract.readers.dataset import HiddenStates
from ray_extract.verify import MAX_PROBLEMS, verify

FORMATS = ["raw", "parquet"]
HIDDEN = 64


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models as small as these only wait for their threads where other processes compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def snapshot(folder):
    """Every file's bytes and time."""
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("keep", ["all", "supervised", "last", "random:3"])
def test_a_right_output_passes_and_is_not_touched(tmp_path, format, keep):
    output = make_output(tmp_path, format=format, keep=keep, failed=[4])
    before = snapshot(tmp_path / "out")
    report = verify(output.url)
    assert report.ok and report.problems == []
    assert (report.rows, report.rows_ok, report.rows_skipped, report.rows_failed) == (6, 4, 1, 1)
    assert (report.units, report.committed) == (3, 3)
    assert report.tokens == 5 + 12 + 1 + 7
    assert report.kept == sum(len(states["state.1"]) for states in output.stored.values())
    assert report.failed == {"incomplete": 1} and sum(report.skipped.values()) == 1
    assert report.nbytes == sum(p.stat().st_size for p in (tmp_path / "out" / "shards").iterdir())
    assert report.lines()[1] == "rows      6 = 4 ok + 1 skipped + 1 failed"
    assert report.lines()[-1] == "verified: everything agrees"
    assert snapshot(tmp_path / "out") == before


def test_the_rows_of_an_unfinished_run_add_up(tmp_path):
    output = make_output(tmp_path, leave_out=["u00000001"])
    report = verify(output.url)
    left = report.rows - report.rows_ok - report.rows_skipped - report.rows_failed
    assert left > 0 and not report.ok
    assert report.lines()[1].endswith(f" + 0 failed + {left} without a readable shard")


def test_an_output_on_an_object_store_passes(tmp_path):
    assert verify(make_output(tmp_path, url="memory://verify/out", format="parquet").url).ok


@pytest.mark.s3
@pytest.mark.parametrize("format", FORMATS)
def test_an_output_on_s3_passes_and_reads_back_equal(tmp_path, s3, format):
    output = make_output(
        tmp_path, url=f"{s3.url}/verify-{format}", storage_options=s3.storage_options, format=format, failed=[4]
    )
    report = verify(output.url, s3.storage_options)
    assert report.ok, report.problems
    assert report.rows_ok == 4
    data = HiddenStates(output.url, check=True, storage_options=s3.storage_options)
    for item in data:
        for name in NAMES:
            assert item[name].view(torch.uint8).numpy().tobytes() == output.stored[item["row"]][name].tobytes()


def edit_json(path, change):
    """Change a JSON file in place."""
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def flip_state(out, output):
    shard = next((out / "shards").glob("u00000000.*"))
    data = bytearray(shard.read_bytes())
    data[data.index(output.stored[1]["state.3"][:5].tobytes()) + 33] ^= 2
    shard.write_bytes(data)


def unzero_failed(out, output):
    shard = next((out / "shards").glob("u00000001.*"))
    data = bytearray(shard.read_bytes())
    data[data.rindex(bytes(10 * 32)) + 5] = 1  # within the last ten tokens of row 4, the only zeros of this length
    shard.write_bytes(data)


def cut_shard(out, output):
    shard = next((out / "shards").glob("u00000001.*"))
    shard.write_bytes(shard.read_bytes()[:-10])


def remove_shard(out, output):
    next((out / "shards").glob("u00000001.*")).unlink()


def swap_shards(out, output):
    first, second = sorted((out / "shards").iterdir())[:2]
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def remove_commit(out, output):
    (out / "commits" / "u00000001.json").unlink()


def damage_commit(out, output):
    (out / "commits" / "u00000001.json").write_text("{")


def strange_commit(out, output):
    edit_json(out / "commits" / "u00000001.json", lambda r: r.update(unit="u00000099"))
    (out / "commits" / "u00000099.json").write_bytes((out / "commits" / "u00000001.json").read_bytes())


def wrong_size(out, output):
    edit_json(out / "commits" / "u00000000.json", lambda r: r.update(size=r["size"] + 1))


def wrong_sha(out, output):
    edit_json(out / "commits" / "u00000000.json", lambda r: r.update(sha256="0" * 64))


def wrong_tokens(out, output):
    edit_json(out / "commits" / "u00000000.json", lambda r: r.update(tokens=r["tokens"] - 1))


def hide_failure(out, output):
    edit_json(out / "commits" / "u00000001.json", lambda r: r.update(failures=[]))


def other_attempt(out, output):
    edit_json(out / "commits" / "u00000000.json", lambda r: r.update(attempt="zz"))


def remove_manifest(out, output):
    (out / layout.manifest_key(0)).unlink()


def edit_manifest(out, output):
    path = out / layout.manifest_key(0)
    table = pq.read_table(path)
    tokens = table.column("n_tokens").to_pylist()
    tokens[3] += 1
    at = table.schema.get_field_index("n_tokens")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(tokens, pa.int64())), path)


def shorten_manifest(out, output):
    path = out / layout.manifest_key(0)
    pq.write_table(pq.read_table(path).slice(0, 5), path)


def other_states(out, output):
    edit_json(out / "run.json", lambda r: r["identity"]["capture"].update(boundaries=[1, 2]))


def other_hidden(out, output):
    edit_json(out / "run.json", lambda r: r["identity"]["capture"].update(hidden=32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("alter", "found"),
    [
        (flip_state, "u00000000.*row 1: state.3 differ from what was captured"),
        (unzero_failed, "u00000001.*row 4: state.final differ"),
        (cut_shard, "shards/u00000001"),
        (remove_shard, "shards/u00000001.*no such shard"),
        (swap_shards, r"u00000000.*row\[0\] is 3, 0 prepared"),
        (remove_commit, "1 unit without a commit, such as u00000001: the run is not finished; run it again"),
        (damage_commit, "commits/u00000001.json: not a commit"),
        (strange_commit, "commits/u00000099.json: the plan has no such unit"),
        (wrong_size, "u00000000.*bytes: .* expected"),
        (wrong_sha, "u00000000.*hash of all bytes but the states"),
        (wrong_tokens, "u00000000.*prompt tokens of the rows that are ok: 17, expected 16"),
        (hide_failure, "u00000001.*failed rows: {4: 'incomplete'}, expected {}"),
        (other_attempt, "u00000000.*the commit's key"),
        (remove_manifest, "no manifest"),
        (edit_manifest, "manifest: row 3: n_tokens not as in plan and commits"),
        (shorten_manifest, "manifest: row 5"),
        (other_states, "u00000002.*states: .*state.3.* expected .*state.2"),
        (other_hidden, "u00000002.*states: "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_altered_output_does_not_pass_and_the_place_is_named(tmp_path, format, alter, found):
    output = make_output(tmp_path, format=format, failed=[4])
    alter(tmp_path / "out", output)
    report = verify(output.url)
    assert not report.ok
    assert any(re.search(found, problem) for problem in report.problems), report.problems
    assert report.lines()[-1].startswith("NOT verified: ")
    (unit,) = re.findall(r"u\d{8}", found) or [""]
    mends = [line for line in report.lines() if line.startswith("to mend")]
    if alter in (flip_state, unzero_failed, cut_shard, remove_shard, damage_commit, wrong_size, wrong_sha):
        assert any(f"{output.url}/" in problem for problem in report.problems)
        assert mends == [f"to mend   delete commits/{unit}.json"]
    elif alter in (remove_manifest, edit_manifest, shorten_manifest):
        assert mends == ["to mend   run the job again, which writes the next manifest"]
    elif alter in (other_states, other_hidden):
        assert len(mends) == 1 and "all shards are wrong; if run.json and the URL are the run's" in mends[0]
    elif alter is remove_commit:
        assert mends == []


@pytest.mark.parametrize("format", FORMATS)
def test_other_ids_or_masks_than_prepared_are_found(tmp_path, format):
    # The same lengths, so that nothing but the contents differs.
    output = make_output(tmp_path / "a", format=format, vocab=1000)
    other = make_output(tmp_path / "b", format=format, vocab=1001)
    for folder in ("shards", "commits"):
        for path in (tmp_path / "b" / "out" / folder).iterdir():
            (tmp_path / "a" / "out" / folder / path.name).write_bytes(path.read_bytes())
    report = verify(output.url)
    assert any("input_ids[" in problem and "prepared" in problem for problem in report.problems)
    assert verify(other.url).ok


def test_an_unfinished_run_is_counted_as_far_as_it_is(tmp_path):
    report = verify(make_output(tmp_path, leave_out=["u00000002"]).url)
    assert (report.committed, report.units, report.rows_ok) == (2, 3, 4)
    assert report.problems == [
        "1 unit without a commit, such as u00000002: the run is not finished; run it again",
    ]


def test_many_problems_are_counted_but_not_all_spelled_out(tmp_path):
    output = make_output(tmp_path, lengths=[4] * (MAX_PROBLEMS + 7), rows_per_unit=1)
    for shard in sorted((tmp_path / "out" / "shards").iterdir())[:-1]:
        shard.unlink()
    report = verify(output.url)
    assert len(report.problems) == MAX_PROBLEMS < report.problem_count
    assert any("problems more" in line for line in report.lines())
    assert sum(line.startswith("to mend   delete commits/") for line in report.lines()) == MAX_PROBLEMS
    assert "          and those of 6 units more, once these are mended" in report.lines()


def test_a_folder_without_a_run_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no run\.json, so this is no output of ray_extract"):
        verify(str(tmp_path))
    with pytest.raises(ConfigError, match="--recompute needs the checkpoint"):
        verify(str(tmp_path), recompute=2)


def model_states(folder):
    """The states that Transformers computes, in fp32."""

    def states(name, ids):
        found = hf_states(folder, ids.tolist())
        which = name.removeprefix("state.")
        return found[-1] if which == "final" else found[int(which)]

    return states


def run_of(output, model, **changes):
    """Make an output's run.json that of a run of this checkpoint."""
    shape = describe_model(ModelConfig(path=str(model)))
    fields = {"fingerprint": shape.fingerprint, "architecture": shape.architecture, **changes}
    run = Path(output.url) / "run.json"
    edit_json(run, lambda r: r["identity"]["model"].update(fields))
    return output


def two_files(model, folder):
    """The checkpoint with layers from 2 on, the final norm and the LM head in a file of their own."""
    files = {"lower.safetensors": {}, "upper.safetensors": {}}
    for name, tensor in load_file(model / "model.safetensors").items():
        layer = re.search(r"layers\.(\d+)", name)
        lower = int(layer[1]) < 2 if layer else "embed" in name
        files["lower.safetensors" if lower else "upper.safetensors"][name] = tensor
    folder.mkdir()
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_recomputing_rows_with_transformers(tmp_path, format):
    model = tiny_model("llama", tmp_path / "models")
    output = make_output(
        tmp_path, format=format, dtype="float32", hidden=HIDDEN, vocab=VOCAB, failed=[4], states=model_states(model)
    )
    run_of(output, model)
    report = verify(output.url, recompute=3, seed=1, model_path=str(model))
    assert report.ok, report.problems
    assert report.recomputed == 3
    assert [error.name for error in report.errors] == ["state.1", "state.3", "state.final"]
    assert all(error.max < 1e-6 for error in report.errors)
    assert any("error p50" in line for line in report.lines())
    everything = verify(output.url, recompute=1000, model_path=str(model))
    assert everything.recomputed == 4


def test_states_stored_in_fp8_are_judged_by_what_fp8_makes_of_the_references(tmp_path):
    model = tiny_model("llama", tmp_path / "models")
    right = model_states(model)
    options = {"dtype": "float8_e4m3", "hidden": HIDDEN, "vocab": VOCAB}
    report = verify(
        run_of(make_output(tmp_path, states=right, **options), model).url, recompute=3, model_path=str(model)
    )
    assert report.ok, report.problems
    assert [(e.dtype, 0.01 < e.p50 < 0.04) for e in report.errors] == [("float8_e4m3", True)] * 3

    def off(name, ids):
        return right({"state.1": "state.3"}.get(name, name), ids) * (1.03 if name == "state.3" else 1)

    other = run_of(make_output(tmp_path / "off", states=off, **options), model)
    wrong = [e.name for e in verify(other.url, recompute=3, model_path=str(model)).errors if not e.ok]
    assert wrong == ["state.1", "state.3"]


def test_made_up_states_do_not_pass_recomputing(tmp_path):
    model = tiny_model("llama", tmp_path / "models")
    output = run_of(make_output(tmp_path, hidden=HIDDEN, vocab=VOCAB, states=random_states(HIDDEN)), model)
    assert verify(output.url).ok
    report = verify(output.url, recompute=2, model_path=str(model))
    assert [error.ok for error in report.errors] == [False] * 3
    assert sum("--recompute: state." in problem for problem in report.problems) == 3
    assert any(np.isfinite(error.p50) and error.p50 > 0.5 for error in report.errors)
    below = verify(output.url, recompute=2, model_path=str(model), boundaries=[1])
    assert [error.name for error in below.errors if not error.ok] == ["state.1"]


@pytest.fixture
def half(tmp_path):
    """An output of a checkpoint in two files, and the checkpoint."""
    model = tiny_model("llama", tmp_path / "models")
    output = make_output(tmp_path, dtype="float32", hidden=HIDDEN, vocab=VOCAB, states=model_states(model))
    folder = two_files(model, tmp_path / "half")
    return run_of(output, folder), folder


@pytest.mark.parametrize(("boundaries", "names"), [([1], ["state.1"]), ([3, 1, 3], ["state.1", "state.3"])])
def test_recomputing_some_boundaries(half, boundaries, names):
    output, model = half
    report = verify(output.url, recompute=3, model_path=str(model), boundaries=boundaries)
    assert report.ok, report.problems
    assert [error.name for error in report.errors] == names
    assert all(error.max < 1e-6 for error in report.errors)
    assert f"recompute 3 rows with Transformers, no further than boundary {max(boundaries)}" in report.lines()


def test_the_command_takes_several_boundaries(half, capsys):
    output, model = half
    args = ["verify", output.url, "--recompute", "2", "--model", str(model), "--boundary", "3", "--boundary", "1"]
    assert cli.main(args) == 0
    out = capsys.readouterr().out
    assert "recompute 2 rows with Transformers, no further than boundary 3" in out
    assert "state.1 (float32" in out and "state.3 (float32" in out and "state.final" not in out


def test_a_boundary_needs_only_the_files_of_the_layers_below_it(half):
    output, model = half
    (model / "upper.safetensors").unlink()
    report = verify(output.url, recompute=3, model_path=str(model), boundaries=[1])
    assert report.ok and report.errors[0].max < 1e-6
    assert any("could not be compared with the run's" in line and "upper.safeten" in line for line in report.lines())
    with pytest.raises(ConfigError, match=r"upper\.safetensors is missing, and model\.layers\.2\..* is needed"):
        verify(output.url, recompute=3, model_path=str(model), boundaries=[3])
    with pytest.raises(ConfigError, match=r"--model .*half: 1 weight file\(s\) of its index are missing"):
        verify(output.url, recompute=3, model_path=str(model))


@pytest.mark.parametrize("boundaries", [[], [1]])
def test_another_checkpoint_than_the_runs_is_refused_before_anything_is_read(half, boundaries, monkeypatch):
    output, model = half
    monkeypatch.setattr("ray_extract.verify._check_unit", None)
    for change, told in (
        ({"fingerprint": "0" * 64}, r"not the checkpoint of this run: its fingerprint of config\.json and weights is"),
        ({"architecture": "OtherForCausalLM"}, "its architecture is LlamaForCausalLM, the run's OtherForCausalLM"),
        ({"weights": "random"}, r"the run's weights were random \(model\.load_format = dummy\)"),
    ):
        run_of(output, model, **({"weights": "checkpoint"} | change))
        with pytest.raises(ConfigError, match=told):
            verify(output.url, recompute=1, model_path=str(model), boundaries=boundaries)
    run_of(output, model, weights="checkpoint", architecture="OtherForCausalLM")
    (model / "upper.safetensors").unlink()
    with pytest.raises(ConfigError, match="its architecture is" if boundaries else "1 weight file"):
        verify(output.url, recompute=1, model_path=str(model), boundaries=boundaries)


def test_boundaries_that_cannot_be_recomputed_are_clear_errors(half):
    output, model = half
    with pytest.raises(ConfigError, match="--boundary 2: the run did not store it; it stored 1, 3"):
        verify(output.url, recompute=1, model_path=str(model), boundaries=[1, 2])
    with pytest.raises(ConfigError, match="say with --recompute N how many rows"):
        verify(output.url, model_path=str(model), boundaries=[1])
    with pytest.raises(ConfigError, match="--model no/where: no such folder"):
        verify(output.url, recompute=1, model_path="no/where", boundaries=[1])
    edit_json(Path(output.url) / "run.json", lambda r: r["identity"]["capture"].update(boundaries=[]))
    with pytest.raises(ConfigError, match="it stored none, only the final state"):
        verify(output.url, recompute=1, model_path=str(model), boundaries=[1])
