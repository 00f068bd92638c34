"""Lets the real torchvision be imported beside a CPU-only torch; replaces itself by it.

PyPI's torchvision is a CUDA build whose operator library does not load without CUDA. torchvision goes on without it,
yet registers shape functions for two operators, `nms` and `qnms`, that only this library would have defined, and so its
import fails. Here the two are declared first, without an implementation: calling one raises. SGLang and Transformers
import torchvision for image models; text models do not call it.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_SHIMS = Path(__file__).resolve().parent.parent


def _declare_missing_operators(package: Path) -> torch.library.Library | None:
    """Declare what the operator library would have, unless it loads (a CPU build of torchvision, or a CUDA torch)."""
    try:
        torch.ops.load_library(package / "_C.so")
    except OSError:
        # The declarations live as long as this object.
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


_spec = PathFinder.find_spec("torchvision", [entry for entry in sys.path if Path(entry).resolve() != _SHIMS])
if _spec is None or _spec.loader is None or _spec.origin is None:
    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
_library = _declare_missing_operators(Path(_spec.origin).parent)
_module = importlib.util.module_from_spec(_spec)
# The import system returns what it finds here once this file has run.
sys.modules["torchvision"] = _module
_module._ray_extract_operators = _library  # type: ignore[attr-defined]
_spec.loader.exec_module(_module)
