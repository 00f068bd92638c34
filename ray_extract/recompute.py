"""Stored states against Hugging Face Transformers, the reference for what a state is.

Boundary b below N is `hidden_states[b]`; `final` is the last entry, which Transformers hands out after the final norm;
boundary N is what that norm reads.
A token's error is the norm of the difference over the norm of the fp32 reference. States stored in fp32 must be within
FP32_TOLERANCE. Of bf16 and fp16 nobody can ask that: two right programs differ by rounding. So Transformers runs in
that type too, and the stored states must be about as near to the fp32 reference as its own are; as its own sent through
fp8, if that is how they are stored.
"""

import dataclasses
import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ray_extract.capture.fp8 import decode, encode
from ray_extract.errors import ConfigError
from ray_extract.reference_model import dtype_name, first_line, load_below, load_whole, out_of_memory, way_out

FP32_TOLERANCE = 1e-5
"""Largest error of a token whose state is stored in fp32."""
HALF_FACTOR = 1.2
"""The median error of states stored in another type may be this many times that of Transformers in the same type ..."""
HALF_SLACK = 1e-6
"""... plus this."""

F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredRow:
    """A row to recompute.

    Args:
        input_ids: i32 [n].
        positions: i64 [kept].
        states: stored states by name, each [kept, H].
    """

    input_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    states: Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class StateError:
    """Errors of one state, over the stored tokens of all recomputed rows.

    Args:
        name: the state.
        dtype: the stored type, such as `bfloat16` or `float8_e4m3`.
        tokens: how many.
        p50, max: median and largest relative error.
        reference_p50, reference_max: the same of Transformers' own states, stored so; 0 for fp32.
    """

    name: str
    dtype: str
    tokens: int
    p50: float
    max: float
    reference_p50: float
    reference_max: float

    @property
    def ok(self) -> bool:
        """Whether the stored states are as near as they must be; NaN is not."""
        if self.dtype == "float32":
            return self.max <= FP32_TOLERANCE
        return self.p50 <= HALF_FACTOR * self.reference_p50 + HALF_SLACK

    def __str__(self) -> str:
        text = (
            f"{self.name} ({self.dtype}, {self.tokens} tokens): relative error p50 {self.p50:.2e}, max {self.max:.2e}"
        )
        if self.dtype == "float32":
            return f"{text}; at most {FP32_TOLERANCE:.0e} allowed"
        return f"{text}; Transformers' own {self.reference_p50:.2e}, {self.reference_max:.2e}"


def state_errors(
    rows: Sequence[StoredRow], model_path: str, *, layers: int | None = None, fp8_of: torch.dtype | None = None
) -> list[StateError]:
    """Run Transformers over the rows, one by one, on the GPU if there is one.

    Args:
        rows: at least one, all with the same states in the same types.
        model_path: the checkpoint's folder.
        layers: load the embeddings and this many layers only, for states at boundaries 0 .. layers; all when absent.
        fp8_of: what the engine computed in, if the states were stored in fp8.

    Raises:
        ConfigError: Transformers is missing, or cannot load the checkpoint; a tensor that it lacks; too little memory;
            a state that it does not hand out.
    """
    names = list(rows[0].states)
    dtypes = {name: fp8_of or rows[0].states[name].dtype for name in names}
    truth = _hidden_states(model_path, torch.float32, rows, names, layers)
    own = {torch.float32: truth} if fp8_of is not None else {}
    for dtype in set(dtypes.values()) - {torch.float32}:
        # A model that was used is in cycles, and two may be more than fits.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        own[dtype] = _hidden_states(model_path, dtype, rows, names, layers)
    found = []
    for name in names:
        errors = _errors([row.states[name].float().numpy() for row in rows], [t[name] for t in truth])
        reference = np.zeros(1)
        if dtypes[name] in own:
            theirs = [o[name] for o in own[dtypes[name]]]
            if fp8_of is not None:
                theirs = [decode(encode(torch.from_numpy(o)), torch.float32).numpy() for o in theirs]
            reference = _errors(theirs, [t[name] for t in truth])
        found.append(
            StateError(
                name=name,
                dtype="float8_e4m3" if fp8_of is not None else dtype_name(dtypes[name]),
                tokens=len(errors),
                p50=float(np.median(errors)),
                max=float(errors.max()),
                reference_p50=float(np.median(reference)),
                reference_max=float(reference.max()),
            )
        )
    return found


def _errors(found: Iterable[F32], truth: Iterable[F32]) -> npt.NDArray[np.float64]:
    """Relative error of each token; f64 [tokens]. Infinite where only the reference is zero."""
    errors = []
    for a, b in zip(found, truth, strict=True):
        difference = np.linalg.norm(a.astype(np.float64) - b, axis=1)
        scale = np.linalg.norm(b.astype(np.float64), axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            errors.append(np.where(difference == 0, 0.0, difference / scale))
    return np.concatenate(errors)


def _hidden_states(
    model_path: str, dtype: torch.dtype, rows: Sequence[StoredRow], names: Sequence[str], layers: int | None
) -> list[dict[str, F32]]:
    """States at the rows' stored positions, as Transformers computes them in `dtype`; each [kept, H]."""
    found: list[dict[str, F32]] = []
    try:
        # The inner model: the logits of a long row would take more memory than everything else.
        model = load_whole(model_path, dtype).base_model if layers is None else load_below(model_path, layers, dtype)
        depth = model.config.get_text_config().num_hidden_layers
        with torch.inference_mode():
            for row in rows:
                ids = torch.from_numpy(row.input_ids.astype(np.int64))[None].to(model.device)
                states = _boundaries(model, ids, layers)
                at = torch.from_numpy(row.positions).to(model.device)
                picked = {name: states[_index(name, len(states), layers, depth)][0][at] for name in names}
                found.append({name: state.float().cpu().numpy() for name, state in picked.items()})
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"--recompute: {model_path}: out of memory in {dtype_name(dtype)} ({first_line(error)}); {way_out(layers)}"
        ) from None
    return found


def _boundaries(model: Any, ids: torch.Tensor, layers: int | None) -> list[torch.Tensor]:
    """Boundaries 0 .. N of a row, and the final state; each [1, n, H]. Of a cut model, boundaries 0 .. layers.

    Transformers hands the last boundary out through the final norm only, so it is taken where the norm reads it.
    """
    read: list[torch.Tensor] = []
    norm = getattr(model, "norm", None) if layers is None else None
    hook = norm.register_forward_pre_hook(lambda _, args: read.append(args[0])) if norm is not None else None
    try:
        states = list(model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states)
    finally:
        if hook is not None:
            hook.remove()
    if layers is not None:
        return states
    return [*states[:-1], *read[-1:], states[-1]]


def _index(name: str, count: int, layers: int | None, depth: int) -> int:
    """Place of a state among those `count` of _boundaries; `depth` is the model's number of layers."""
    which = name.removeprefix("state.")
    if which == "final":
        return count - 1
    boundary = int(which)
    if boundary < (count if layers is not None else count - 1):
        return boundary
    if boundary > depth:
        raise ConfigError(f"--recompute: {name}: this checkpoint has {depth} layers, so it is another model")
    raise ConfigError(
        f"--recompute: {name}: Transformers' class keeps this boundary to itself; try --boundary {boundary}"
    )
