"""The extractor: one arena and one engine, and prompts from ids to sealed images. It knows no units, shards or Ray.

Several images are in it at once, each captured by a thread of its own: one is being filled while others are flushed
or wait for an extent. Allocation of extents is the only queue.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ray_extract.capture.arena import PAGE, TABLES, Arena, ArenaSpec, Extent, new_nonce
from ray_extract.capture.guard import Guard
from ray_extract.capture.writer import FAULT_TEXT, Fault
from ray_extract.config import Job
from ray_extract.engine.base import Answer, EngineInfo
from ray_extract.engine.canary import canary_prompts, judge_final_norm, judge_next_token, judge_states, load_head
from ray_extract.engine.process import EngineProcess
from ray_extract.errors import ArenaError, CaptureRefused, EngineDied, EngineError
from ray_extract.layout import RequestId
from ray_extract.model import stage_model
from ray_extract.records import RowFailure, RowStatus
from ray_extract.shards.base import RowStats
from ray_extract.shards.image import FP8, Column, ImageLayout, RowTable, lay_out, row_table, state_columns, write_table
from ray_extract.shards.seal import check_digests, seal
from ray_extract.shards.values import as_tensor
from ray_extract.staging import is_url

logger = logging.getLogger(__name__)

_ENGINE_STARTS = 3  # tries at restarting an engine that once served, before it is given up
_BACKOFF_S = 5.0
_SAMPLE = 16  # capture.check = sample looks at one row in this many
_CANARY_BYTES = 64 << 20  # at least
_RANKS_DIFFER = "what was captured may be one rank's partial sum, or a buffer that was used again too early"


@dataclasses.dataclass(frozen=True, slots=True)
class ExtractorSetup:
    """What an extractor needs to know; plain data.

    Args:
        job: the job as JSON-ready data, secrets included; never logged or stored.
        boundaries: resolved boundaries.
        dtype: safetensors code of the states as the engine computes them.
        hidden: elements of a state.
        num_layers: N; boundary N is what the final norm reads.
        vocab_size: token ids are 0 .. vocab_size - 1.
        arena_bytes: shared memory for images.
        log_dir: where engines log.
        fingerprint: of the model, to know a copy of one that is at a URL.
    """

    job: dict[str, Any]
    boundaries: tuple[int, ...]
    dtype: str
    hidden: int
    num_layers: int
    vocab_size: int
    arena_bytes: int
    log_dir: str
    fingerprint: str = ""


@dataclasses.dataclass(slots=True)
class Counters:
    """What an extractor has done; read for progress.

    Args:
        tokens_captured: tokens of retired extents.
        engine_starts: the first one included.
        engine_stalls: engines that were killed since they covered nothing more.
        start_s: seconds that engines took to start, or not to, with their canaries.
    """

    tokens_captured: int = 0
    engine_starts: int = 0
    engine_stalls: int = 0
    start_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """A sealed image; its memory is the arena's, until the context that yielded it ends.

    Args:
        layout, table, buffer: the image.
        failures: rows that are not OK, by place in the image.
        seconds: where the time went: wait, extract, seal.
    """

    layout: ImageLayout
    table: RowTable
    buffer: memoryview
    failures: dict[int, RowFailure]
    seconds: dict[str, float]


class Clock:
    """Lap times in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Name the time since the last lap."""
        now = time.monotonic()
        self.laps[name] = round(now - self._last, 3)
        self._last = now


class Flights:
    """Who may have rows in the engine: many threads together, or one alone. Who waits to be alone goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together = 0
        self._waiting = 0
        self._alone = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Rows beside those of other threads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting)
            self._together += 1
        try:
            yield
        finally:
            with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Rows of this thread and nothing else."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._alone and not self._together)
            self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class Watch:
    """Finds the data-parallel rank that hangs. Each has rows of its own, so that what the others do says nothing of it.

    Args:
        timeout_s: for which a rank with rows in flight may capture no token.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: tokens, and since when it was so

    def look(self, now: float, tokens: Sequence[int], busy: Collection[int]) -> int | None:
        """The first rank that hangs, or None.

        Args:
            now: seconds of a monotonic clock.
            tokens: that each rank ever captured.
            busy: ranks with rows in flight.
        """
        for rank, count in enumerate(tokens):
            if rank not in busy or self._seen.get(rank, (-1, now))[0] != count:
                self._seen[rank] = count, now
            elif now - self._seen[rank][1] > self._timeout_s:
                self._seen.clear()
                return rank
        return None


class Extractor:
    """Owns an arena and an engine.

    Args:
        setup: what to do.
    """

    def __init__(self, setup: ExtractorSetup) -> None:
        self._setup = setup
        self._job = Job.model_validate(setup.job)
        capture = self._job.capture
        self._fp8 = capture.dtype != "model"
        code = FP8 if self._fp8 else setup.dtype
        self.columns: tuple[Column, ...] = state_columns(setup.boundaries, capture.final, code, setup.hidden)
        # Its extent is the engine's for good; many layers of a wide model take more than the usual size.
        longest = lay_out(canary_table(setup.vocab_size, 1 << 30, self._job.engine.dp_size), self.columns, {})
        self._canary_bytes = max(_CANARY_BYTES, -(-longest.nbytes // PAGE) * PAGE)
        self._counters = Counters()
        self._stopping = threading.Event()
        self._engine_lock = threading.Lock()
        self._flights = Flights()
        self._arena: Arena | None = None
        self._guard: Guard | None = None
        self._engine: EngineProcess | None = None
        self._serving: EngineProcess | None = None  # the same once it has sung, for the watchdog
        self._info: EngineInfo | None = None
        self._canary: Extent | None = None
        self._copying = False
        self._live: dict[int, Extent] = {}  # slots whose rows are under way
        self._in_flight: dict[Future[Answer], int] = {}  # rows that the engine has, and their ranks, for the watchdog

    def start(self) -> EngineInfo:
        """Copy the model to this node if it is at a URL, make the arena, start the engine, and let the canary pass.

        Raises:
            ConfigError, StoreError: the model cannot be copied.
            ArenaError: /dev/shm is too small.
            CaptureRefused: the engine would not capture correctly.
            EngineError: it did not start.
        """
        if is_url(self._job.model.path):
            self._copying = True
            folder = stage_model(self._job.model, self._setup.fingerprint, self._stopping)
            self._copying = False
            model = self._job.model.model_copy(update={"path": str(folder)})
            self._job = self._job.model_copy(update={"model": model})
        job, setup = self._job, self._setup
        spec = ArenaSpec(
            nonce=new_nonce(),
            nbytes=-(-setup.arena_bytes // PAGE) * PAGE + self._canary_bytes,
            slots=2 * job.run.units_in_flight + 2,
            max_rows=max(job.output.max_rows, 8 * job.engine.dp_size),
            writers=job.engine.dp_size,
            boundaries=setup.boundaries,
            final=job.capture.final,
            dtype=setup.dtype,
            hidden=setup.hidden,
            fp8=self._fp8,
            ranks=job.attention_ranks,
        )
        self._arena = Arena.create(spec)
        try:
            self._guard = Guard(self._arena.folder)
            self._canary = self._arena.allocate(self._canary_bytes)
            with self._engine_lock:
                info = self._ensure_engine()
        except BaseException:
            self.stop()
            raise
        threading.Thread(target=self._watch, name="ray_extract-watchdog", daemon=True).start()
        return info

    def stop(self) -> None:
        """End the engine and give the shared memory back. Images under way fail."""
        self._stopping.set()
        if self._engine is not None:
            self._engine.kill()
        if self._arena is not None:
            self._arena.close()
        if self._guard is not None:
            self._guard.dismiss()

    def progress(self) -> dict[str, float]:
        """Counters, with what is being captured now, the writers' own (arena.COUNTERS) and the arena's bytes in use.

        And `copying`: whether the model is being copied to this node, which engine.start_timeout_s is not about.
        """
        used = self._arena.used_bytes - self._canary_bytes if self._arena is not None else 0
        written = self._arena.counters() if self._arena is not None else {}
        return {
            **dataclasses.asdict(self._counters),
            **written,
            "tokens_captured": self._counters.tokens_captured + self._covered(),
            "arena_used": used,
            "copying": self._copying,
        }

    @contextmanager
    def capture(self, table: RowTable, metadata: dict[str, str], doomed: str | None = None) -> Iterator[Captured]:
        """Run the rows of a table through the engine into an image, seal it, and lend it for the context.

        Args:
            table: the rows.
            metadata: for the image's header.
            doomed: why no row is to be run, so that all fail; else None.

        Raises:
            ArenaError: the image can never fit.
            EngineError: the engine cannot be started any more, or the image's bytes did not match the digests taken on
                the device.
        """
        assert self._arena is not None
        layout = lay_out(table, self.columns, metadata)
        room = self._arena.spec.nbytes - self._canary_bytes
        if layout.nbytes > room:
            # Not for the arena to see: the canary's extent is never given back, so it would wait for ever.
            raise ArenaError(f"an image of {layout.nbytes} bytes in an arena of {room}; raise run.arena_bytes")
        clock = Clock()
        extent = self._arena.allocate(layout.nbytes, self._stopping.is_set)
        try:
            clock.lap("wait")
            write_table(layout, table, extent.buffer)
            failures = self._run_rows(extent, layout, table, doomed)
            clock.lap("extract")
            self._seal(extent, layout, table, failures)
            clock.lap("seal")
            yield Captured(layout, table, extent.buffer, failures, clock.laps)
        finally:
            self._arena.retire(extent, self._engine_alive)
            self._arena.free(extent)

    def _run_rows(
        self, extent: Extent, layout: ImageLayout, table: RowTable, doomed: str | None
    ) -> dict[int, RowFailure]:
        """Send every row until each has an answer; returns the failed ones by their place in the image."""
        assert self._arena is not None
        self._open(extent, layout, table)
        self._live[extent.slot] = extent
        try:
            if doomed is not None:
                rows = table.row.tolist()
                return {i: RowFailure(row, RowStatus.ENGINE_DIED, doomed) for i, row in enumerate(rows)}
            return self._send_rows(extent, layout, table)
        finally:
            # Before anybody reads the image: from here on no writer can touch it.
            self._arena.retire(extent, self._engine_alive)
            self._counters.tokens_captured += self._slot_covered(extent, len(table))
            del self._live[extent.slot]

    def _send_rows(self, extent: Extent, layout: ImageLayout, table: RowTable) -> dict[int, RowFailure]:
        failures: dict[int, RowFailure] = {}
        most = self._job.run.max_engine_deaths
        todo: dict[int, EngineDied | None] = dict.fromkeys(range(len(table)))
        for deaths in range(max(1, most - 1)):
            if todo:
                with self._flights.together():
                    todo = dict(self._send(extent, layout, table, list(todo), deaths, failures))
        for row, death in todo.items():
            last: EngineDied | None = death
            if most > 1:
                # The next death is a row's last. Any of these may be the one that kills engines, so each goes alone:
                # it costs the rows that happened to be in flight a round trip each, and not their states.
                with self._flights.alone():
                    last = self._send(extent, layout, table, [row], most - 1, failures).get(row)
            if last is not None:
                reason = f"the engine died {most} times with this row in flight: {last}"
                failures[row] = RowFailure(int(table.row[row]), RowStatus.ENGINE_DIED, reason)
        return failures

    def _send(
        self,
        extent: Extent,
        layout: ImageLayout,
        table: RowTable,
        rows: Sequence[int],
        deaths: int,
        failures: dict[int, RowFailure],
    ) -> dict[int, EngineDied]:
        """Send rows at once and wait for their answers, which may add to `failures`.

        Returns:
            The rows that were in flight when the engine died, ready to be sent again.
        """
        assert self._arena is not None
        with self._engine_lock:
            info = self._ensure_engine()
            engine = self._engine
        assert engine is not None
        sent: dict[int, Future[Answer]] = {}
        ranks = route(np.diff(table.cu_seqlens)[rows].tolist(), info.dp_size)
        for row, rank in zip(rows, ranks, strict=True):
            ids = table.input_ids[table.cu_seqlens[row] : table.cu_seqlens[row + 1]]
            length = len(ids)
            unfit = unfit_reason(ids, info.max_input_tokens, self._setup.vocab_size)
            if unfit is not None:
                failures[row] = RowFailure(int(table.row[row]), RowStatus.REJECTED, unfit)
                continue
            rid = RequestId(self._arena.spec.nonce, extent.slot, extent.generation, row, deaths)
            offset = extent.offset + layout.tensors["input_ids"].offset + 4 * int(table.cu_seqlens[row])
            sent[row] = engine.submit(str(rid), offset, length, rank)
            self._in_flight[sent[row]] = rank or 0
            sent[row].add_done_callback(self._in_flight.pop)
        lost: dict[int, EngineDied] = {}
        for row, future in sent.items():
            try:
                answer = future.result()
            except EngineDied as error:
                if self._stopping.is_set():
                    raise
                lost[row] = error
                continue
            if not answer.ok:
                failures[row] = RowFailure(int(table.row[row]), RowStatus.REJECTED, answer.reason)
        if lost:
            with self._engine_lock:
                self._reap(engine)
            for row in lost:
                self._arena.reset_row(extent, row)
        return lost

    def _open(self, extent: Extent, layout: ImageLayout, table: RowTable) -> None:
        assert self._arena is not None
        states = [layout.tensors[c.name].offset for c in layout.columns]
        self._arena.open(extent, len(table), states, {name: layout.tensors[name].offset for name in TABLES})

    def _seal(self, extent: Extent, layout: ImageLayout, table: RowTable, failures: dict[int, RowFailure]) -> None:
        """Decide each row's status, write it into the image, and check the bytes against the digests."""
        assert self._arena is not None
        control, slot, rows = self._arena.control, extent.slot, len(table)
        for row in np.flatnonzero(control.fault[slot, :rows]).tolist():
            if row not in failures:
                reason = FAULT_TEXT[Fault(int(control.fault[slot, row]))]
                failures[row] = RowFailure(int(table.row[row]), RowStatus.FAULT, reason)
        for row, reason in self._ranks_differ(extent, rows).items():
            if row not in failures:
                failures[row] = RowFailure(int(table.row[row]), RowStatus.FAULT, reason)
        known = np.zeros(rows, np.uint8)
        for row, failure in failures.items():
            known[row] = failure.status
        stats = RowStats(
            sumsq=control.sumsq[slot, :rows],
            amax=control.amax[slot, :rows],
            nonfinite=control.nonfinite[slot, :rows],
            zero=control.zero[slot, :rows],
        )
        covered = control.covered[slot, :rows]
        lengths = np.diff(table.cu_seqlens)
        final = seal(
            layout,
            extent.buffer,
            covered=covered,
            n_tokens=lengths,
            digests=control.digest[slot, :rows],
            stats=stats,
            statuses=known,
        )
        for row in np.flatnonzero(final).tolist():
            if row not in failures:
                status = RowStatus(int(final[row]))
                reason = {
                    RowStatus.INCOMPLETE: f"{int(covered[row])} of {int(lengths[row])} tokens were captured",
                    RowStatus.MISMATCH: "the token ids that the engine ran are not the planned ones",
                    RowStatus.NONFINITE: f"{int(stats.nonfinite[row].sum())} values are NaN or infinite",
                }[status]
                failures[row] = RowFailure(int(table.row[row]), status, reason)
        step = {"all": 1, "sample": _SAMPLE, "off": 0}[self._job.capture.check]
        wrong = check_digests(layout, extent.buffer, range(0, rows, step)) if step else []
        if wrong:
            raise EngineError(
                f"rows {[int(table.row[r]) for r in wrong[:5]]}: the bytes in shared memory are not those that left "
                "the device (their digests differ)"
            )

    def _ensure_engine(self) -> EngineInfo:
        """The running engine, started or restarted if need be. The caller holds the engine lock."""
        assert self._arena is not None
        if self._engine is not None and self._engine.alive and self._info is not None:
            return self._info
        # The first start is not tried again here: what is wrong then is most often wrong for good.
        tries = _ENGINE_STARTS if self._info is not None else 1
        for attempt in range(tries):
            if self._stopping.wait(_BACKOFF_S * attempt):
                break
            if self._engine is not None:
                self._reap(self._engine)
            try:
                self._info = self._start_engine()
            except CaptureRefused:
                raise
            except EngineError as error:
                if attempt == tries - 1:
                    raise
                logger.warning("the engine did not start, trying again: %s", error)
            else:
                return self._info
        raise EngineDied("the extractor is stopping")

    def _start_engine(self) -> EngineInfo:
        assert self._arena is not None and self._guard is not None
        for record in (*self._arena.folder.glob("plugin.*.json"), *self._arena.folder.glob("failed.*.json")):
            record.unlink()
        engine = self._job.engine
        self._counters.engine_starts += 1
        began = time.monotonic()
        deadline = began + engine.start_timeout()
        self._engine = EngineProcess(
            self._job.model_dump(mode="json"),
            self._arena.folder,
            dict(engine.env),
            Path(self._setup.log_dir),
            self._guard,
        )
        try:
            info = self._engine.wait_ready(engine.start_timeout())
            if engine.kind == "sglang":
                self._sing(self._engine, info, deadline)
        except BaseException:
            self._engine.kill()
            raise
        finally:
            self._counters.start_s += time.monotonic() - began
        self._serving = self._engine
        return info

    def _sing(self, engine: EngineProcess, info: EngineInfo, deadline: float) -> None:
        """Send the canary, once to each data-parallel rank, and wait for it until the deadline (monotonic).

        Raises:
            CaptureRefused: it did not come back as it must.
        """
        assert self._arena is not None and self._canary is not None
        extent = self._canary
        table = canary_table(self._setup.vocab_size, info.max_input_tokens, info.dp_size)
        layout = lay_out(table, self.columns, {})
        write_table(layout, table, extent.buffer)
        self._open(extent, layout, table)
        base = extent.offset + layout.tensors["input_ids"].offset
        futures = []
        for row, length in enumerate(np.diff(table.cu_seqlens).tolist()):
            rid = RequestId(self._arena.spec.nonce, extent.slot, extent.generation, row, 0)
            rank = row * info.dp_size // len(table) if info.dp_size > 1 else None
            futures.append(engine.submit(str(rid), base + 4 * int(table.cu_seqlens[row]), length, rank, 1))
        try:
            answers = [f.result(timeout=max(0.0, deadline - time.monotonic())) for f in futures]
            # Now and not later: marks that come after the answer are as bad as none.
            self._require_covered(extent, table, answers)
        except BaseException as error:
            engine.kill()  # a plugin that never publishes never unpins either
            if isinstance(error, TimeoutError):
                waited = self._job.engine.start_timeout()
                raise EngineError(
                    f"the engine was ready and did not answer the canary, after {waited:.0f} s in all "
                    f"(engine.start_timeout_s)\n{engine.log_tail()}"
                ) from None
            raise
        finally:
            self._arena.retire(extent, lambda: engine.alive)
        for reason in self._ranks_differ(extent, len(table)).values():
            raise CaptureRefused(f"canary: {reason}")
        self._judge_canary(extent, layout, table, answers)

    def _ranks_differ(self, extent: Extent, rows: int) -> dict[int, str]:
        """Rows of a retired extent of which a tensor-parallel rank held other states, or other ids, than rank 0."""
        assert self._arena is not None
        control, slot, found = self._arena.control, extent.slot, {}
        differ = control.rank_digest[slot, :rows] != control.digest[slot, :rows, None]
        for row in np.flatnonzero(differ.any(axis=(1, 2))).tolist():
            rank = int(differ[row].any(axis=1).argmax())
            names = [
                n for n, wrong in zip(("ids", *(c.name for c in self.columns)), differ[row, rank], strict=True) if wrong
            ]
            seen = "" if control.rank_digest[slot, row, rank].any() else " and saw nothing of the row"
            found[row] = (
                f"tensor-parallel rank {rank + 1} differs from rank 0 in {', '.join(names)}{seen}: {_RANKS_DIFFER}"
            )
        return found

    def _require_covered(self, extent: Extent, table: RowTable, answers: Sequence[Answer]) -> None:
        assert self._arena is not None
        lengths = np.diff(table.cu_seqlens)
        for row, answer in enumerate(answers):
            covered = int(self._arena.control.covered[extent.slot, row])
            fault = Fault(int(self._arena.control.fault[extent.slot, row]))
            if not answer.ok or fault is not Fault.NONE or covered != lengths[row]:
                why = answer.reason or FAULT_TEXT.get(fault) or f"{covered} of {lengths[row]} tokens were captured"
                raise CaptureRefused(f"canary: {why}")

    def _judge_canary(self, extent: Extent, layout: ImageLayout, table: RowTable, answers: Sequence[Answer]) -> None:
        rows: list[list[torch.Tensor]] = []
        for row in range(len(table)):
            rows.append([])
            for column in self.columns:
                raw = layout.state_bytes(extent.buffer, column)[int(table.cu_kept[row]) : int(table.cu_kept[row + 1])]
                rows[-1].append(as_tensor(raw.copy(), column.dtype))
        if self._job.model.load_format == "dummy":
            return  # random weights of 1e-3 need not move the residual stream by a bf16 step
        judge_states([c.name for c in self.columns], rows)
        if not self._job.capture.final:
            return
        if self._setup.num_layers in self._setup.boundaries:
            longest = max(rows, key=lambda states: len(states[0]))
            judge_final_norm(longest[-2], longest[-1], self._fp8)
        head = load_head(Path(self._job.model.path))
        if head is None:
            logger.warning("no plain LM head in %s: the final state was not compared with it", self._job.model.path)
            return
        for states, answer in zip(rows, answers, strict=True):
            judge_next_token(head, states[-1][-1], answer.output_ids[0], self._fp8)

    def _reap(self, engine: EngineProcess) -> None:
        """Make sure that nothing of a dead engine can write any more. The caller holds the engine lock.

        Only of the present engine: of an older one this was done before its successor began, whose pins must stay.
        """
        assert self._arena is not None
        if engine is self._engine:
            engine.kill()
            self._arena.clear_writers()
            self._engine = None

    def _engine_alive(self) -> bool:
        return self._engine is not None and self._engine.alive

    def _slot_covered(self, extent: Extent, rows: int) -> int:
        assert self._arena is not None
        return int(self._arena.control.covered[extent.slot, :rows].sum())

    def _covered(self) -> int:
        if self._arena is None:
            return 0
        return sum(self._slot_covered(e, int(self._arena.control.num_rows[e.slot])) for e in list(self._live.values()))

    def _watch(self) -> None:
        """Kill an engine of which a rank with rows in flight captures nothing for too long; its death does the rest."""
        assert self._arena is not None
        timeout = self._job.engine.stall_timeout_s
        watch = Watch(timeout)
        while not self._stopping.wait(min(5.0, timeout / 4)):
            engine = self._serving  # one that starts captures nothing for as long as that takes
            busy = set(self._in_flight.values()) if engine is not None and engine.alive else ()
            rank = watch.look(time.monotonic(), self._arena.tokens_by_writer(), busy)
            if rank is not None and engine is not None:
                logger.error(
                    "no token was captured for %.0f s (engine.stall_timeout_s)%s: restarting the engine",
                    timeout,
                    f" by data-parallel rank {rank}" if self._arena.spec.writers > 1 else "",
                )
                self._counters.engine_stalls += 1
                engine.kill()


def canary_table(vocab_size: int, longest: int, ranks: int) -> RowTable:
    """The canary's prompts, once for each data-parallel rank."""
    prompts = canary_prompts(vocab_size, longest) * ranks
    return row_table(range(len(prompts)), prompts, [np.ones(len(p), np.uint8) for p in prompts])


def unfit_reason(ids: npt.NDArray[np.int32], longest: int, vocab_size: int) -> str | None:
    """Why a row must not reach the engine, or None.

    Rows are checked when they are prepared, but SGLang checks no ids at all: one outside the vocabulary ends the
    scheduler (an IndexError on a CPU, a device-side assertion on a GPU), or with tensor parallelism reads as zeros.

    Args:
        ids: i32, the row's.
        longest: most tokens that the engine runs.
        vocab_size: of the model.
    """
    if len(ids) == 0:
        return "no tokens"
    if len(ids) > longest:
        return f"{len(ids)} tokens; this engine runs at most {longest}"
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        return f"token id out of range: {low if low < 0 else high} with a vocabulary of {vocab_size}"
    return None


def route(lengths: Sequence[int], ranks: int) -> list[int | None]:
    """Assign rows to data-parallel ranks in consecutive blocks of about equal tokens, so that neighbours merge.

    Args:
        lengths: tokens of each row.
        ranks: data-parallel ranks; with one there is nothing to route.
    """
    if ranks == 1:
        return [None] * len(lengths)
    total, before, assigned = sum(lengths), 0, []
    for length in lengths:
        assigned.append(min(ranks - 1, (before + length // 2) * ranks // max(total, 1)))
        before += length
    return list(assigned)
