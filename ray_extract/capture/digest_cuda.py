"""The digest, the statistics and the fp8 records of a forward pass, in one fused Triton pass a state. They are defined
in digest.py and fp8.py.

One program a token reads its state once, as 32-bit words, and adds into the sums of the token's entry. 64-bit integer
addition commutes, so the digest is exact in any order; `sumsq` is a float sum and may differ in its last bits.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from ray_extract.capture.digest import word_weights
from ray_extract.capture.fp8 import SMALLEST_AMAX
from ray_extract.capture.writer import Sums, Work

_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@triton.jit
def _position_weight(position):  # type: ignore[no-untyped-def]
    """A(p) of digest.py for i32 positions, as i64."""
    z = position.to(tl.uint64) + 4294967296 + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) | 1).to(tl.int64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _add_sums(  # type: ignore[no-untyped-def]
    digest_ptr,
    sumsq_ptr,
    amax_ptr,
    nonfinite_ptr,
    zero_ptr,
    entry,
    kept,
    k,
    words,
    squares,
    amax,
    bad,
    num_states: tl.constexpr,
):
    """Add a token of a state to its entry's sums.

    Args:
        words: sum of V(c) * u32[c], i64.
        squares, amax: of its finite values, f32.
        bad: NaN and infinite values.
    """
    out = entry.to(tl.int64) * num_states + k
    tl.atomic_add(digest_ptr + entry.to(tl.int64) * (num_states + 1) + k + 1, _position_weight(kept) * (words + 1))
    tl.atomic_add(sumsq_ptr + out, squares.to(tl.float64))
    tl.atomic_max(amax_ptr + out, amax)
    if bad > 0:
        tl.atomic_add(nonfinite_ptr + out, bad)
    elif amax == 0.0:
        tl.atomic_add(zero_ptr + out, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _state_kernel(  # type: ignore[no-untyped-def]
    words_ptr,
    stride,
    entry_ptr,
    kept_ptr,
    weights_ptr,
    digest_ptr,
    sumsq_ptr,
    amax_ptr,
    nonfinite_ptr,
    zero_ptr,
    k,
    num_states: tl.constexpr,
    num_words: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kept = tl.load(kept_ptr + token)
    if kept < 0:
        return
    entry = tl.load(entry_ptr + token)
    total = tl.zeros((block,), tl.int64)
    squares = tl.zeros((block,), tl.float32)
    largest = tl.zeros((block,), tl.float32)
    bad = tl.zeros((block,), tl.int32)
    for start in range(0, num_words, block):
        at = start + tl.arange(0, block)
        inside = at < num_words
        word = tl.load(words_ptr + token * stride + at, mask=inside, other=0)
        weight = tl.load(weights_ptr + at, mask=inside, other=0)
        total += (word.to(tl.int64) & 0xFFFFFFFF) * weight
        if kind == 2:
            low = word.to(tl.float32, bitcast=True)
            high = tl.zeros((block,), tl.float32)
        elif kind == 1:
            low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = ((word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            low = (word << 16).to(tl.float32, bitcast=True)
            high = (word & -65536).to(tl.float32, bitcast=True)
        low_size, high_size = tl.abs(low), tl.abs(high)
        # NaN compares false, so this is "not finite" for NaN and infinity alike.
        low_bad = ~(low_size <= 3.4028234663852886e38)
        high_bad = ~(high_size <= 3.4028234663852886e38)
        bad += low_bad.to(tl.int32) + high_bad.to(tl.int32)
        low_size = tl.where(low_bad, 0.0, low_size)
        high_size = tl.where(high_bad, 0.0, high_size)
        squares += low_size * low_size + high_size * high_size
        largest = tl.maximum(largest, tl.maximum(low_size, high_size))
    _add_sums(
        digest_ptr,
        sumsq_ptr,
        amax_ptr,
        nonfinite_ptr,
        zero_ptr,
        entry,
        kept,
        k,
        tl.sum(total, axis=0),
        tl.sum(squares, axis=0),
        tl.max(largest, axis=0),
        tl.sum(bad, axis=0),
        num_states,
    )


@triton.jit
def _e4m3(value):  # type: ignore[no-untyped-def]
    """Bits of the e4m3 nearest to fp32 values of at most 448, ties to even, as i32.

    In integers, since Triton has this type only for GPUs that have it (compute capability 8.9).
    """
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Under 2**-6, units of 2**-9: those of fp32 from 2**14 on, so the addition rounds.
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    code = tl.where(size < (121 << 23), small, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit  # type: ignore[untyped-decorator]
def _record_kernel(  # type: ignore[no-untyped-def]
    state_ptr,
    stride,
    records_ptr,
    entry_ptr,
    kept_ptr,
    weights_ptr,
    digest_ptr,
    sumsq_ptr,
    amax_ptr,
    nonfinite_ptr,
    zero_ptr,
    k,
    num_states: tl.constexpr,
    hidden: tl.constexpr,
    smallest_amax: tl.constexpr,
    block: tl.constexpr,
):
    """As _state_kernel, of what it writes: u8 [tokens, hidden + 8], contiguous."""
    token = tl.program_id(0).to(tl.int64)
    kept = tl.load(kept_ptr + token)
    if kept < 0:
        return
    entry = tl.load(entry_ptr + token)
    squares = tl.zeros((block,), tl.float32)
    largest = tl.zeros((block,), tl.float32)
    bad = tl.zeros((block,), tl.int32)
    for start in range(0, hidden, block):
        at = start + tl.arange(0, block)
        size = tl.abs(tl.load(state_ptr + token * stride + at, mask=at < hidden, other=0).to(tl.float32))
        wrong = ~(size <= 3.4028234663852886e38)
        bad += wrong.to(tl.int32)
        size = tl.where(wrong, 0.0, size)
        squares += size * size
        largest = tl.maximum(largest, size)
    amax = tl.max(largest, axis=0)
    bounded = tl.maximum(amax, smallest_amax)
    shrink = tl.div_rn(448.0, bounded)
    scale = tl.where(amax > 0.0, tl.div_rn(bounded, 448.0), 0.0).to(tl.int32, bitcast=True)
    record = records_ptr + token * (hidden + 8)
    total = tl.zeros((block,), tl.int64)
    for start in range(0, hidden, block):
        at = start + tl.arange(0, block)
        inside = at < hidden
        value = tl.load(state_ptr + token * stride + at, mask=inside, other=0).to(tl.float32)
        finite = tl.abs(value) <= 3.4028234663852886e38
        scaled = tl.where(finite, tl.minimum(tl.maximum(value * shrink, -448.0), 448.0), 0.0)
        code = tl.where(finite, _e4m3(scaled), 0x7F)
        tl.store(record + at, code.to(tl.uint8), mask=inside)
        weight = tl.load(weights_ptr + at // 4, mask=inside, other=0)
        total += (code.to(tl.int64) << (8 * (at % 4))) * weight
    tail = tl.arange(0, 8)
    tl.store(record + hidden + tail, tl.where(tail < 4, (scale >> (8 * (tail % 4))) & 0xFF, 0).to(tl.uint8))
    words = tl.sum(total, axis=0) + scale.to(tl.int64) * tl.load(weights_ptr + hidden // 4)
    _add_sums(
        digest_ptr,
        sumsq_ptr,
        amax_ptr,
        nonfinite_ptr,
        zero_ptr,
        entry,
        kept,
        k,
        words,
        tl.sum(squares, axis=0),
        amax,
        tl.sum(bad, axis=0),
        num_states,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _ids_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, entry_ptr, position_ptr, digest_ptr, num_tokens, weight, num_states: tl.constexpr, block: tl.constexpr
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < num_tokens
    entry = tl.load(entry_ptr + at, mask=inside, other=-1)
    position = tl.load(position_ptr + at, mask=inside, other=0)
    ids = tl.load(ids_ptr + at, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    weighted = _position_weight(position) * (ids * weight + 1)
    tl.atomic_add(digest_ptr + entry.to(tl.int64) * (num_states + 1), weighted, mask=inside & (entry >= 0))


def token_arrays(work: Work, out: npt.NDArray[np.int32]) -> None:
    """Fill i32 [3, num_tokens]: entry, prompt position and place among stored tokens of each token, -1 for none."""
    out[:] = -1
    for i, entry in enumerate(work.entries):
        span = slice(entry.source, entry.source + entry.count)
        out[0, span] = i
        out[1, span] = np.arange(entry.position, entry.position + entry.count, dtype=np.int32)
        for source, kept, count in entry.pieces:
            out[2, source : source + count] = np.arange(kept, kept + count, dtype=np.int32)


def device_weights(token_bytes: int, device: torch.device) -> torch.Tensor:
    """V(0), V(1) ... of digest.py for a state of `token_bytes`, on a GPU; i64 [token_bytes / 4]."""
    return torch.from_numpy(word_weights(token_bytes // 4).view(np.int64).copy()).to(device)


class SumsBuffer:
    """Staging of one forward pass's sums and fp8 records; allocated once, used in turn. It is its own ticket.

    Args:
        device: the GPU.
        max_tokens: most tokens in a forward pass.
        num_states: states captured.
        weights: from device_weights, for the words of one state as it is stored.
        fp8: whether states are stored as records of fp8.py.
    """

    def __init__(
        self, device: torch.device, max_tokens: int, num_states: int, weights: torch.Tensor, fp8: bool = False
    ) -> None:
        self._states = num_states
        self._max_tokens = max_tokens
        pin = device.type == "cuda"
        self._host_tokens = torch.empty((3, max_tokens), dtype=torch.int32, pin_memory=pin)
        self._tokens = torch.empty((3, max_tokens), dtype=torch.int32, device=device)
        # One flat buffer of five sections for all sums, so one memset and one copy a pass.
        self._ids = torch.empty(max_tokens, dtype=torch.int64, device=device)
        self._out = torch.empty(max_tokens * self._entry_bytes, dtype=torch.uint8, device=device)
        self._host_out = torch.empty(max_tokens * self._entry_bytes, dtype=torch.uint8, pin_memory=pin)
        self._event = torch.cuda.Event() if pin else None  # type: ignore[no-untyped-call]
        self._weights = weights
        self._records = (
            torch.empty((num_states, max_tokens, 4 * len(weights)), dtype=torch.uint8, device=device) if fp8 else None
        )
        self._entries = 0
        self._states_held: Sequence[torch.Tensor] = ()
        self.free = True

    @property
    def _entry_bytes(self) -> int:
        return 8 * (self._states + 1) + self._states * (8 + 4 + 4 + 4)

    def take(self, work: Work, input_ids: torch.Tensor) -> None:
        """Occupy the buffer with a new pass and keep its token ids; on the stream that the pass runs on.

        The ids are copied in stream order with the pass: SGLang's eager runner keeps them in a static buffer that the
        next pass overwrites (0.5.16 `model_executor/runner/eager_runner.py`, load_batch), and a side stream that reads
        it later can read the next pass's ids. By reading, states are allocated anew in each pass.
        """
        if work.num_tokens > self._max_tokens:
            raise ValueError(f"a forward pass of {work.num_tokens} tokens; staging was sized for {self._max_tokens}")
        self.free = False
        self._ids[: work.num_tokens].copy_(input_ids[: work.num_tokens], non_blocking=True)

    def launch(self, work: Work, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Queue the kernels on the current stream; returns what is to be stored of each state, [>= num_tokens, ...].

        The states are held until wait() or release(). Tensor.record_stream would not do: it says nothing of memory that
        came through DLPack, as the outputs of SGLang's all-reduce do (0.5.16 `jit_kernel/all_reduce.py`).
        """
        self._states_held = states
        tokens, entries, k = work.num_tokens, len(work.entries), self._states
        token_arrays(work, self._host_tokens[:, :tokens].numpy())
        for i in range(3):
            self._tokens[i, :tokens].copy_(self._host_tokens[i, :tokens], non_blocking=True)
        self._entries = entries
        used = entries * self._entry_bytes
        self._out[:used].zero_()
        digest, sumsq, amax, nonfinite, zero = self._sections(self._out)
        for j, state in enumerate(states):
            if self._records is not None:
                hidden = state.shape[1]
                _record_kernel[(tokens,)](
                    state,
                    state.stride(0),
                    self._records[j],
                    self._tokens[0],
                    self._tokens[2],
                    self._weights,
                    digest,
                    sumsq,
                    amax,
                    nonfinite,
                    zero,
                    j,
                    num_states=k,
                    hidden=hidden,
                    smallest_amax=SMALLEST_AMAX,
                    block=min(2048, triton.next_power_of_2(hidden)),
                    num_warps=8,
                )
                continue
            words = state.view(torch.int32)
            num_words = words.shape[1]
            _state_kernel[(tokens,)](
                words,
                words.stride(0),
                self._tokens[0],
                self._tokens[2],
                self._weights,
                digest,
                sumsq,
                amax,
                nonfinite,
                zero,
                j,
                num_states=k,
                num_words=num_words,
                kind=_KINDS[state.dtype],
                block=min(2048, triton.next_power_of_2(num_words)),
                num_warps=8,
            )
        block = 256
        _ids_kernel[(triton.cdiv(tokens, block),)](
            self._ids,
            self._tokens[0],
            self._tokens[1],
            digest,
            tokens,
            int(word_weights(1).view(np.int64)[0]),
            num_states=k,
            block=block,
        )
        self._host_out[:used].copy_(self._out[:used], non_blocking=True)
        return list(states) if self._records is None else list(self._records)

    def record(self) -> None:
        """Mark the end of this pass's work on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> Sums:
        """See writer.Ticket."""
        if self._event is not None:
            self._event.synchronize()
        digest, sumsq, amax, nonfinite, zero = (t.numpy().copy() for t in self._sections(self._host_out))
        self.release()
        return Sums(digest.view(np.uint64), sumsq, amax, nonfinite, zero)

    def release(self) -> None:
        """Give up what the pass holds, when nothing reads it any more."""
        self._states_held = ()
        self.free = True

    def _sections(self, flat: torch.Tensor) -> list[torch.Tensor]:
        e, k, at, out = self._entries, self._states, 0, []
        for dtype, width in (
            (torch.int64, k + 1),
            (torch.float64, k),
            (torch.float32, k),
            (torch.int32, k),
            (torch.int32, k),
        ):
            nbytes = e * width * dtype.itemsize
            out.append(flat[at : at + nbytes].view(dtype).view(e, width))
            at += nbytes
        return out
