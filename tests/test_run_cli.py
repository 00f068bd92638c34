"""The commands, as far as nothing has to be started: mistakes, plan, status and verify."""

import subprocess
import sys
from pathlib import Path

import outputs
import pytest
from servers import free_ports
from simulated import make_rows, make_work

from ray_extract import cli, run


def lines_of(text: str) -> list[str]:
    """Lines that say what went wrong."""
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("error: ")]


# An override, and what the line must hold.
MISTAKES = [
    ("engine={kind: sglang, args: {disable_radix_cache: false}}", "engine.args.disable_radix_cache = False is refused"),
    ("engine={kind: sglang, args: {tp_size: 2}}", "engine.args.tp_size: set engine.tp_size instead"),
    ("engine.cout=2", "engine.cout: no such key; did you mean count?"),
    ("engine.count=0", "engine.count = 0: input should be greater than 0"),
    ("engine.count=two", "engine.count = 'two': "),
    ("dataset.paths=[nowhere.jsonl]", "nowhere.jsonl"),
    ("dataset.paths=[job.yaml]", "job.yaml"),
    ("model.path=/nowhere", "model.path = '/nowhere': no such folder"),
    ("model.path=.", "model.path = '.': no config.json in it"),
    ("model.load_format=auto", "no *.safetensors file in it"),
    ("capture.boundaries=[4,2]", "capture.boundaries = [4, 2]: must ascend"),
    ("capture.boundaries=[2,9]", "9"),
    ("output.url=nosuch://bucket/out", "nosuch"),
    ("output.url=s3://", "bucket is missing"),
    ("output.shard_bytes=big", "output.shard_bytes = 'big': "),
    ("output.storage_options.region=x", "a local folder"),
    ("run.units_in_flight=1", "run.units_in_flight = 1: "),
    ("nonsense", "'nonsense': an override looks like section.key=value"),
    ("job.yaml=", "no such key"),
]


@pytest.mark.parametrize(("override", "told"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistake_is_one_line_and_starts_nothing(
    override: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = make_work(tmp_path, make_rows(3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_extract", None)  # would raise a TypeError, which nobody catches
    assert run.main(work.args(override)) == 2
    out, err = capsys.readouterr()
    (line,) = lines_of(err)
    assert told in line
    assert out == ""
    assert not (tmp_path / "out/plan").exists()


def test_mistake_in_the_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert lines_of(capsys.readouterr().err) == [f"error: --config {tmp_path / 'none.yaml'}: no such file"]
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {path: [")
    assert run.main(["--config", str(broken)]) == 2
    assert "not valid YAML" in "".join(lines_of(capsys.readouterr().err))
    assert run.main([]) == 2
    assert "model is missing" in capsys.readouterr().err


def test_mistake_does_not_wait_for_ray_or_torch(tmp_path: Path) -> None:
    work = make_work(tmp_path, make_rows(3))
    program = (
        "import sys; from ray_extract.run import main; code = main(sys.argv[1:]);"
        "sys.exit(code if not {'ray', 'torch', 'transformers', 'sglang'} & set(sys.modules) else 99)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *work.args("model.path=/nowhere")], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2, ended.stderr
    assert len(lines_of(ended.stderr)) == 1


def test_address_without_a_cluster_is_refused_at_once(tmp_path: Path) -> None:
    work = make_work(tmp_path, make_rows(3))
    (port,) = free_ports(1)
    # Ray itself would try for five minutes.
    ended = subprocess.run(
        [sys.executable, "-m", "ray_extract.run", *work.args(f"run.address=127.0.0.1:{port}")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2, ended.stderr
    (line,) = lines_of(ended.stderr)
    assert f"run.address = '127.0.0.1:{port}': no Ray cluster answers there" in line


def test_plan_says_what_a_job_takes_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = make_work(tmp_path, [*make_rows(5), []])
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["plan", *work.args()]) == 0
    out = capsys.readouterr().out
    assert "states      2, 4, 5, final" in out
    assert "6 = 5 usable + 1 skipped" in out
    assert "shards    3" in out
    assert sorted(tmp_path.rglob("*")) == before
    for mistake in ("engine.cout=2", f"output.url={work.config}", "output.url=foo://x/y", "engine.args.x=1"):
        assert cli.main(["plan", *work.args(mistake)]) == 2
        assert len(lines_of(capsys.readouterr().err)) == 1


def test_an_output_that_cannot_be_written_names_the_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = make_work(tmp_path, make_rows(3))
    for url in (str(work.config), f"{work.config}/below", "/proc/nowhere"):
        assert run.main(work.args(f"output.url={url}")) == 2
        (line,) = lines_of(capsys.readouterr().err)
        assert line.startswith(f"error: output.url = '{url}': ")


@pytest.mark.parametrize("command", ["status", "verify", "sweep"])
def test_folder_that_is_no_output_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert cli.main([command, str(folder)]) in (1, 2)
        out, err = capsys.readouterr()
        (line,) = lines_of(err)
        assert str(folder) in line and out == ""
    assert not list(tmp_path.iterdir())


def test_verify_ends_with_one_when_a_shard_was_altered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = outputs.make_output(tmp_path)
    assert cli.main(["verify", output.url]) == 0
    shard = next((tmp_path / "out/shards").iterdir())
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    capsys.readouterr()
    assert cli.main(["verify", output.url]) == cli.EXIT_NOT_VERIFIED
    assert shard.name in capsys.readouterr().out


def test_sweep_lists_what_lost_and_deletes_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = outputs.make_output(tmp_path, leave_out=["u00000001"])
    shards = tmp_path / "out/shards"
    (shards / "u00000000.late.safetensors").write_bytes(b"x" * 2048)
    (shards / "u00000001.unfinished.safetensors").write_bytes(b"x")  # somebody may be about to commit it
    before = sorted(shards.iterdir())
    assert cli.main(["sweep", output.url]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:2] == ["lost", "shards/u00000000.late.safetensors"] and len(out) == 2
    assert "1 shards" in out[1] and "--delete" in out[1] and sorted(shards.iterdir()) == before
    assert cli.main(["sweep", output.url, "--delete"]) == 0
    assert set(before) - set(shards.iterdir()) == {shards / "u00000000.late.safetensors"}
    capsys.readouterr()
    assert cli.main(["sweep", output.url, "--delete"]) == 0
    assert capsys.readouterr().out.startswith("0 shards")


def test_strange_files_beside_the_commits_are_no_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = outputs.make_output(tmp_path)
    for name in (".nfs0001", "x.tmp", "u00000000.json.part"):
        (tmp_path / "out/commits" / name).write_text("")
    assert cli.main(["verify", output.url]) == 0
    assert cli.main(["sweep", output.url]) == 0
    assert "0 shards" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "{}", "[]", ""])
def test_a_damaged_progress_file_is_a_clear_error(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = outputs.make_output(tmp_path)
    (tmp_path / "out/progress.json").write_text(text)
    for more in ([], ["--json"]):
        assert cli.main(["status", output.url, *more]) == 1
        out, err = capsys.readouterr()
        (line,) = lines_of(err)
        assert "progress.json is damaged" in line and out == ""


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--boundary", "1"], "--boundary says what --recompute does; say with --recompute N how many rows"),
        (["--recompute", "2"], "--recompute needs the checkpoint that the run used; name its folder with --model"),
        (["--recompute", "2", "--model", ".", "--boundary", "1", "--boundary", "2"], "it stored 1, 3"),
        (["--recompute", "2", "--model", "nowhere", "--boundary", "1"], "--model nowhere: no such folder"),
        (["--recompute", "2", "--model", ".", "--boundary", "1"], "--model .: no config.json in it"),
        (["--recompute", "2", "--model", "."], "--model .: no config.json in it"),
    ],
)
def test_verify_says_in_a_line_what_recomputing_lacks(
    args: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = outputs.make_output(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", output.url, *args]) == 2
    out, err = capsys.readouterr()
    (line,) = lines_of(err)
    assert told in line and out == ""


@pytest.mark.parametrize("value", ["-1", "two", "1.5"])
def test_verify_wants_whole_boundaries(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "somewhere", "--boundary", value])
    assert ended.value.code == 2
    assert "argument --boundary" in capsys.readouterr().err
