"""The commands, as far as nothing has to be started: mistakes, plan, status and verify."""

import os
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
    monkeypatch.setattr(run, "_extract", None)  # would raise a TypeError, and end with another code
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


# Sends a signal when a module is imported.
_STRIKE = """
import os, signal, sys, time

class Strike:
    def find_spec(self, name, *_):
        if name == "{module}":
            os.kill(os.getpid(), signal.{signal})
            time.sleep(60)

sys.meta_path.insert(0, Strike())
"""


@pytest.mark.parametrize(
    ("command", "name", "module"),
    [
        ("ray_extract.run", "SIGTERM", "ray_extract.config"),
        ("ray_extract.run", "SIGINT", "ray_extract.config"),
        ("ray_extract.run", "SIGTERM", "ray"),
        ("ray_extract run", "SIGTERM", "ray_extract.config"),
    ],
)
def test_a_signal_before_the_first_line_of_the_log_says_how_to_go_on(
    command: str, name: str, module: str, tmp_path: Path
) -> None:
    """While modules are imported, which takes most of the time until then."""
    work = make_work(tmp_path, make_rows(3))
    (tmp_path / "sitecustomize.py").write_text(_STRIKE.format(module=module, signal=name))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", *command.split(), *work.args()],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 3, ended.stderr
    assert lines_of(ended.stderr) == ["error: ended at once, on request; run the same command again to go on"]


def test_a_signal_while_the_process_ends_changes_neither_its_code_nor_what_it_said() -> None:
    """As while Ray shuts down, which it does at Python's exit."""
    program = (
        "import atexit, os, signal, time; from ray_extract.console import leave\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.{name}), time.sleep(60)))\n"
        "print('all is said', flush=True); leave({code})"
    )
    for name, code in (("SIGINT", 3), ("SIGTERM", 0)):
        ended = subprocess.run(
            [sys.executable, "-c", program.format(name=name, code=code)], capture_output=True, text=True, timeout=50
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (code, "all is said\n", "")


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
    assert "captures  2, 4, 5, final" in out
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
        assert cli.main([command, str(folder)]) == 2
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
    assert cli.main(["verify", output.url]) == 1
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
    assert "1 shard, " in out[1] and "--delete" in out[1] and sorted(shards.iterdir()) == before
    assert cli.main(["sweep", output.url, "--delete"]) == 0
    assert set(before) - set(shards.iterdir()) == {shards / "u00000000.late.safetensors"}
    capsys.readouterr()
    assert cli.main(["sweep", output.url, "--delete"]) == 0
    assert capsys.readouterr().out.startswith("nothing to sweep")


def test_strange_files_beside_the_commits_are_no_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = outputs.make_output(tmp_path)
    for name in (".nfs0001", "x.tmp", "u00000000.json.part"):
        (tmp_path / "out/commits" / name).write_text("")
    assert cli.main(["verify", output.url]) == 0
    assert cli.main(["sweep", output.url]) == 0
    assert "nothing to sweep" in capsys.readouterr().out


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


# Arguments that the parser refuses, and what it must say.
WRONG_ARGUMENTS = [
    ("nonsense", "argument COMMAND: invalid choice: 'nonsense' (choose from"),
    ("status", "required: url"),
    ("sweep somewhere --now", "unrecognized arguments: --now"),
    ("plan --config", "argument --config: expected one argument"),
    ("run --draft-config", "argument --draft-config: expected one argument"),
    ("verify somewhere --recompute two", "argument --recompute: 'two': must be a whole number"),
    ("verify somewhere --recompute -1", "argument --recompute: '-1': must not be negative"),
    ("verify somewhere --boundary 1.5", "argument --boundary: '1.5': must be a whole number"),
    ("verify somewhere --seed -1", "argument --seed: '-1': must not be negative"),
    ("export somewhere --out e --to nobody", "argument --to: invalid choice: 'nobody' (choose from"),
    ("export somewhere --out e --to specforge --strategy none", "argument --strategy: invalid choice: 'none'"),
    ("export somewhere --out e --to specforge --boundaries 2,,5", "argument --boundaries: '': must be a whole number"),
    *(
        (f"export somewhere --out e --to specforge --{name} few", f"argument --{name}: 'few': must be a whole number")
        for name in ("draft-vocab", "vocab-size", "max-length", "min-supervised")
    ),
]


@pytest.mark.parametrize(("args", "told"), WRONG_ARGUMENTS, ids=[args for args, _ in WRONG_ARGUMENTS])
def test_a_wrong_argument_is_named_in_words(args: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(args.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert told in err and out == ""
    assert " _" not in err and "'_" not in err, "a name of the code"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("status s3://bucket/x --option endpoint", "--option 'endpoint': must be KEY=VALUE"),
        ("verify s3://bucket/x --option =x", "--option '': must be KEY=VALUE"),
        (
            "sweep s3://bucket/x --option regoin=x",
            "storage_options.regoin: no such option for s3://; did you mean region",
        ),
        (
            "status s3://bucket/x --option skip_signature=1",
            "storage_options.skip_signature = '1': must be true or false",
        ),
        ("export {url} --to specforge --out e --max-length 0", "--max-length 0: must be at least 1"),
        ("export {url} --to specforge --out e --min-supervised 0", "--min-supervised 0: must be at least 1"),
        ("export {url} --to specforge --out e --draft-config none", "draft config none: cannot be read"),
        ("plan --preset none {job}", "capture.preset = 'none'"),
        ("plan --draft-config none --preset speculators-eagle3 {job}", "draft config none: cannot be read"),
    ],
)
def test_a_wrong_value_is_one_line(args: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = outputs.make_output(tmp_path / "run").url if "{url}" in args else ""
    job = " ".join(make_work(tmp_path, make_rows(3)).args()) if "{job}" in args else ""
    assert cli.main(args.format(url=url, job=job).split()) == 2
    out, err = capsys.readouterr()
    (line,) = lines_of(err)
    assert told in line and out == ""


@pytest.mark.parametrize(
    ("args", "code"),
    [("verify {url}", 0), ("verify {damaged}", 1), ("status {url}", 0), ("sweep {url}", 0), ("--help", 0)],
)
def test_a_command_whose_reader_left_ends_as_it_would_have(args: str, code: int, tmp_path: Path) -> None:
    url = outputs.make_output(tmp_path / "a").url
    damaged = outputs.make_output(tmp_path / "b").url
    next((tmp_path / "b/out/shards").iterdir()).unlink()
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "ray_extract", *args.format(url=url, damaged=damaged).split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert ended.returncode == code, ended.stderr
    assert "BrokenPipe" not in ended.stderr and "Traceback" not in ended.stderr
