"""One extractor with a simulated engine, without Ray: what a killed engine costs, and what never reaches one."""

import contextlib
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
from ray_extract.errors import ArenaError, EngineDied
from ray_extract.extractor import Extractor, ExtractorSetup, Watch, canary_table, unfit_reason
from ray_extract.layout import RequestId, parse_rid
from ray_extract.records import RowFailure, RowStatus
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


def capture(extractor: Extractor, rows: list[list[int]]) -> tuple[dict[int, RowFailure], dict[str, torch.Tensor]]:
    """The failures of rows by place, and the states by name."""
    ids = [np.array(row, np.int32) for row in rows]
    table = row_table(range(len(rows)), ids, [np.ones(len(row), np.uint8) for row in rows])
    with extractor.capture(table, {}) as captured:
        states = {
            column.name: torch.from_numpy(captured.layout.state_bytes(captured.buffer, column).copy()).view(
                torch.bfloat16
            )
            for column in captured.layout.columns
        }
        return captured.failures, states


def test_an_engine_that_answers_but_captures_nothing_is_restarted_and_only_the_row_at_fault_fails(
    tmp_path: Path,
) -> None:
    """Its answers say that it lives: it rejects requests while no pass runs. Only covered tokens tell that it hangs."""
    hang, reject = 1, 2
    rows = make_rows(5)
    rows[2][3] = hang
    engine = {"args": {"hang_token": hang, "reject_token": reject}, "stall_timeout_s": 1.5}
    work = make_work(tmp_path, rows, engine=engine)
    extractor = Extractor(setup(work.job().model_dump(mode="json"), tmp_path))
    answers: list[bool] = []
    over = threading.Event()

    def ask() -> None:
        """As a health check would, for as long as the rows are under way."""
        canary = extractor._canary
        assert canary is not None
        np.frombuffer(canary.buffer, np.int32, 1)[:] = reject
        while not over.wait(0.1):
            engine = extractor._engine
            with contextlib.suppress(EngineDied):
                if engine is not None:
                    answers.append(engine.submit(f"health.{len(answers)}", canary.offset, 1).result(60).ok)

    extractor.start()
    thread = threading.Thread(target=ask, daemon=True)
    try:
        thread.start()
        failures, states = capture(extractor, rows)
        over.set()
        progress = extractor.progress()
    finally:
        over.set()
        thread.join(20)
        extractor.stop()
    assert answers.count(False) == len(answers) > 10, "the engine must have answered while it hung"
    assert {row: failure.status for row, failure in failures.items()} == {2: RowStatus.ENGINE_DIED}
    # With the others, and alone; then one more for the rows behind it.
    assert (progress["engine_stalls"], progress["engine_starts"]) == (2, 3)
    wanted = [simulated_states(np.array(r, np.int32), 0, 4, HIDDEN, "BF16")[0] for r in rows]
    wanted[2].zero_()
    assert states["state.2"].equal(torch.cat(wanted))


def test_a_data_parallel_rank_that_hangs_is_found_while_the_others_work(tmp_path: Path) -> None:
    hang = 1
    rows = [[7] * 60 for _ in range(16)]
    rows[9][0] = hang  # the second row of the second rank
    engine = {
        "dp_size": 2,
        "chunked_prefill_size": 16,
        "args": {"hang_token": hang, "tokens_per_s": 60},
        "stall_timeout_s": 1.5,
    }
    work = make_work(tmp_path, rows, engine=engine, run={"max_engine_deaths": 1})
    extractor = Extractor(setup(work.job().model_dump(mode="json"), tmp_path))
    extractor.start()
    try:
        failures, _ = capture(extractor, rows)
        assert extractor.progress()["engine_stalls"] == 1
    finally:
        extractor.stop()
    # What the engine had when it was killed: of eight seconds' work the first rank had done some.
    first, second = (set(failures) & set(ranks) for ranks in (range(8), range(8, 16)))
    assert 3 <= len(first) < 8 and second >= set(range(9, 16))


def test_of_several_ranks_only_those_with_rows_in_flight_are_watched() -> None:
    watch = Watch(10)
    assert watch.look(0, [5, 5, 0], {0, 1}) is None
    assert watch.look(9, [6, 5, 0], {0, 1}) is None
    assert watch.look(11, [7, 5, 0], {0, 1}) == 1
    assert watch.look(12, [7, 5, 0], {0, 1}) is None, "it begins anew with another engine"
    assert watch.look(29, [7, 6, 0], {1}) is None
    assert watch.look(30, [7, 6, 0], {1, 2}) is None
    assert watch.look(38, [7, 7, 0], {1, 2}) is None
    assert watch.look(41, [7, 7, 0], {1, 2}) == 2, "it has been busy since 29"


def test_a_stopped_engine_is_restarted_and_no_row_is_lost(tmp_path: Path) -> None:
    rows = make_rows(6)
    engine = {"args": {"tokens_per_s": 200}, "chunked_prefill_size": 50, "stall_timeout_s": 1.5}
    work = make_work(tmp_path, rows, engine=engine)
    extractor = Extractor(setup(work.job().model_dump(mode="json"), tmp_path))
    found: dict[str, Any] = {}

    def run() -> None:
        found["failures"], found["states"] = capture(extractor, rows)

    extractor.start()
    try:
        (host,) = hosts(work.mark)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        until(lambda: extractor.progress()["tokens_captured"] > 50, "a pass")
        os.kill(host, signal.SIGSTOP)
        thread.join(60)
        assert extractor.progress()["engine_stalls"] == 1
    finally:
        extractor.stop()
    assert found["failures"] == {} and not hosts(work.mark)
    wanted = [simulated_states(np.array(r, np.int32), 0, 4, HIDDEN, "BF16")[0] for r in rows]
    assert found["states"]["state.2"].equal(torch.cat(wanted))


def test_rows_that_the_engine_survives_cost_no_restart(tmp_path: Path) -> None:
    """Rejected ones for longer than an engine may stall, and one with NaN among good ones."""
    reject, nan = 1, 2
    rows = make_rows(40)
    for row in range(0, 40, 2):
        rows[row][0] = reject
    rows[7][5] = nan
    engine = {"args": {"reject_token": reject, "nan_token": nan, "tokens_per_s": 500}, "stall_timeout_s": 1.5}
    work = make_work(tmp_path, rows, engine=engine, output={"max_rows": 64})
    extractor = Extractor(setup(work.job().model_dump(mode="json"), tmp_path))
    extractor.start()
    try:
        failures, _ = capture(extractor, rows)
        progress = extractor.progress()
    finally:
        extractor.stop()
    assert {row: f.status for row, f in failures.items()} == {
        **dict.fromkeys(range(0, 40, 2), RowStatus.REJECTED),
        7: RowStatus.NONFINITE,
    }
    assert (progress["engine_starts"], progress["engine_stalls"]) == (1, 0)
    assert progress["start_s"] > 0


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
