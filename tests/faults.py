"""Faults in SGLang's scheduler: a plugin of the tests' own, loaded beside ours, that raises where it is told to.

It lies in a folder with an entry point, on the PYTHONPATH of the engine's processes, ahead of the installed packages.
Some points are armed by a file of their name and raise once for each; others are chosen before the engine starts.
"""

import os
import time
from pathlib import Path

POINTS = {
    "check": ("after_init_new", "Writer.check_request"),
    "begin": ("around_forward, first row", "Writer.begin"),
    "entry": ("around_forward, a row in the middle", "Writer._entry"),
    "runs": ("around_forward, all rows pinned", "Writer._runs"),
    "states": ("around_logits", "Hooks._states"),
    "issue": ("around_logits, in the copy", "CpuCopier.issue"),
    "wait": ("before_process_batch_result, in the wait", "_Done.wait"),
    "mark": ("before_process_batch_result, in the marks", "Writer._mark"),
    "bookkeeping": ("before_process_batch_result, half of the marks", "Sums"),
}

_PLUGIN = '''
import os, sys, time
from pathlib import Path

HERE = Path(__file__).parent
AT_START = os.environ.get("RAY_EXTRACT_TEST_FAULT", "")


def fires(point):
    try:
        (HERE / point).unlink()
    except FileNotFoundError:
        return False
    return True


def raising(owner, attribute, point, calls=1):
    """The `calls`-th call after the point was armed raises."""
    original, left = getattr(owner, attribute), [0]

    def method(*args, **kwargs):
        if fires(point):
            left[0] = calls
        if left[0]:
            left[0] -= 1
            if not left[0]:
                raise RuntimeError(f"injected at {point}")
        return original(*args, **kwargs)

    setattr(owner, attribute, method)


def stalling(owner, attribute):
    """Never returns once armed; says that it was reached."""
    original = getattr(owner, attribute)

    def method(*args, **kwargs):
        if fires("stall"):
            (HERE / "stalled").touch()
            time.sleep(600)
        return original(*args, **kwargs)

    setattr(owner, attribute, method)


def half_of_the_marks():
    """Statistics of the wrong shape: NumPy raises after the digests were added."""
    import dataclasses
    from ray_extract.capture import copier

    original = copier._Done.wait

    def wait(self):
        sums = original(self)
        return dataclasses.replace(sums, sumsq=sums.sumsq[:, :-1]) if fires("bookkeeping") else sums

    copier._Done.wait = wait


def register():
    if AT_START == "import":
        sys.modules["ray_extract.capture.hooks"] = None
        return
    from sglang.srt.plugins.hook_registry import HookRegistry
    from ray_extract.capture import compat, copier, hooks, writer

    if AT_START == "load_model":
        def refuse(model, boundaries):
            raise RuntimeError("injected at load_model")
        hooks.set_boundaries = refuse
    if AT_START == "process_batch_result":
        apply = HookRegistry._apply_target.__func__
        def one_fails(cls, target, found):
            if target == compat.PROCESS_RESULT:
                raise RuntimeError("injected at process_batch_result")
            return apply(cls, target, found)
        HookRegistry._apply_target = classmethod(one_fails)
    raising(writer.Writer, "check_request", "check")
    raising(writer.Writer, "begin", "begin")
    raising(writer.Writer, "_entry", "entry", calls=3)
    raising(writer.Writer, "_runs", "runs")
    raising(hooks.Hooks, "_states", "states")
    raising(copier.CpuCopier, "issue", "issue")
    raising(copier._Done, "wait", "wait")
    raising(writer.Writer, "_mark", "mark")
    half_of_the_marks()
    stalling(writer.Writer, "issue")
'''


class Faults:
    """The plugin's folder.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ray_extract_test_faults.py").write_text(_PLUGIN)
        # Of metadata's files only these two are read.
        info = folder / "ray_extract_test_faults-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-extract-test-faults\nVersion: 1\n")
        entry = "[sglang.srt.plugins]\nray_extract_test_faults = ray_extract_test_faults:register\n"
        (info / "entry_points.txt").write_text(entry)

    def env(self, at_start: str = "") -> dict[str, str]:
        """For the engine's processes.

        Args:
            at_start: `import`, `load_model` or `process_batch_result`, to fail while the engine starts.
        """
        path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(path), "RAY_EXTRACT_TEST_FAULT": at_start}

    def arm(self, point: str) -> None:
        """The next call there raises."""
        (self.folder / point).touch()

    def fired(self, point: str) -> bool:
        """Whether an armed point was reached."""
        return not (self.folder / point).exists()

    def wait_for(self, name: str) -> None:
        """Wait for a file that the plugin leaves."""
        deadline = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"waited for {name}"
            time.sleep(0.01)
