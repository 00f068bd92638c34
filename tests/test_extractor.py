"""One extractor with a simulated engine, without Ray: what a killed engine costs."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulated import HIDDEN, arenas, hosts, make_rows, make_work, until

from ray_extract.engine.process import EngineProcess
from ray_extract.engine.simulated import simulated_states
from ray_extract.extractor import Extractor, ExtractorSetup
from ray_extract.layout import RequestId, parse_rid
from ray_extract.shards.image import row_table


def test_killed_engine_host_repeats_only_the_rows_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(8)
    work = make_work(tmp_path, rows, engine={"args": {"tokens_per_s": 200}, "chunked_prefill_size": 50})
    sent: list[RequestId] = []
    submit = EngineProcess.submit

    def recorded(self: EngineProcess, rid: str, *args: Any) -> Any:
        request = parse_rid(rid)
        assert request is not None
        sent.append(request)
        return submit(self, rid, *args)

    monkeypatch.setattr(EngineProcess, "submit", recorded)
    extractor = Extractor(
        ExtractorSetup(
            job=work.job().model_dump(mode="json"),
            boundaries=(2, 4, 5),
            dtype="BF16",
            hidden=HIDDEN,
            vocab_size=1000,
            arena_bytes=1 << 20,
            log_dir=str(tmp_path),
        )
    )
    found: dict[str, Any] = {}

    def capture() -> None:
        table = row_table(range(8), [np.array(r, np.int32) for r in rows], [np.ones(len(r), np.uint8) for r in rows])
        with extractor.capture(table, {}) as captured:
            found["failures"] = captured.failures
            for column in captured.layout.columns:
                raw = captured.layout.state_bytes(captured.buffer, column)
                found[column.name] = torch.from_numpy(raw.copy()).view(torch.bfloat16)

    extractor.start()
    try:
        (host,) = hosts(work.mark)
        (arena,) = arenas(host)
        thread = threading.Thread(target=capture, daemon=True)
        thread.start()
        until(lambda: extractor.progress()["tokens_captured"] > sum(map(len, rows[:3])), "three rows")
        os.kill(host, signal.SIGKILL)
        thread.join(120)
        assert extractor.progress()["engine_starts"] == 2
    finally:
        extractor.stop()
    assert found["failures"] == {}
    again = sorted(r.row for r in sent if r.attempt > 0)
    assert 0 < len(again) <= 5 and again == list(range(8 - len(again), 8))
    assert sorted(r.row for r in sent if r.attempt == 0) == list(range(8))
    wanted = [simulated_states(np.array(r, np.int32), 0, 4, HIDDEN, "BF16") for r in rows]
    for k, name in enumerate(("state.2", "state.4", "state.5", "state.final")):
        assert found[name].equal(torch.cat([states[k] for states in wanted]))
    assert not hosts(work.mark) and not arena.exists()
