"""Runs on a store that fails: no row lost, none twice, no unit extracted again for what a second try settles."""

import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
from faulty_proxy import Do, FaultyProxy, Request
from simulated import Work, check_output, make_rows, make_work, until

from ray_extract.run import run
from ray_extract.store import open_store

pytestmark = [pytest.mark.ray, pytest.mark.s3]

FAULTS = (Do.SLOW_DOWN, Do.BUSY, Do.RESET_BEFORE, Do.RESET_WITHIN, Do.LOSE_ANSWER, Do.CUT_ANSWER)


@pytest.fixture
def proxy(s3: servers.S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3.storage_options["endpoint"]) as proxy:
        yield proxy


def make(folder: Path, ray_cluster: Any, s3: servers.S3Server, proxy: FaultyProxy, **more: Any) -> tuple[Work, Work]:
    """The same job with its output behind the proxy, and before it."""
    url, direct = f"{s3.url}/{folder.name}", s3.storage_options
    options = {**direct, "endpoint": proxy.endpoint}
    work = make_work(folder, make_rows(24), str(ray_cluster.address), url=url, options=options, **more)
    return work, Work(work.folder, work.config, work.rows, url, direct, work.mark)


def attempts(work: Work) -> list[str]:
    """The number of the lease of each commit, and of the upload if it was not the first."""
    return [receipt.attempt.partition("-")[2] for receipt in work.receipts()]


@pytest.mark.parametrize(("format", "seed"), [("raw", 1), ("raw", 2), ("parquet", 3)])
def test_a_run_on_a_store_that_fails_one_request_in_four_is_whole(
    tmp_path: Path, ray_cluster: Any, s3: servers.S3Server, proxy: FaultyProxy, format: str, seed: int
) -> None:
    work, direct = make(tmp_path, ray_cluster, s3, proxy, output={"format": format, "max_rows": 2})
    draw = random.Random(seed)
    proxy.decide = lambda request: draw.choice(FAULTS) if draw.random() < 1 / 4 else Do.PASS
    summary = run(work.job())
    print(f"{len(proxy.seen)} requests, {proxy.counts()}")
    assert summary.totals.ok == 24 and summary.units == 12
    assert sum(proxy.counts().values()) > 8
    proxy.decide = lambda request: Do.PASS
    check_output(direct)
    # Each unit was extracted once: what failed was sent again, and not computed again.
    assert {attempt.partition("-")[0] for attempt in attempts(direct)} == {"01"}


def test_a_store_that_is_down_for_a_while_costs_no_extraction(
    tmp_path: Path, ray_cluster: Any, s3: servers.S3Server, proxy: FaultyProxy
) -> None:
    work, direct = make(tmp_path, ray_cluster, s3, proxy, output={"format": "raw", "max_rows": 2})
    done = threading.Event()

    def decide(request: Request) -> Do:
        """Down from the third commit on, for 12 seconds."""
        if "/commits/" in request.path and request.method == "PUT":
            decide.commits += 1  # type: ignore[attr-defined]
        if decide.commits < 3:  # type: ignore[attr-defined]
            return Do.PASS
        decide.since = decide.since or time.monotonic()  # type: ignore[attr-defined]
        down = time.monotonic() - decide.since < 12  # type: ignore[attr-defined]
        if not down:
            done.set()
        return Do.RESET_BEFORE if down else Do.PASS

    decide.commits, decide.since = 0, 0.0  # type: ignore[attr-defined]
    proxy.decide = decide
    summary = run(work.job("engine.args={tokens_per_s: 400}"))
    assert done.is_set() and not summary.this.retries
    check_output(direct)
    assert {attempt.partition("-")[0] for attempt in attempts(direct)} == {"01"}


def test_a_run_whose_store_stays_down_ends_in_time_and_goes_on_later(
    tmp_path: Path, ray_cluster: Any, s3: servers.S3Server, proxy: FaultyProxy
) -> None:
    output, once = {"format": "raw", "max_rows": 2, "outage_s": 2}, {"max_attempts": 1}
    work, direct = make(tmp_path, ray_cluster, s3, proxy, output=output, run=once)
    process = work.start("engine.args={tokens_per_s: 100}")
    until(lambda: direct.commits() >= 2, "two commits")
    proxy.decide = lambda request: Do.SLOW_DOWN
    began = time.monotonic()
    try:
        text, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 3 and "Traceback" not in text, text
    assert "given up" in text and time.monotonic() - began < 120
    assert servers.SECRET_KEY not in text
    before = {receipt.unit: receipt.attempt for receipt in direct.receipts()}
    assert 2 <= len(before) < 12
    proxy.decide = lambda request: Do.PASS
    run(work.job())
    check_output(direct)
    assert before.items() <= {receipt.unit: receipt.attempt for receipt in direct.receipts()}.items()
    assert open_store(direct.url, direct.options).head("_SUCCESS") is not None


@pytest.mark.parametrize(
    ("do", "code", "told"),
    [
        (
            Do.EXPIRE,
            3,
            "the credentials have expired, or the session token is of others; get new ones and run",
        ),
        (Do.QUOTA, 2, "no space left; free some, or raise the quota, and run the same command"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_run_whose_credentials_or_space_end_stops_at_once_with_the_reason_and_goes_on_later(
    tmp_path: Path, ray_cluster: Any, s3: servers.S3Server, proxy: FaultyProxy, do: Do, code: int, told: str
) -> None:
    work, direct = make(tmp_path, ray_cluster, s3, proxy, output={"format": "raw", "max_rows": 2})
    process = work.start("engine.args={tokens_per_s: 100}")
    until(lambda: direct.commits() >= 2, "two commits")
    proxy.decide = lambda request: do
    began = time.monotonic()
    try:
        text, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == code and "Traceback" not in text, text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert told in line and time.monotonic() - began < 60  # output.outage_s is ten minutes
    assert servers.SECRET_KEY not in text
    before = {receipt.unit: receipt.attempt for receipt in direct.receipts()}
    assert 2 <= len(before) < 12
    proxy.decide = lambda request: Do.PASS
    run(work.job())
    check_output(direct)
    assert before.items() <= {receipt.unit: receipt.attempt for receipt in direct.receipts()}.items()
    store = open_store(direct.url, direct.options)
    kept = {item.key: store.get(item.key) for item in store.list("")}
    assert {"run.json", "progress.json", "_SUCCESS", "manifest-000000.parquet"} <= set(kept)
    assert [key for key, data in kept.items() if servers.SECRET_KEY.encode() in data] == []
