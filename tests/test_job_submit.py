"""The main job as most people start it: through Ray's job API."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import clusters
import pytest
import servers
from simulated import WAIT_S, check_output, make_rows, make_work, until


@pytest.mark.ray
def test_job_submitted_to_a_cluster_runs_there_and_succeeds(tmp_path: Path) -> None:
    (port,) = servers.free_ports(1)
    work = make_work(tmp_path, make_rows(6), engine={"cpus": 0.25, "count": 2})
    dashboard: dict[str, Any] = {
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": port,
        "include_log_monitor": True,
    }
    with clusters.cluster(num_cpus=2, **dashboard):
        # The token that the cluster asks for is in the environment (RAY_AUTH_MODE, RAY_AUTH_TOKEN), see clusters.
        url = f"http://127.0.0.1:{port}"
        submit = subprocess.run(
            [
                str(Path(sys.executable).parent / "ray"),
                *("job", "submit", "--no-wait", "--address", url, "--submission-id", "extract", "--working-dir", "."),
                *("--", sys.executable, "-m", "ray_extract.run", "--config", "job.yaml"),
                "dataset.paths=[rows.jsonl]",  # beside the job file, so in the working directory that goes along
            ],
            cwd=work.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
        )
        assert submit.returncode == 0, submit.stdout
        from ray.job_submission import JobSubmissionClient

        client = JobSubmissionClient(url)
        # `ray job submit` itself may end with 0 before the job does; only the status tells.
        until(lambda: client.get_job_status("extract").is_terminal(), "the job's end", 2 * WAIT_S)
        logs = client.get_job_logs("extract")
        assert client.get_job_status("extract") == "SUCCEEDED", logs
    assert "rows        6\n" in logs
    check_output(work)
