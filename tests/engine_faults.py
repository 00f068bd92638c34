"""Faults inside simulated engines: a sitecustomize of the tests' own, on the PYTHONPATH of the engine's processes.

It gives each host a child that stands for SGLang's scheduler (when it dies, its owner kills itself, as SGLang's does),
and makes an engine do what is armed, once for each arming.
"""

import os
from pathlib import Path

KINDS = {
    "hang": "takes requests and answers none any more",
    "slow": "takes ten times as long for a while",
    "unanswered": "one request gets no answer",
    "uncovered": "one request gets a good answer and was not run",
    "other_ids": "a pass says that it ran other token ids",
    "digest": "the digests of a pass are not those of its bytes",
    "garbage": "half a line comes down the pipe",
    "stray": "a request that nobody made is answered",
}
SCHEDULER = "scheduler-of-a-test"
SLOW_PASSES = 6

_SITE = f'''
import os, signal, subprocess, sys, threading
from pathlib import Path

HERE = Path(__file__).parent


def take(kind):
    """Whether this is armed; then another engine will not find it."""
    for path in HERE.glob(f"armed.{{kind}}.*"):
        try:
            path.rename(HERE / path.name.replace("armed", "fired", 1))
        except FileNotFoundError:
            continue
        return True
    return False


def install():
    pipe = os.dup(1)
    from ray_extract.engine import simulated

    Engine = simulated.SimulatedEngine
    begin, forward = Engine.start, Engine._forward

    async def started(self, folder):
        info = await begin(self, folder)
        self.slow = 0
        pause = "import signal; signal.pause()"
        child = subprocess.Popen([sys.executable, "-S", "-c", pause, "{SCHEDULER}"], stdin=subprocess.DEVNULL)
        threading.Thread(target=lambda: (child.wait(), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
        issue = self._writer.issue

        def faulty(work, ids, states):
            issue(work, ids + 1 if take("other_ids") else ids, states)
            if work.ticket is not None and take("digest"):
                work.ticket.sums.digest[:, 1:] += 1

        self._writer.issue = faulty
        return info

    def passed(self):
        queue = self._queue
        if queue and take("garbage"):
            os.write(pipe, b'{{"event": "answ\\n')
        if queue and take("stray"):
            os.write(pipe, b'{{"event": "answer", "rid": "nobody", "ok": true, "reason": "", "output_ids": []}}\\n')
        if queue and take("unanswered"):
            queue.popleft()
            self._progress = 0
        if queue and take("uncovered"):
            future = queue.popleft()[2]
            self._progress = 0
            if not future.done():
                future.set_result(simulated.Answer(True))
        if queue and take("slow"):
            self.slow = {SLOW_PASSES}
        if queue and take("hang"):
            return 1 << 60  # tokens, for which it sleeps as it does for a few
        self.slow, times = max(0, self.slow - 1), 10 if self.slow else 1
        return times * forward(self)

    Engine.start, Engine._forward = started, passed


if sys.orig_argv[-1] == "ray_extract.engine.host":
    install()
'''


class EngineFaults:
    """The folder of the faults of a job.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._armed = folder, 0
        (folder / "sitecustomize.py").write_text(_SITE)

    def env(self) -> dict[str, str]:
        """For the engine's processes."""
        return {"PYTHONPATH": os.pathsep.join([str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def arm(self, kind: str) -> Path:
        """One engine does this, soon; returns a file that is there as soon as one has begun."""
        self._armed += 1
        (self._folder / f"armed.{kind}.{self._armed}").touch()
        return self._folder / f"fired.{kind}.{self._armed}"

    def disarm(self, fired: Path) -> None:
        """No engine does it any more, if none has begun; takes what arm returned."""
        (self._folder / fired.name.replace("fired", "armed", 1)).unlink(missing_ok=True)
