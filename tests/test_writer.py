"""The writer: whatever the scheduler does, the image holds each token once, the marks say what is there, and late
copies never reach another image."""

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from arenas import HIDDEN, MAX_ROWS, SLOTS, STATES, Live, make_arena, open_image
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_extract.capture.arena import Arena, AttachedArena, new_nonce
from ray_extract.capture.copier import TORCH_DTYPES, CpuCopier
from ray_extract.capture.digest import digest_ids, digest_tokens
from ray_extract.capture.fp8 import encode
from ray_extract.capture.writer import Fault, Sums, Ticket, Work, Writer
from ray_extract.layout import RequestId

MASK64 = (1 << 64) - 1


class LateCopier:
    """Copies when the ticket is waited for, as late as a copy can come."""

    def __init__(self, copier: CpuCopier) -> None:
        self._copier = copier
        self.dtype, self.token_bytes = copier.dtype, copier.token_bytes
        self.raises_on: str | None = None

    def issue(self, work: Work, bases: Any, input_ids: Any, states: Sequence[Any]) -> Ticket:
        if self.raises_on == "issue":
            raise RuntimeError("out of staging")
        return _LateTicket(self, work, (bases, input_ids, list(states)), self.raises_on == "wait")


@dataclasses.dataclass
class _LateTicket:
    copier: LateCopier
    work: Work
    arguments: tuple[Any, Any, Any]
    raises: bool

    def wait(self) -> Sums:
        if self.raises:
            raise RuntimeError("the device is gone")
        return self.copier._copier.issue(self.work, *self.arguments).wait()


# The model: one token at a time, with dictionaries.


@dataclasses.dataclass
class Marks:
    """What the control file must say of a row, and what the writer must remember."""

    digest: list[int] = dataclasses.field(default_factory=lambda: [0] * (1 + STATES))
    sumsq: list[float] = dataclasses.field(default_factory=lambda: [0.0] * STATES)
    amax: list[float] = dataclasses.field(default_factory=lambda: [0.0] * STATES)
    nonfinite: list[int] = dataclasses.field(default_factory=lambda: [0] * STATES)
    zero: list[int] = dataclasses.field(default_factory=lambda: [0] * STATES)
    covered: int = 0
    fault: Fault = Fault.NONE
    issued: int = 0
    given_up: bool = False
    known: bool = False

    def add(
        self, place: int | None, position: int, token_id: int, states: list[torch.Tensor], stored: list[Any]
    ) -> None:
        self.digest[0] = (self.digest[0] + digest_ids(np.array([token_id], np.int32), position)) & MASK64
        self.covered = position + 1
        if place is None:
            return
        for k, state in enumerate(states):
            self.digest[1 + k] = (self.digest[1 + k] + digest_tokens(stored[k], place)) & MASK64
            values = [float(v) for v in state.float()]
            finite = [v for v in values if np.isfinite(v)]
            self.sumsq[k] += sum(v * v for v in finite)
            self.amax[k] = max([self.amax[k], *(abs(v) for v in finite)])
            self.nonfinite[k] += len(values) - len(finite)
            self.zero[k] += all(v == 0 for v in values)


@dataclasses.dataclass
class Token:
    """A token that a pass must store: `flat` is its place in the pass, `place` among the row's stored tokens."""

    row: int
    slot: int
    position: int
    flat: int
    place: int | None


@dataclasses.dataclass
class Pass:
    """A forward pass between its begin and its publish."""

    work: Work
    tokens: list[Token]
    ids: torch.Tensor
    states: list[torch.Tensor]
    bad: Fault


class Model:
    """Runs a schedule through a writer and the model side by side."""

    def __init__(self, arena: Arena, late: bool, seed: int) -> None:
        self.arena, self.late, self.random = arena, late, random.Random(seed)
        attached = AttachedArena(arena.folder)
        self.copier = LateCopier(CpuCopier(attached))
        self.writer = Writer(attached, 0, self.copier if late else CpuCopier(attached))
        self.open: list[Live] = []
        self.marks: dict[tuple[int, int], Marks] = {}
        self.expected = np.array(np.frombuffer(attached.data, np.uint8))
        self.passes: list[Pass] = []
        self.seed = 0

    def add_image(self) -> None:
        lengths = [self.random.randint(1, 12) for _ in range(self.random.randint(1, 4))]
        self.seed += 1
        live = open_image(self.arena, lengths, self.random.choice(["all", "supervised", "last", "random:3"]), self.seed)
        part = slice(live.extent.offset, live.extent.offset + live.extent.nbytes)
        self.expected[part] = np.frombuffer(live.extent.buffer, np.uint8)
        self.marks |= {(live.extent.slot, row): Marks() for row in range(len(lengths))}
        self.open.append(live)

    def replace_image(self) -> None:
        """The owner is done with an image; its requests may still run."""
        while self.passes:
            self.publish()
        old = self.open.pop(self.random.randint(0, len(self.open) - 1))
        self.arena.retire(old.extent, lambda: True)
        self.arena.free(old.extent)
        self.add_image()
        assert self.writer.begin([old.rid(self.arena.spec.nonce, 0)], [0], [1]) is None

    def check(self) -> None:
        live = self.random.choice(self.open)
        row = self.random.randint(0, len(live.table) - 1)
        ids = live.ids(row).tolist()
        right = self.random.random() < 0.75
        self.writer.check_request(live.rid(self.arena.spec.nonce, row), ids if right else [0])
        marks = self.marks[live.extent.slot, row]
        if not marks.known and not right and ids != [0]:
            marks.fault, marks.given_up = Fault.OTHER_IDS, True
        marks.known = True

    def segment(
        self, rids: list[str], prefixes: list[int], counts: list[int], busy: set[tuple[int, int]]
    ) -> list[Token]:
        """Draw one segment; returns the tokens that must be taken of it."""
        nonce, source = self.arena.spec.nonce, sum(counts)
        live = self.random.choice(self.open)
        slot, generation = live.extent.slot, live.extent.generation
        row = self.random.randint(0, len(live.table) - 1)
        kind = self.random.choice(["row"] * 8 + ["stale", "free", "stranger", "other arena", "no row"])
        if kind != "row" or (slot, row) in busy:
            number = self.random.randint(len(live.table), MAX_ROWS + 2)
            rids.append(
                {
                    "stale": str(RequestId(nonce, slot, generation + self.random.choice([-2, 2]), row, 0))
                    if generation > 1
                    else "health",
                    "free": str(RequestId(nonce, (slot + 1) % (SLOTS + 2), 0, row, 0)),
                    "stranger": self.random.choice(["", "health", "rx1.", live.rid(nonce, row)[:-1]]),
                    "other arena": live.rid(new_nonce(), row),
                    "no row": live.rid(nonce, number),
                    "row": "beside",
                }[kind]
            )
            if kind == "no row" and number < MAX_ROWS:
                self.marks.setdefault((slot, number), Marks()).fault = Fault.BAD_ROW
            prefixes.append(self.random.randint(0, 5))
            counts.append(self.random.randint(1, 4))
            return []
        busy.add((slot, row))
        marks, total = self.marks[slot, row], len(live.ids(row))
        marks.known = True
        prefix = self.random.choice([marks.issued] * 4 + [0, max(0, marks.issued - 2), total, marks.issued + 1])
        count = self.random.randint(1, 8)
        rids.append(live.rid(nonce, row))
        prefixes.append(prefix)
        counts.append(count)
        if marks.given_up:
            return []
        if marks.issued < min(prefix, total):
            marks.fault, marks.given_up = Fault.GAP, True
            return []
        kept = [p for a, b in live.table.spans[slice(*live.table.cu_spans[row : row + 2])] for p in range(a, b)]
        tokens = [
            Token(row, slot, p, source + p - prefix, kept.index(p) if p in kept else None)
            for p in range(marks.issued, min(prefix + count, total))
        ]
        marks.issued += len(tokens)
        return tokens

    def forward(self) -> None:
        rids: list[str] = []
        prefixes: list[int] = []
        counts: list[int] = []
        busy: set[tuple[int, int]] = set()
        tokens = [t for _ in range(self.random.randint(1, 5)) for t in self.segment(rids, prefixes, counts, busy)]
        work = self.writer.begin(rids, prefixes, counts)
        assert (work is None) == (not tokens)
        if work is None:
            return
        faulty = ["number", "width", "tokens", "type", "nothing", *(["issue", "wait"] if self.late else [])]
        how = self.random.choice(["right"] * 8 + faulty)
        ids, states = self.made_up(sum(counts) + self.random.randint(0, 3))
        given = {
            "number": states[1:],
            "width": [s[:, 1:] for s in states],
            "tokens": [s[: sum(counts) - 1] for s in states],
            "type": [*states[:-1], states[-1].double()],
        }.get(how, states)
        self.copier.raises_on = how
        if how != "nothing":
            self.writer.issue(work, ids, given)
        bad = {
            "right": Fault.NONE,
            "nothing": Fault.NO_STATES,
            "issue": Fault.COPY_FAILED,
            "wait": Fault.COPY_FAILED,
        }.get(how, Fault.WRONG_STATES)
        one = Pass(work, tokens, ids, states, bad)
        if bad not in (Fault.NONE, Fault.NO_STATES) and how != "wait":
            self.fail(one)
            bad = Fault.NONE
            one = dataclasses.replace(one, tokens=[])
        self.passes.append(one)

    def made_up(self, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        self.seed += 1
        made = torch.Generator().manual_seed(self.seed)
        states = torch.randn((STATES, tokens, HIDDEN), generator=made)
        odd = torch.rand((STATES, tokens), generator=made)
        states[odd < 0.1] = 0
        states[odd > 0.95, 1] = float("nan")
        states[(odd > 0.9) & (odd < 0.95), 2] = float("-inf")
        # One packed tensor, as DeepSeek hands it over: the rows of a state are not contiguous.
        packed = states.to(self.copier.dtype).permute(1, 0, 2).reshape(tokens, STATES * HIDDEN)
        return torch.randint(0, 1 << 17, (tokens,), generator=made), list(torch.split(packed, HIDDEN, dim=1))

    def fail(self, one: Pass) -> None:
        for token in one.tokens:
            marks = self.marks[token.slot, token.row]
            marks.fault, marks.given_up = one.bad, True

    def publish(self) -> None:
        one = self.passes.pop(0)
        self.writer.publish(one.work)
        self.writer.publish(one.work)  # a second time does nothing
        if one.bad is not Fault.NONE:
            self.fail(one)
            return
        columns = {live.extent.slot: live for live in self.open}
        for token in one.tokens:
            states = [s[token.flat].contiguous() for s in one.states]
            stored = [self.stored(state) for state in states]
            self.marks[token.slot, token.row].add(token.place, token.position, int(one.ids[token.flat]), states, stored)
            if token.place is None:
                continue
            live = columns[token.slot]
            for column, raw in zip(live.layout.columns, stored, strict=True):
                at = live.extent.offset + live.layout.tensors[column.name].offset
                at += (int(live.table.cu_kept[token.row]) + token.place) * column.token_bytes
                self.expected[at : at + column.token_bytes] = raw[0]

    def stored(self, state: torch.Tensor) -> npt.NDArray[np.uint8]:
        """A token of a state as it is stored; u8 [1, bytes per token]."""
        return (encode(state[None]) if self.arena.spec.fp8 else state[None].view(torch.uint8)).numpy()

    def assert_equal(self) -> None:
        control = self.arena.control
        for (slot, row), marks in self.marks.items():
            assert control.digest[slot, row].tolist() == marks.digest
            assert control.covered[slot, row] == marks.covered
            assert control.fault[slot, row] == marks.fault
            assert control.nonfinite[slot, row].tolist() == marks.nonfinite
            assert control.zero[slot, row].tolist() == marks.zero
            np.testing.assert_allclose(control.amax[slot, row], marks.amax)
            np.testing.assert_allclose(control.sumsq[slot, row], marks.sumsq)
        pinned = {slot for one in self.passes for slot, _ in one.work.pinned if not one.work.closed}
        assert {int(slot) for slot in np.flatnonzero(control.busy[:, 0])} == pinned


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    steps=st.lists(st.sampled_from(["forward", "forward", "forward", "check", "replace"]), max_size=20),
    dtype=st.sampled_from(["F32", "BF16"]),
    fp8=st.booleans(),
    late=st.booleans(),
    behind=st.integers(0, 2),
)
def test_any_schedule_leaves_the_image_and_the_marks_of_a_naive_model(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    steps: list[str],
    dtype: str,
    fp8: bool,
    late: bool,
    behind: int,
) -> None:
    """Chunks, retraction with other bytes, stale and foreign ids, gaps, wrong states, failing copies; passes are
    published up to two passes behind, as under overlap scheduling."""
    logging.disable(logging.CRITICAL)
    arena = make_arena(tmp_path_factory.mktemp("arena"), dtype, fp8=fp8)
    try:
        model = Model(arena, late, seed)
        model.add_image()
        model.add_image()
        for step in steps:
            {"forward": model.forward, "check": model.check, "replace": model.replace_image}[step]()
            while len(model.passes) > behind:
                model.publish()
            model.assert_equal()
        while model.passes:
            model.publish()
        model.assert_equal()
        assert np.array_equal(np.frombuffer(model.writer.arena.data, np.uint8), model.expected)
        assert not arena.control.busy.any()
    finally:
        arena.close()
        logging.disable(logging.NOTSET)


@settings(max_examples=100, deadline=None)
@given(rid=st.text(max_size=40) | st.from_regex(r"rx1\.[0-9a-z]{1,12}\.\d{4}\.\d{6}\.\d{8}\.\d{2}\.", fullmatch=True))
def test_no_request_id_raises_or_is_taken_for_ours(tmp_path_factory: pytest.TempPathFactory, rid: str) -> None:
    arena = make_arena(tmp_path_factory.mktemp("arena"))
    try:
        attached = AttachedArena(arena.folder)
        writer = Writer(attached, 0, CpuCopier(attached))
        before = bytes(attached.data)
        writer.check_request(rid, [1])
        assert writer.begin([rid], [0], [3]) is None
        assert bytes(attached.data) == before and not arena.control.busy.any() and not arena.control.fault.any()
    finally:
        arena.close()


@pytest.mark.parametrize("generation", [0, 2])
def test_a_free_slot_is_never_pinned(tmp_path: Path, generation: int) -> None:
    """Its row table may lie in memory that another image has by now."""
    arena = make_arena(tmp_path)
    attached = AttachedArena(arena.folder)
    writer = Writer(attached, 0, CpuCopier(attached))
    live = open_image(arena, [5])
    arena.retire(live.extent, lambda: True)
    slot = live.extent.slot if generation else live.extent.slot + 1
    assert int(arena.control.generation[slot]) == generation
    assert writer.begin([str(RequestId(arena.spec.nonce, slot, generation, 0, 0))], [0], [5]) is None
    assert not arena.control.fault.any()
    arena.close()


def test_an_overlong_prompt_that_sglang_runs_as_one_zero_is_not_written(tmp_path: Path) -> None:
    arena = make_arena(tmp_path)
    attached = AttachedArena(arena.folder)
    writer = Writer(attached, 0, CpuCopier(attached))
    live = open_image(arena, [5, 3])
    rids = [live.rid(arena.spec.nonce, row) for row in range(2)]
    writer.check_request(rids[0], [0])
    writer.check_request(rids[1], live.ids(1).tolist())
    work = writer.begin(rids, [0, 0], [1, 3])
    assert work is not None and [e.row for e in work.entries] == [1]
    writer.publish(work)
    assert arena.control.fault[live.extent.slot, :2].tolist() == [Fault.OTHER_IDS, Fault.NO_STATES]
    arena.close()


def test_neighbouring_rows_leave_in_one_copy_for_each_state(tmp_path: Path) -> None:
    arena = make_arena(tmp_path)
    attached = AttachedArena(arena.folder)
    writer = Writer(attached, 0, CpuCopier(attached))
    live = open_image(arena, [5, 3, 4])
    work = writer.begin([live.rid(arena.spec.nonce, row) for row in range(3)], [0, 0, 0], [5, 3, 4])
    assert work is not None and [(r.source, r.target, r.count) for r in work.runs] == [(0, 0, 12)]
    writer.publish(work)
    arena.close()


# The fence: two data-parallel writers on one arena, and a copy that comes late.


class SlowCopier:
    """A copy engine: copies in a thread when the gate opens, whatever the writer does meanwhile."""

    def __init__(self, copier: CpuCopier, gate: threading.Event) -> None:
        self._copier, self._gate = copier, gate
        self.dtype, self.token_bytes = copier.dtype, copier.token_bytes

    def issue(self, work: Work, bases: Any, input_ids: Any, states: Sequence[Any]) -> Ticket:
        addresses = bases.copy()
        done: list[Sums] = []

        def copy() -> None:
            self._gate.wait(20)
            done.append(self._copier.issue(work, addresses, input_ids, states).wait())

        thread = threading.Thread(target=copy)
        thread.start()
        return _SlowTicket(thread, done)


@dataclasses.dataclass
class _SlowTicket:
    thread: threading.Thread
    done: list[Sums]

    def wait(self) -> Sums:
        self.thread.join(20)
        return self.done[0]


def run_rows(writer: Writer, live: Live, value: float) -> Work:
    """Begin and issue a pass over all rows of an image, with states that are all `value`."""
    rows, total = len(live.table), len(live.table.input_ids)
    lengths = np.diff(live.table.cu_seqlens).tolist()
    work = writer.begin([live.rid(writer.arena.spec.nonce, r) for r in range(rows)], [0] * rows, lengths)
    assert work is not None
    ids = torch.from_numpy(live.table.input_ids)
    writer.issue(work, ids, [torch.full((total, HIDDEN), value, dtype=torch.float32)] * STATES)
    return work


def all_states(live: Live) -> npt.NDArray[np.float32]:
    return np.concatenate(
        [live.layout.state_bytes(live.extent.buffer, c).view(np.float32) for c in live.layout.columns]
    )


def test_another_rank_publishes_digests_alone_and_in_time(tmp_path: Path) -> None:
    """Its pass is published after the owner retired the extent, which waits for it; then its marks are there."""
    arena = make_arena(tmp_path, writers=2, ranks=3)
    ends = [AttachedArena(arena.folder) for _ in range(3)]
    ranks = [Writer(end, 1, CpuCopier(end), rank) for rank, end in enumerate(ends)]
    live = open_image(arena, [6, 3])
    works = [run_rows(writer, live, 1.0) for writer in ranks]
    assert [bool(work.runs) for work in works] == [True, False, False]
    for writer, work in zip(ranks[:2], works[:2], strict=True):
        writer.publish(work)
    retired = threading.Thread(target=arena.retire, args=(live.extent, lambda: True))
    retired.start()
    retired.join(0.1)
    assert retired.is_alive()
    ranks[2].publish(works[2])
    retired.join(20)
    assert not retired.is_alive()
    control, slot = arena.control, live.extent.slot
    digest = control.digest[slot, :2]
    assert digest.all() and (control.rank_digest[slot, :2] == digest[:, None]).all()
    assert not control.covered[slot, 2:].any() and control.covered[slot, :2].tolist() == [6, 3]
    assert control.counters[1, 0] == 1 and not control.counters[0].any()
    arena.close()


@pytest.mark.parametrize("fenced", [True, False], ids=["with the fence", "busy words ignored"])
def test_a_late_copy_of_one_rank_never_reaches_the_rows_of_another(tmp_path: Path, fenced: bool) -> None:
    """The second case shows that the first one could fail: without the fence, wrong rows under complete marks."""
    arena = make_arena(tmp_path, writers=2)
    gate, reused = threading.Event(), threading.Event()
    ends = [AttachedArena(arena.folder) for _ in range(2)]
    slow = Writer(ends[0], 0, SlowCopier(CpuCopier(ends[0]), gate))
    fast = Writer(ends[1], 1, CpuCopier(ends[1]))
    old = open_image(arena, [6, 3])
    late = run_rows(slow, old, 1.0)
    lives: list[Live] = []

    def owner() -> None:
        if fenced:
            arena.retire(old.extent, lambda: True)
        else:
            arena.control.generation[old.extent.slot] += np.uint64(1)
        arena.free(old.extent)
        lives.append(open_image(arena, [4, 5], seed=1))
        fast.publish(run_rows(fast, lives[0], 2.0))
        reused.set()

    thread = threading.Thread(target=owner)
    thread.start()
    assert reused.wait(0.2 if fenced else 20) is not fenced
    gate.set()
    slow.publish(late)
    thread.join(20)
    assert reused.is_set()

    (new,) = lives
    assert (new.extent.slot, new.extent.offset) == (old.extent.slot, old.extent.offset)
    control, slot = arena.control, new.extent.slot
    # The marks cannot tell: the old pass was published into neither case's marks.
    assert control.covered[slot, :2].tolist() == [4, 5] and not control.fault[slot].any()
    assert not control.busy.any()
    assert bool((all_states(new) == 2.0).all()) is fenced
    assert slow.begin([old.rid(arena.spec.nonce, 0)], [0], [6]) is None
    arena.close()


def test_a_writer_that_still_copies_pins_its_extent_until_every_pass_is_published(tmp_path: Path) -> None:
    arena = make_arena(tmp_path)
    gate = threading.Event()
    end = AttachedArena(arena.folder)
    writer = Writer(end, 0, SlowCopier(CpuCopier(end), gate))
    live = open_image(arena, [4, 4])
    works = []
    for row in range(2):
        work = writer.begin([live.rid(arena.spec.nonce, row)], [0], [4])
        assert work is not None
        writer.issue(work, torch.zeros(4, dtype=torch.int64), [torch.ones(4, HIDDEN)] * STATES)
        works.append(work)
    owner = threading.Thread(target=arena.retire, args=(live.extent, lambda: True))
    owner.start()
    while int(arena.control.generation[live.extent.slot]) == live.extent.generation:
        time.sleep(0.001)
    gate.set()
    writer.publish(works[0])
    owner.join(0.1)
    assert owner.is_alive()
    writer.publish(works[1])
    owner.join(20)
    assert not owner.is_alive()
    assert not arena.control.covered.any()  # nobody asks any more
    arena.close()


def raising(*args: Any) -> Any:
    raise RuntimeError("injected")


@pytest.mark.parametrize("method", ["_entry", "_runs"])
def test_a_pass_that_cannot_be_opened_pins_nothing_and_its_rows_can_be_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Its owner would wait for such a pin until the engine is killed for it."""
    arena = make_arena(tmp_path)
    attached = AttachedArena(arena.folder)
    writer = Writer(attached, 0, CpuCopier(attached))
    live, other = open_image(arena, [5, 3, 4]), open_image(arena, [6], seed=1)
    lives = [live, live, other, live]
    rids = [x.rid(arena.spec.nonce, row) for x, row in zip(lives, (0, 1, 0, 2), strict=True)]
    good = getattr(writer, method)
    calls: list[int] = []

    def third(*args: Any) -> Any:
        calls.append(1)
        return raising() if len(calls) == 3 or method == "_runs" else good(*args)

    monkeypatch.setattr(writer, method, third)
    with pytest.raises(RuntimeError, match="injected"):
        writer.begin(rids, [0] * 4, [5, 3, 6, 4])
    assert not arena.control.busy.any()
    writer.fail(rids, Fault.HOOK_FAILED)
    assert not arena.control.busy.any()
    monkeypatch.undo()
    # Whatever comes later of these rows is not taken.
    assert writer.begin(rids, [0] * 4, [5, 3, 6, 4]) is None
    for x in (live, other):
        assert (arena.control.fault[x.extent.slot, : len(x.table)] == Fault.HOOK_FAILED).all()
        arena.retire(x.extent, lambda: True)
    arena.close()


def test_failing_rows_of_others_or_of_a_retired_image_does_nothing(tmp_path: Path) -> None:
    arena = make_arena(tmp_path)
    attached = AttachedArena(arena.folder)
    writer = Writer(attached, 0, CpuCopier(attached))
    live = open_image(arena, [5])
    arena.retire(live.extent, lambda: True)
    writer.fail([live.rid(arena.spec.nonce, 0), "health", live.rid(new_nonce(), 0)], Fault.HOOK_FAILED)
    assert not arena.control.fault.any() and not arena.control.busy.any()
    arena.close()


def test_marks_that_cannot_be_written_fail_their_rows_and_unpin_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = make_arena(tmp_path)
    attached = AttachedArena(arena.folder)
    writer = Writer(attached, 0, CpuCopier(attached))
    live = open_image(arena, [5, 3])
    monkeypatch.setattr(writer, "_mark", raising)
    work = run_rows(writer, live, 1.0)
    writer.publish(work)
    assert work.closed and not arena.control.busy.any()
    assert arena.control.fault[live.extent.slot, :2].tolist() == [Fault.HOOK_FAILED] * 2
    arena.close()


def test_dtypes_of_arena_and_torch_agree() -> None:
    assert {code: dtype.itemsize for code, dtype in TORCH_DTYPES.items()} == {"F32": 4, "BF16": 2, "F16": 2}
