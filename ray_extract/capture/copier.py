"""How states leave the device: a plain copy on the CPU, a side stream on CUDA."""

import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ray_extract.capture.arena import TAIL_BYTES, AttachedArena
from ray_extract.capture.digest import digest_ids, digest_tokens
from ray_extract.capture.fp8 import encode
from ray_extract.capture.writer import Run, Sums, Ticket, Work

logger = logging.getLogger(__name__)

# For tests on a GPU: a synchronisation while copies are issued becomes an error.
_FORBID_SYNC = os.environ.get("RAY_EXTRACT_FORBID_SYNC") == "1"
# For tests on a GPU: clock cycles by which the copies of every pass are late, so that what may be overwritten, is.
_DELAY_CYCLES = int(os.environ.get("RAY_EXTRACT_DELAY_COPIES", "0"))

if TYPE_CHECKING:
    from ray_extract.capture.digest_cuda import SumsBuffer

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Target:
    """The arena as where states go.

    Args:
        arena: the attached arena.

    Attributes:
        data: u8 tensor of the whole data file.
        dtype: type of the states as they come.
        token_bytes: bytes of a state of a token as it is stored.
    """

    def __init__(self, arena: AttachedArena) -> None:
        spec = arena.spec
        self.data = torch.frombuffer(arena.data, dtype=torch.uint8)
        self.dtype = TORCH_DTYPES[spec.dtype]
        self.fp8 = spec.fp8
        self.token_bytes = spec.hidden + TAIL_BYTES if spec.fp8 else spec.hidden * self.dtype.itemsize

    def place(self, run: Run, base: int) -> torch.Tensor:
        """Where a run's tokens of a state go: [count, H] in the states' type, or u8 records.

        Args:
            base: byte offset of the state in the arena.
        """
        at = base + run.target * self.token_bytes
        stored = self.data[at : at + run.count * self.token_bytes]
        return (stored if self.fp8 else stored.view(self.dtype)).view(run.count, -1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Done:
    sums: Sums

    def wait(self) -> Sums:
        return self.sums


class CpuCopier:
    """Copies and digests at once, with NumPy: the reference for the CUDA path."""

    def __init__(self, arena: AttachedArena) -> None:
        self._target = Target(arena)
        self.dtype, self.token_bytes = self._target.dtype, self._target.token_bytes

    def issue(
        self, work: Work, bases: npt.NDArray[np.uint64], input_ids: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> Ticket:
        """See writer.Copier."""
        stored = [encode(state[: work.num_tokens]) for state in states] if self._target.fp8 else states
        for run in work.runs:
            for k, state in enumerate(stored):
                self._target.place(run, int(bases[run.slot, k])).copy_(state[run.source : run.source + run.count])
        ids = input_ids[: work.num_tokens].numpy().astype(np.int32)
        return _Done(self._sums(work, ids, states, stored))

    def _sums(
        self,
        work: Work,
        ids: npt.NDArray[np.int32],
        states: Sequence[torch.Tensor],
        stored: Sequence[torch.Tensor],
    ) -> Sums:
        """Statistics of the states as they came, digests of what is stored of them."""
        entries, k = len(work.entries), len(states)
        sums = Sums(
            digest=np.zeros((entries, 1 + k), np.uint64),
            sumsq=np.zeros((entries, k), np.float64),
            amax=np.zeros((entries, k), np.float32),
            nonfinite=np.zeros((entries, k), np.int32),
            zero=np.zeros((entries, k), np.int32),
        )
        with np.errstate(over="ignore"):
            for i, entry in enumerate(work.entries):
                sums.digest[i, 0] = digest_ids(ids[entry.source : entry.source + entry.count], entry.position)
                for source, kept, count in entry.pieces:
                    for j, state in enumerate(states):
                        raw = stored[j][source : source + count].contiguous().view(torch.uint8).numpy()
                        sums.digest[i, 1 + j] += np.uint64(digest_tokens(raw, kept))
                        values = state[source : source + count].float()
                        finite = torch.isfinite(values)
                        values = torch.where(finite, values, 0.0)
                        sums.amax[i, j] = max(float(sums.amax[i, j]), float(values.abs().max()))
                        sums.sumsq[i, j] += float(values.double().square().sum())
                        sums.nonfinite[i, j] += int((~finite).sum())
                        sums.zero[i, j] += int((finite & (values == 0)).all(dim=1).sum())
        return sums


class CudaCopier:
    """Copies on a side stream into registered host memory, digests by one fused kernel a state.

    The side stream waits for the forward stream where issue() is called, so the forward pass goes on meanwhile. The
    buffer holds the sources until the copies are over. All staging is allocated here, before the KV cache is sized.

    Args:
        arena: the attached arena.
        device: the writer's GPU.
        max_tokens: most tokens in one forward pass.
        copies: whether there will be copies, or digests only; then the arena is not registered with CUDA.
        depth: forward passes whose copies may be under way at once; overlap scheduling needs two.
    """

    def __init__(
        self, arena: AttachedArena, device: torch.device, max_tokens: int, copies: bool = True, depth: int = 3
    ) -> None:
        from ray_extract.capture.digest_cuda import SumsBuffer, device_weights

        self._target = Target(arena)
        self.dtype, self.token_bytes = self._target.dtype, self._target.token_bytes
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # An upload from pageable memory synchronises, so not in a forward pass.
        weights = device_weights(self.token_bytes, device)
        self._new_buffer = functools.partial(
            SumsBuffer, device, max_tokens, arena.spec.num_states, weights, arena.spec.fp8
        )
        self._buffers = [self._new_buffer() for _ in range(depth)]
        self._registered = threading.Event()
        self._register_error: BaseException | None = None
        self._register_s = 0.0
        self._copies = copies
        if copies:
            threading.Thread(target=self._register, name="ray_extract-register", daemon=True).start()

    def _register(self) -> None:
        # 2.6 GB/s, so minutes for a large arena: beside the loading of weights, not after it.
        try:
            torch.cuda.set_device(self._device)
            start = time.monotonic()
            pointer, nbytes = self._target.data.data_ptr(), self._target.data.nbytes
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(pointer, nbytes, 0))
            self._register_s = time.monotonic() - start
        except BaseException as error:
            self._register_error = error
        finally:
            self._registered.set()

    def ready(self) -> dict[str, float]:
        """Wait until the arena is registered with CUDA.

        Returns:
            register_gib: what was registered; register_s: how long it took; register_wait_s: how much of that here.
            Nothing where there are no copies.

        Raises:
            RuntimeError: registration failed.
        """
        if not self._copies:
            return {}
        start = time.monotonic()
        self._registered.wait()
        if self._register_error is not None:
            raise RuntimeError(f"cudaHostRegister of the arena failed: {self._register_error}")
        return {
            "register_gib": round(self._target.data.nbytes / 2**30, 2),
            "register_s": round(self._register_s, 2),
            "register_wait_s": round(time.monotonic() - start, 2),
        }

    def _free_buffer(self) -> "SumsBuffer":
        """A buffer that no unpublished pass holds."""
        for buffer in self._buffers:
            if buffer.free:
                return buffer
        # More passes under way than any version seen; the allocation may stall this one, which is better than reuse.
        logger.warning("ray_extract: %d forward passes are unpublished; staging grows", len(self._buffers))
        self._buffers.append(self._new_buffer())
        return self._buffers[-1]

    def issue(
        self, work: Work, bases: npt.NDArray[np.uint64], input_ids: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> Ticket:
        """See writer.Copier."""
        buffer = self._free_buffer()
        buffer.take(work, input_ids)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if _FORBID_SYNC:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self._stream):
                if _DELAY_CYCLES:
                    torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
                stored = buffer.launch(work, states)
                for run in work.runs:
                    for k, state in enumerate(stored):
                        target = self._target.place(run, int(bases[run.slot, k]))
                        target.copy_(state[run.source : run.source + run.count], non_blocking=True)
                buffer.record()
        except BaseException:
            # The caller unpins the extents; a copy that is under way may not outlive that.
            torch.cuda.set_sync_debug_mode("default")
            self._stream.synchronize()
            buffer.release()
            raise
        if _FORBID_SYNC:
            torch.cuda.set_sync_debug_mode("default")
        return buffer


def open_copier(arena: AttachedArena, device: torch.device, max_tokens: int, copies: bool) -> CpuCopier | CudaCopier:
    """The copier for a device; see CudaCopier."""
    return CudaCopier(arena, device, max_tokens, copies) if device.type == "cuda" else CpuCopier(arena)
