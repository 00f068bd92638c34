"""What `ray-extract submit` hands to Ray, and what it makes of what Ray says; without a cluster."""

import asyncio
import os
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from simulated import make_rows, make_work

from ray_extract import cli, submit
from ray_extract.errors import ConfigError
from ray_extract.submit import Request, entrypoint, exit_code, follow, runtime_env


def test_the_command_names_the_job_file_as_the_cluster_sees_it_and_quotes_what_a_shell_would_read(
    tmp_path: Path,
) -> None:
    config = tmp_path / "jobs" / "job.yaml"
    alone = Request(config, ["engine.count=2", "dataset.paths=[a b.jsonl]"])
    assert entrypoint(alone) == (
        "exec python -m ray_extract.run --config job.yaml engine.count=2 'dataset.paths=[a b.jsonl]'"
    )
    inside = Request(config, working_dir=tmp_path, python="/opt/venv/bin/python")
    assert entrypoint(inside) == "exec /opt/venv/bin/python -m ray_extract.run --config jobs/job.yaml"
    with pytest.raises(ConfigError, match=r"^--working-dir .*: must hold the job file"):
        entrypoint(Request(config, working_dir=tmp_path / "other"))


def test_ray_is_told_to_wait_for_the_drain_in_whole_seconds() -> None:
    env = runtime_env(Path("/x"), 90.5)
    assert int(env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 90.5 + 30


@pytest.mark.parametrize(
    ("status", "driver", "code"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 1, 1),
        ("FAILED", 2, 2),
        ("FAILED", 3, 3),
        ("FAILED", 127, 127),  # no such interpreter
        ("FAILED", -9, 3),  # killed
        ("FAILED", None, 3),  # its node is gone
        ("STOPPED", None, 3),  # drained
    ],
)
def test_the_exit_code_is_the_drivers_or_else_that_of_a_run_that_can_go_on(
    status: str, driver: int | None, code: int
) -> None:
    assert exit_code(status, driver) == code


class Status(str):
    def is_terminal(self) -> bool:
        return self in ("SUCCEEDED", "FAILED", "STOPPED")


class Client:
    """A cluster whose log stream breaks off early, and which does not answer now and then."""

    def __init__(self) -> None:
        self.asked = self.streams = 0
        self.log = "first\nsecond\nthird\n"

    def get_job_info(self, name: str) -> Any:
        self.asked += 1
        if self.asked == 2:
            raise RuntimeError("the head is away")
        status = Status("FAILED" if self.asked > 4 else "RUNNING")
        return types.SimpleNamespace(status=status, driver_exit_code=1, message="")

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        self.streams += 1
        yield self.log[:8]
        if self.streams < 3:
            raise RuntimeError("WebSocket connection closed unexpectedly")
        yield self.log[8:]


def test_a_log_that_breaks_off_neither_ends_the_job_nor_is_shown_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "_POLL_S", 0.05)
    client = Client()
    assert follow(client, "job") == 1
    assert client.asked == 5 and client.streams >= 3
    assert capsys.readouterr().out == "first\nsecond\nthird\njob job: FAILED, exit code 1\n"


def test_a_cluster_that_answers_no_more_is_given_up_with_the_code_to_try_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "_POLL_S", 0.01)
    monkeypatch.setattr(submit, "_SILENT_S", 0.2)

    class Gone(Client):
        def get_job_info(self, name: str) -> Any:
            raise ConnectionError("refused")

        async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
            await asyncio.sleep(60)
            yield ""

    assert follow(Gone(), "job", "http://head:8265") == 3
    assert "ray-extract submit --attach job --address http://head:8265" in capsys.readouterr().err


def test_mistakes_are_one_line_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    work = make_work(tmp_path, make_rows(2))
    for args, told in (
        ([], "--config is missing"),
        (work.args("engine.cout=2"), "did you mean count?"),
        (work.args("--working-dir", str(tmp_path / "model")), "must hold the job file"),
        (work.args("--address", "head:6379"), "give the dashboard's URL, such as http://head:8265"),
        (work.args("--address", "http://127.0.0.1:9"), "--address http://127.0.0.1:9: Failed to connect to Ray"),
        (work.args("--address", "http://127.0.0.1:9"), "http://127.0.0.1:9; is it the dashboard"),
    ):
        assert cli.main(["submit", *args]) == 2
        out, err = capsys.readouterr()
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert told in line and out == ""


def test_an_address_that_is_named_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own client would take the variable."""
    import ray.job_submission

    seen: list[str | None] = []
    monkeypatch.setattr(
        ray.job_submission, "JobSubmissionClient", lambda address: seen.append(os.environ.get("RAY_ADDRESS"))
    )
    monkeypatch.setenv("RAY_ADDRESS", "http://other:8265")
    submit.connect("http://head:8265")
    submit.connect(None)
    assert seen == [None, "http://other:8265"] and os.environ["RAY_ADDRESS"] == "http://other:8265"
