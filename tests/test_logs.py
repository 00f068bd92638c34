"""Logs as JSON: one object a line, with what it is about and nothing more, of the driver and of workers."""

import contextlib
import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clusters  # noqa: F401  before Ray
import pytest
from simulated import WAIT_S, check_output, make_rows, make_work, until

from ray_extract import logs

SECRET = "CANARY-of-a-secret"


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no name yet."""
    monkeypatch.setattr(logs, "_process", {})


@contextlib.contextmanager
def written() -> Iterator[io.StringIO]:
    """A logger's lines."""
    logger, stream = logging.getLogger("ray_extract.some"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    logger.addHandler(handler)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_when_who_what_and_about_what_and_nothing_else() -> None:
    logger = logging.getLogger("ray_extract.some")
    logs.identify(run="s3://bucket/out", node="n1")
    with written() as stream, logs.about(unit="u00000001", attempt="ab-01"):
        logger.warning('it took %d s,\nand "more" = %s', 3, "ä", extra={"engine": 2, "token": SECRET, "unit": "u2"})
    (line,) = lines(stream)
    assert line.pop("time").endswith("Z") and SECRET not in stream.getvalue()
    assert line == {
        "level": "WARNING",
        "logger": "ray_extract.some",
        "message": 'it took 3 s,\nand "more" = ä',
        "run": "s3://bucket/out",
        "node": "n1",
        "engine": 2,
        "unit": "u2",
        "attempt": "ab-01",
    }


def test_what_work_is_about_ends_with_it_and_is_its_threads_own() -> None:
    logger = logging.getLogger("ray_extract.some")

    def work(unit: str) -> None:
        with logs.about(unit=unit):
            meet.wait()
            logger.warning(unit)

    with written() as stream:
        meet = threading.Barrier(2)
        threads = [threading.Thread(target=work, args=(unit,)) for unit in ("u1", "u2")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with logs.about(unit="u3"):
            with logs.about(attempt="01"):
                logger.warning("u3")
            logger.warning("u3")
        logger.warning("none")
    assert all(line.get("unit", "none") == line["message"] for line in lines(stream))
    assert [line.get("attempt") for line in lines(stream)[2:]] == ["01", None, None]


def test_an_exception_is_in_its_line() -> None:
    with written() as stream:
        try:
            raise ValueError("wrong")
        except ValueError:
            logging.getLogger("ray_extract.some").exception("told")
    (line,) = lines(stream)
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("ValueError: wrong")


def test_whoever_has_set_up_logging_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    root, theirs = logging.getLogger(), logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(root, "handlers", [theirs])
    logs.configure("json")
    assert root.handlers == [theirs] and not isinstance(theirs.formatter, logs.JsonFormatter)
    monkeypatch.setattr(root, "handlers", [])
    for log_format, kind in (("text", logging.Formatter), ("json", logs.JsonFormatter)):
        logs.configure(log_format)
        (ours,) = root.handlers
        assert type(ours.formatter) is kind


def test_what_stops_a_run_is_a_line_too(tmp_path: Path) -> None:
    work = make_work(tmp_path, make_rows(2))
    command = [sys.executable, "-m", "ray_extract.run", *work.args("run.log_format=json", "model.path=/nowhere")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    (line,) = map(json.loads, ended.stderr.splitlines())
    assert (line["level"], line["message"][:12]) == ("ERROR", "model.path =")


@pytest.mark.ray
def test_driver_and_workers_name_run_unit_and_attempt_and_no_secret(tmp_path: Path, ray_cluster: Any) -> None:
    work = make_work(tmp_path, make_rows(6), ray_cluster.address, engine={"cpus": 0.25, "env": {"A_KEY": SECRET}})
    (tmp_path / "out").mkdir()
    (tmp_path / "out/shards").write_text("in the way of shards")
    command = [sys.executable, "-m", "ray_extract.run", *work.args("run.log_format=json")]
    folder = Path(ray_cluster.head_node.get_logs_dir_path())

    def told() -> list[dict[str, Any]]:
        """What workers of this run wrote."""
        found = [line for path in folder.glob("worker-*.err") for line in path.read_text().splitlines()]
        return [json.loads(line) for line in found if work.url in line]

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(told, "a worker's word")
        (tmp_path / "out/shards").unlink()
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    attempts = {receipt.unit: receipt.attempt for receipt in check_output(work)}
    for line in told():
        assert (line["run"], line["logger"], line["level"]) == (work.url, "ray_extract.store", "WARNING")
        # The next try of an attempt has the attempt's name and a number.
        assert line["unit"] in line["message"] and attempts[line["unit"]].startswith(f"{line['attempt']}-")
        assert line["node"]
    driver = [json.loads(line) for line in err.splitlines()]
    assert all(line["run"] == work.url for line in driver if line["logger"] == "ray_extract.driver")
    assert [line["engine"] for line in driver if line["message"].startswith("engine ready")] == [0]
    assert "rows        6" in out and SECRET not in out + err + json.dumps(told())
