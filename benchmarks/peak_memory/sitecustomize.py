"""On the PYTHONPATH of an engine: each of its processes that uses a GPU keeps its peak of allocated bytes in a file.

What the driver counts is no measure: PyTorch's allocator keeps whatever it once took, so of two equal engines on one
GPU the first to run a long row holds tens of gigabytes more (seen: 93 and 50 GB).
"""

import os
import sys
import threading
import time
from pathlib import Path


def _watch(folder: Path) -> None:
    while True:
        time.sleep(0.5)
        torch = sys.modules.get("torch")
        if torch is not None and getattr(torch, "cuda", None) is not None and torch.cuda.is_initialized():
            (folder / str(os.getpid())).write_text(str(torch.cuda.max_memory_allocated()))


if "RAY_EXTRACT_PEAK_MEMORY" in os.environ:
    threading.Thread(target=_watch, args=(Path(os.environ["RAY_EXTRACT_PEAK_MEMORY"]),), daemon=True).start()
