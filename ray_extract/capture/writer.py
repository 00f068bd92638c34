"""The writing end of capture: from a forward pass to marks in the control file.

    begin(segments)   before the model runs: pin the extents, decide what each token is for
    issue(states)     in the logits processor: start the copies and the digests
    publish(work)     before the response leaves: wait for the copies, add digests, raise `covered`, unpin

One writer serves one scheduler process, which calls it from one thread. Nothing here raises for what a request, a
batch or a stale id may bring: a fault becomes a code in the control file, the row fails, and the engine lives on.

The other tensor-parallel ranks run the same passes through a writer each, which copies nothing and publishes digests
alone. The owner compares them: a state that is one rank's partial sum is another one there. Their marks are in time
too. A pass of the first rank ends after an all-reduce in which every rank took part, so each of them had pinned the
extent by then, and the owner reads nothing before the last pin is gone.
"""

import dataclasses
import enum
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ray_extract.capture.arena import COUNTERS, AttachedArena, full_barrier
from ray_extract.capture.rows import GapError, kept_pieces, merge_runs, take_segment
from ray_extract.layout import RequestId, parse_rid

logger = logging.getLogger(__name__)


class Fault(enum.IntEnum):
    """Why the plugin gave a row up; stored in the control file."""

    NONE = 0
    GAP = 1  # positions were skipped: a prefix-cache hit
    OTHER_IDS = 2  # the engine was about to run other token ids than the image's
    NO_STATES = 3  # the forward pass ended without handing over states
    WRONG_STATES = 4  # another number, size or type of states than agreed
    COPY_FAILED = 5  # the copy or the digest raised
    BAD_ROW = 6  # the request id names a row that the image does not have
    HOOK_FAILED = 7  # a hook of the plugin raised


FAULT_TEXT = {
    Fault.GAP: "the engine reused cached positions, so their states were never computed",
    Fault.OTHER_IDS: "the engine ran other token ids than planned",
    Fault.NO_STATES: "a forward pass ended without handing over its states",
    Fault.WRONG_STATES: "the model handed over another number, size or type of states than agreed",
    Fault.COPY_FAILED: "copying the states out failed",
    Fault.BAD_ROW: "the request named a row that its image does not have",
    Fault.HOOK_FAILED: "a hook of the capture plugin failed; the engine's log says how",
}


@dataclasses.dataclass(slots=True)
class _RowState:
    """What the writer knows of a row of a live extent."""

    num_tokens: int
    spans: npt.NDArray[np.int64]
    target: int  # first stored token of the row in the image
    issued: int = 0
    faulted: bool = False


@dataclasses.dataclass(slots=True)
class _Live:
    """A slot at one generation, as this writer sees it."""

    generation: int
    table: dict[str, npt.NDArray[Any]]
    rows: dict[int, _RowState] = dataclasses.field(default_factory=dict)
    pins: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One row's share of a forward pass.

    Args:
        source: index of its first token taken in the forward pass.
        position: prompt position of that token.
        count: tokens taken.
        pieces: (source, place among stored tokens, count) of what is stored.
    """

    slot: int
    generation: int
    row: int
    source: int
    position: int
    count: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One copy for each state: tokens `source ..` of the pass to byte offset `base[k] + target * token_bytes`."""

    slot: int
    source: int
    target: int
    count: int


@dataclasses.dataclass(slots=True)
class Work:
    """What one forward pass has for us; ends in publish() or abandon()."""

    num_tokens: int
    entries: list[Entry]
    runs: list[Run]
    pinned: list[tuple[int, int]]
    ticket: "Ticket | None" = None
    closed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """Digests and statistics of a forward pass; E entries, K states.

    Args:
        digest: u64 [E, 1+K], column 0 of the token ids.
        sumsq: f64 [E, K].
        amax: f32 [E, K].
        nonfinite, zero: i32 [E, K].
    """

    digest: npt.NDArray[np.uint64]
    sumsq: npt.NDArray[np.float64]
    amax: npt.NDArray[np.float32]
    nonfinite: npt.NDArray[np.int32]
    zero: npt.NDArray[np.int32]


class Ticket(Protocol):
    """Copies under way."""

    def wait(self) -> Sums:
        """Return when every byte is at its address, with the digests of what was copied."""


class Copier(Protocol):
    """How states leave the device; see copier.py."""

    @property
    def dtype(self) -> Any:
        """Type of the states that it takes."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a state of a token as it is stored."""

    def issue(self, work: Work, bases: npt.NDArray[np.uint64], input_ids: Any, states: Sequence[Any]) -> Ticket:
        """Start the copies and digests of `work`.

        Args:
            bases: u64 [slots, K], byte offsets of the states in the arena.
            input_ids: tensor [>= num_tokens], the ids that the model ran.
            states: K tensors [>= num_tokens, hidden].

        Raises:
            Exception: any; then no copy is under way any more.
        """


class Writer:
    """Writes one scheduler's states into the arena, or as one of the other ranks their digests only.

    Args:
        arena: the attached arena.
        index: which writer.
        copier: moves bytes and computes digests.
        rank: which tensor-parallel rank of this writer; 0 writes states.
    """

    def __init__(self, arena: AttachedArena, index: int, copier: Copier, rank: int = 0) -> None:
        self.arena = arena
        self._rank = rank
        self._busy = arena.control.busy[:, index * arena.spec.ranks + rank]
        self._copier = copier
        self._live: dict[int, _Live] = {}
        counters = arena.control.counters[index]
        self._counters = np.zeros_like(counters) if rank else counters
        self._token_bytes = copier.token_bytes

    def check_request(self, rid: str, input_ids: Sequence[int]) -> None:
        """Compare a request's ids with the image's, once, before its first forward pass.

        SGLang runs an over-long prompt as the single token 0 under the prompt's own id; writing that would be silent.
        The first rank's comparison is enough: the others write nothing.
        """
        request = None if self._rank else self._ours(rid)
        if request is None:
            return
        known = self._live.get(request.slot)
        if known is not None and known.generation == request.generation and request.row in known.rows:
            return
        if not self._pin(request):
            return
        try:
            live = self._live[request.slot]
            if (row := self._row(live, request)) is not None:
                start = int(live.table["cu_seqlens"][request.row])
                planned = live.table["input_ids"][start : start + row.num_tokens]
                if not np.array_equal(np.asarray(input_ids), planned):
                    self._fault(request.slot, request.row, Fault.OTHER_IDS)
        finally:
            self._unpin([(request.slot, request.generation)])

    def begin(self, rids: Sequence[str], prefixes: Sequence[int], counts: Sequence[int]) -> Work | None:
        """Pin the extents of a forward pass and decide what each of its tokens is for.

        Args:
            rids: request ids of the segments, ours or not.
            prefixes: position of each segment's first token in its request.
            counts: tokens of each segment.

        Returns:
            The work, or None when nothing of the pass is ours.

        Raises:
            Exception: any; then nothing of the pass is pinned.
        """
        began = time.perf_counter()
        entries: list[Entry] = []
        pinned: list[tuple[int, int]] = []
        try:
            for rid, source, prefix, count in zip(
                rids, itertools.accumulate(counts, initial=0), prefixes, counts, strict=False
            ):
                request = self._ours(rid)
                if request is None or not self._pin(request):
                    continue
                pinned.append((request.slot, request.generation))
                entry = self._entry(request, source, prefix, count)
                if entry is None:
                    self._unpin([pinned.pop()])
                else:
                    entries.append(entry)
            if not entries:
                return None
            work = Work(sum(counts), entries, [] if self._rank else self._runs(entries), pinned)
        except BaseException:
            # The owner waits for every pin before it reads the image.
            self._unpin(pinned)
            raise
        states = self.arena.spec.num_states
        stored = sum(run.count for run in work.runs)
        self._count(passes=1, tokens=sum(e.count for e in entries), copies=states * len(work.runs))
        self._count(copied_bytes=states * stored * self._token_bytes, hook_us=_micros(began))
        return work

    def issue(self, work: Work, input_ids: Any, states: Sequence[Any]) -> None:
        """Start the copies; called with the states of the pass at hand."""
        began = time.perf_counter()
        spec = self.arena.spec
        fault = Fault.NONE
        if len(states) != spec.num_states or any(
            s.dim() != 2 or s.shape[0] < work.num_tokens or s.shape[1] != spec.hidden or s.dtype != self._copier.dtype
            for s in states
        ):
            fault = Fault.WRONG_STATES
        else:
            try:
                work.ticket = self._copier.issue(work, self.arena.control.state_base, input_ids, states)
            except Exception:
                logger.exception("ray_extract: starting the copies of a forward pass failed")
                fault = Fault.COPY_FAILED
        if fault is not Fault.NONE:
            self._give_up(work, fault)
        self._count(hook_us=_micros(began))

    def publish(self, work: Work) -> None:
        """Wait for the copies, make them visible, unpin. Before this the response must not leave."""
        if work.closed:
            return
        if work.ticket is None:
            self._give_up(work, Fault.NO_STATES)
            return
        began = time.perf_counter()
        try:
            sums = work.ticket.wait()
        except Exception:
            logger.exception("ray_extract: the copies of a forward pass failed")
            self._give_up(work, Fault.COPY_FAILED)
            return
        self._count(wait_us=_micros(began))
        began = time.perf_counter()
        try:
            self._mark(work, sums)
        except Exception:
            logger.exception("ray_extract: the marks of a forward pass could not be written")
            self._give_up(work, Fault.HOOK_FAILED)
            return
        self._close(work)
        self._count(hook_us=_micros(began))

    def fail(self, rids: Sequence[str], fault: Fault) -> None:
        """Give rows up, whatever is under way for them."""
        for rid in rids:
            request = self._ours(rid)
            if request is None or not self._pin(request):
                continue
            try:
                if self._row(self._live[request.slot], request) is not None:
                    self._fault(request.slot, request.row, fault)
            finally:
                self._unpin([(request.slot, request.generation)])

    def _mark(self, work: Work, sums: Sums) -> None:
        control = self.arena.control
        if self._rank:
            # The owner may have retired the extent by now: it waits for this rank's pin, then reads.
            slots, rows = [e.slot for e in work.entries], [e.row for e in work.entries]
            control.rank_digest[slots, rows, self._rank - 1] += sums.digest
            return
        # An entry of a retired generation is pinned, so its memory is still ours; but its marks are nobody's business.
        keep = [i for i, e in enumerate(work.entries) if int(control.generation[e.slot]) == e.generation]
        if keep:
            at = (np.array([work.entries[i].slot for i in keep]), np.array([work.entries[i].row for i in keep]))
            # A row has at most one entry in a pass, so the indices are distinct and these are plain additions.
            control.digest[at] += sums.digest[keep]
            control.sumsq[at] += sums.sumsq[keep]
            control.amax[at] = np.maximum(control.amax[at], sums.amax[keep])
            control.nonfinite[at] += sums.nonfinite[keep]
            control.zero[at] += sums.zero[keep]
            full_barrier()
            control.covered[at] = [work.entries[i].position + work.entries[i].count for i in keep]

    def _count(self, **counts: int) -> None:
        for name, count in counts.items():
            self._counters[COUNTERS.index(name)] += np.uint64(count)

    def _give_up(self, work: Work, fault: Fault) -> None:
        for e in work.entries:
            self._fault(e.slot, e.row, fault)
        if work.ticket is not None:
            # Copies may be under way: the extents stay pinned until they are over, however they ended.
            try:
                work.ticket.wait()
            except Exception:
                logger.exception("ray_extract: waiting for abandoned copies failed")
        self._close(work)

    def _close(self, work: Work) -> None:
        work.closed = True
        self._unpin(work.pinned)

    def _entry(self, request: RequestId, source: int, prefix: int, count: int) -> Entry | None:
        live = self._live[request.slot]
        row = self._row(live, request)
        if row is None or row.faulted:
            return None
        try:
            take = take_segment(source, prefix, count, row.num_tokens, row.issued)
        except GapError as error:
            logger.error("ray_extract: row %d of slot %d: %s", request.row, request.slot, error)
            self._fault(request.slot, request.row, Fault.GAP)
            return None
        if take is None:
            return None
        row.issued = take.end
        pieces = tuple((p.source, p.kept, p.count) for p in kept_pieces(take, row.spans))
        return Entry(request.slot, request.generation, request.row, take.source, take.position, take.count, pieces)

    def _runs(self, entries: list[Entry]) -> list[Run]:
        runs = []
        for slot, group in itertools.groupby(entries, key=lambda e: e.slot):
            rows = self._live[slot].rows
            flat = [(s, rows[e.row].target + kept, n) for e in group for s, kept, n in e.pieces]
            if flat:
                sources, targets, counts = (list(x) for x in zip(*flat, strict=True))
                runs += [Run(slot, *run) for run in merge_runs(sources, targets, counts)]
        return runs

    def _row(self, live: _Live, request: RequestId) -> _RowState | None:
        row = live.rows.get(request.row)
        if row is None:
            table = live.table
            if request.row >= len(table["cu_seqlens"]) - 1:
                if request.row < self.arena.spec.max_rows:
                    self.arena.control.fault[request.slot, request.row] = Fault.BAD_ROW
                return None
            low, high = table["cu_seqlens"][request.row : request.row + 2].tolist()
            first, last = table["cu_spans"][request.row : request.row + 2].tolist()
            target = int(table["cu_kept"][request.row])
            row = live.rows[request.row] = _RowState(high - low, table["spans"][first:last], target)
        return row

    def _fault(self, slot: int, row: int, fault: Fault) -> None:
        self.arena.control.fault[slot, row] = fault
        state = self._live[slot].rows.get(row)
        if state is not None:
            state.faulted = True

    def _ours(self, rid: str) -> RequestId | None:
        request = parse_rid(rid)
        return request if request is not None and request.nonce == self.arena.spec.nonce else None

    def _pin(self, request: RequestId) -> bool:
        control, slot, generation = self.arena.control, request.slot, request.generation
        # An even generation is a free slot's; no request that we sent names one.
        if generation % 2 == 0 or slot >= self.arena.spec.slots or int(control.generation[slot]) != generation:
            return False
        live = self._live.get(slot)
        if live is not None and live.generation == generation and live.pins:
            live.pins += 1
            return True
        if live is not None and live.generation != generation and live.pins:
            # Work of an older generation still pins the slot: the owner cannot have made it live again.
            return False
        self._busy[slot] = generation
        full_barrier()
        if int(control.generation[slot]) != generation:
            self._busy[slot] = 0
            return False
        if live is None or live.generation != generation:
            live = self._live[slot] = _Live(generation, self.arena.table(slot))
        live.pins = 1
        return True

    def _unpin(self, pins: Sequence[tuple[int, int]]) -> None:
        for slot, _ in pins:
            live = self._live[slot]
            live.pins -= 1
            if live.pins == 0:
                full_barrier()
                self._busy[slot] = 0


def _micros(since: float) -> int:
    return int((time.perf_counter() - since) * 1e6)
