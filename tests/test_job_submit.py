"""The main job as most people start it: through Ray's job API."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clusters
import pytest
import servers
from simulated import WAIT_S, Work, check_output, make_rows, make_work, until

pytestmark = pytest.mark.ray

REJECT = 1


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The dashboard of a cluster; the token that it asks for is in the environment, see clusters."""
    (port,) = servers.free_ports(1)
    dashboard: dict[str, Any] = {
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": port,
        "include_log_monitor": True,
    }
    with clusters.cluster(num_cpus=2, **dashboard):
        yield f"http://127.0.0.1:{port}"


def start(work: Work, url: str, *args: str) -> "subprocess.Popen[str]":
    """ray-extract submit."""
    return subprocess.Popen(
        [sys.executable, "-m", "ray_extract", "submit", "--address", url, "--python", sys.executable, *args],
        cwd=work.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and output."""
    try:
        text, _ = process.communicate(timeout=2 * WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, text


def test_job_submitted_to_a_cluster_runs_there_and_its_exit_code_comes_back(tmp_path: Path, url: str) -> None:
    rows = make_rows(6)
    rows[3][0] = REJECT
    engine = {"cpus": 0.25, "count": 2, "args": {"reject_token": REJECT}}
    work = make_work(tmp_path, rows, engine=engine)
    # Beside the job file, so in the folder that goes along.
    args = ["--config", "job.yaml", "--working-dir", ".", "dataset.paths=[rows.jsonl]"]
    code, text = end(start(work, url, *args))
    assert code == 1, text
    assert text.count("rows        6\n") == 1 and text.count("failed    1   (1 x rejected)") == 1
    assert "FAILED, exit code 1" in text
    check_output(work, {3: "rejected"})
    code, text = end(start(work, url, *args, "run.max_failed_rows=1"))
    assert code == 0 and "nothing was left to extract" in text, text
    code, text = end(start(work, url, *args, "capture.final=false"))
    assert code == 2 and "capture.final: run has true, this job asks false" in text, text


def test_rays_own_command_submits_a_job_too(tmp_path: Path, url: str) -> None:
    work = make_work(tmp_path, make_rows(4), engine={"cpus": 0.25})
    ray = Path(sys.executable).with_name("ray")
    run = [sys.executable, "-m", "ray_extract.run", "--config", "job.yaml", "dataset.paths=[rows.jsonl]"]
    command = [ray, "job", "submit", "--address", url, "--working-dir", work.folder, "--", *run]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path.parent
    )
    code, text = end(process)
    assert code == 0 and text.count("rows        4\n") == 1, text
    check_output(work)


def test_a_job_is_left_and_followed_again_and_drains_when_it_is_stopped(tmp_path: Path, url: str) -> None:
    from ray.job_submission import JobSubmissionClient

    engine = {"cpus": 0.25, "args": {"tokens_per_s": 12}}  # five seconds a unit, and Ray kills after three by default
    work = make_work(tmp_path, make_rows(12), engine=engine, output={"max_rows": 1})
    process = start(work, url, "--config", str(work.config), "--submission-id", "drained")
    until(work.commits, "the first commit", 2 * WAIT_S)
    process.send_signal(signal.SIGINT)
    code, text = end(process)
    assert code == 130 and f"ray-extract submit --attach drained --address {url}" in text, text
    assert "Traceback" not in text
    client = JobSubmissionClient(url)
    assert client.get_job_status("drained") == "RUNNING"
    process = start(work, url, "--attach", "drained")
    client.stop_job("drained")
    code, text = end(process)
    assert code == 3 and "drained: STOPPED, exit code 3" in text, text
    assert "SIGTERM: finishing the units in flight" in text and "error: stopped on request with" in text
    done = work.commits()
    assert 1 < done < 12
    # Nothing that was begun is lost: each shard has its commit.
    assert len(list((tmp_path / "out/shards").iterdir())) == done
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["state"], summary["exit_code"], summary["units_done"]) == ("incomplete", 3, done)
    code, text = end(start(work, url, *work.args("engine.args={}")))
    assert code == 0 and f"{done} of 12 units are committed already" in text, text
    assert "SUCCEEDED, exit code 0" in text and "all 2 runs\n" in text
    check_output(work)
    whole = json.loads((tmp_path / "out/summary.json").read_text())["all_runs"]
    assert (whole["drives"], whole["unfinished"], whole["units"]) == (2, 0, 12)
    assert whole["tokens"] == sum(map(len, work.rows))
