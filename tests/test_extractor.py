"""One extractor with a simulated engine, without Ray: what a killed engine costs, and what never reaches one."""

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
from ray_extract.errors import ArenaError
from ray_extract.extractor import Extractor, ExtractorSetup, canary_table, unfit_reason
from ray_extract.layout import RequestId, parse_rid
from ray_extract.records import RowStatus
from ray_extract.shards.image import lay_out, row_table

VOCAB = 1000


def setup(job: dict[str, Any], logs: Path, **changed: Any) -> ExtractorSetup:
    fields = {"boundaries": (2, 4, 5), "dtype": "BF16", "hidden": HIDDEN, "vocab_size": VOCAB, "arena_bytes": 1 << 20}
    return ExtractorSetup(job=job, num_layers=8, log_dir=str(logs), **{**fields, **changed})


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
    extractor = Extractor(setup(work.job().model_dump(mode="json"), tmp_path))
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


UNFIT: dict[str, tuple[list[int], str | None]] = {
    "the longest": ([0, VOCAB - 1, 5, 5], None),
    "one token": ([0], None),
    "nothing": ([], "no tokens"),
    "too long": ([1] * 5, "5 tokens; this engine runs at most 4"),
    "just beyond the vocabulary": ([3, VOCAB], f"token id out of range: {VOCAB} with a vocabulary of {VOCAB}"),
    "negative": ([3, -1], f"token id out of range: -1 with a vocabulary of {VOCAB}"),
    "both": ([VOCAB, -7], f"token id out of range: -7 with a vocabulary of {VOCAB}"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_row_that_an_engine_may_not_get_has_a_reason(what: str) -> None:
    ids, reason = UNFIT[what]
    assert unfit_reason(np.array(ids, np.int32), 4, VOCAB) == reason


def test_unfit_rows_are_never_sent_and_fail_among_good_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang checks no token ids: the first one that has no embedding would end the engine, and the next one again."""
    rows = [[5, 6, 7], [5, VOCAB], [8], [], [-1], [9] * 40]
    work = make_work(tmp_path, [[1]], engine={"args": {"max_input_tokens": 30}})
    sent: list[int] = []
    submit = EngineProcess.submit

    def recorded(self: EngineProcess, rid: str, *args: Any) -> Any:
        request = parse_rid(rid)
        assert request is not None
        sent.append(request.row)
        return submit(self, rid, *args)

    monkeypatch.setattr(EngineProcess, "submit", recorded)
    extractor = Extractor(setup(work.job().model_dump(mode="json"), tmp_path))
    table = row_table(range(6), [np.array(r, np.int32) for r in rows], [np.ones(len(r), np.uint8) for r in rows])
    extractor.start()
    try:
        with extractor.capture(table, {}) as captured:
            failures = captured.failures
        assert extractor.progress()["engine_starts"] == 1
    finally:
        extractor.stop()
    assert sorted(sent) == [0, 2]
    assert {row: f.reason.partition(":")[0] for row, f in failures.items()} == {
        1: "token id out of range",
        3: "no tokens",
        4: "token id out of range",
        5: "40 tokens; this engine runs at most 30",
    }
    assert {f.status for f in failures.values()} == {RowStatus.REJECTED}


def test_an_image_larger_than_the_arena_is_refused_though_it_would_fit_with_the_canarys_place(tmp_path: Path) -> None:
    """That place is never free again: such an image would wait for ever."""
    extractor = Extractor(setup(make_work(tmp_path, [[1]]).job().model_dump(mode="json"), tmp_path))
    extractor.start()
    try:
        arena = extractor._arena
        assert arena is not None
        ids = np.zeros(arena.spec.nbytes // 2 // extractor.columns[0].token_bytes // 4, np.int32)
        with (
            pytest.raises(ArenaError, match=r"in an arena of 1048576; raise run\.arena_bytes"),
            extractor.capture(row_table([0], [ids], [np.ones(len(ids), np.uint8)]), {}),
        ):
            pass
        assert extractor.progress()["arena_used"] == 0
    finally:
        extractor.stop()


def test_the_canary_fits_its_extent_however_many_layers_are_captured(tmp_path: Path) -> None:
    """All layers of a wide model, on eight ranks: written past its end, the canary would lie in the next image."""
    job = make_work(tmp_path, [[1]], engine={"dp_size": 8}).job().model_dump(mode="json")
    wide = Extractor(setup(job, tmp_path, boundaries=tuple(range(1, 60)), hidden=7168))
    layout = lay_out(canary_table(VOCAB, 4096, 8), wide.columns, {})
    assert wide._canary_bytes >= layout.nbytes > 64 << 20
    assert Extractor(setup(job, tmp_path))._canary_bytes == 64 << 20
