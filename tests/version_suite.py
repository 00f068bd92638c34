"""The truth tests in every SGLang that is let in, each in an environment of its own (deploy/versions).

    python tests/version_suite.py [VERSION ...]

One family and the faults of capture, on the CPU. Without arguments all versions run (`make versions`). A version in
which every test passed goes to benchmarks/results/versions.json; the exit code is 1 unless all that ran did.
"""

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from rig import ERRORS, TOLERANCE

from ray_extract.capture.compat import TESTED_VERSIONS

REPO = Path(__file__).parents[1]
TRUTH, FAULTS = "tests/test_capture_truth.py", "tests/test_capture_faults.py"
WHOLE = (TRUTH, FAULTS, "-k", "not qwen3")
# One engine: each kind of pass, and the digests of what it stored.
QUICK = (
    *(
        f"{TRUTH}::{name}"
        for name in (
            "test_one_row_equals_hugging_face",
            "test_eight_unequal_rows_at_once_equal_hugging_face",
            "test_rows_beside_decoding_requests_equal_hugging_face",
            "test_only_the_tokens_that_are_asked_for_are_stored",
            "test_digests_published_by_the_engine_are_those_of_the_bytes",
        )
    ),
    "-k",
    "llama",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a version made of the tests.

    Args:
        version: asked for.
        ran: what the engines said they were.
        worst: largest error that was measured; see Rig.errors.
        said: of pytest, when not all passed.
    """

    version: str
    ran: frozenset[str] = frozenset()
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    worst: float = float("nan")
    seconds: float = 0.0
    said: str = ""

    @property
    def right(self) -> bool:
        """Whether this version ran, and every test passed."""
        whole = self.passed > 0 and self.failed == self.skipped == 0
        return whole and self.ran == {f"sglang {self.version}"} and self.worst < TOLERANCE


def run(version: str, tests: Sequence[str], folder: Path) -> Outcome:
    """Run tests in a version's environment, which is made if need be.

    Args:
        folder: an empty one.
    """
    python, began = sys.executable, time.monotonic()
    if version != importlib.metadata.version("sglang"):
        made = subprocess.run([REPO / "deploy/versions/setup.sh", version], capture_output=True, text=True, check=False)
        if made.returncode:
            return Outcome(version, said=made.stdout + made.stderr)
        python = str(REPO / f".cache/sglang-{version}/bin/python")
    report, errors = folder / "report.xml", folder / "errors"
    options = ["-p", "no:cacheprovider", f"--basetemp={folder / 'pytest'}", f"--junitxml={report}"]
    done = subprocess.run(
        [python, "-m", "pytest", *options, *tests],
        cwd=REPO,
        env={**os.environ, ERRORS: str(errors)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout[-8000:] + done.stderr[-2000:] if done.returncode else ""
    if not report.exists():
        return Outcome(version, said=said)
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, failed, broken, skipped = (int(suite.attrib[n]) for n in ("tests", "failures", "errors", "skipped"))
    failed += broken
    lines = [line.rpartition(" ") for line in errors.read_text().splitlines()] if errors.exists() else []
    return Outcome(
        version,
        ran=frozenset(engine for engine, _, _ in lines),
        passed=total - failed - skipped,
        failed=failed or int(done.returncode != 0),
        skipped=skipped,
        worst=max((float(error) for _, _, error in lines), default=float("nan")),
        seconds=time.monotonic() - began,
        said=said,
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """For people."""
    lines = [f"{'sglang':10}{'passed':>8}{'failed':>8}{'skipped':>9}{'worst error':>13}{'seconds':>9}"]
    for found in outcomes:
        figures = f"{found.passed:8}{found.failed:8}{found.skipped:9}{found.worst:13.1e}{found.seconds:9.0f}"
        lines.append(f"{found.version:10}{figures}{'' if found.right else '   NOT RIGHT'}")
    return "\n".join(lines)


def write(found: Outcome) -> None:
    """Write a version into the result file, from which benchmarks/tables.py makes the table in docs/capture.md."""
    sys.path.insert(0, str(REPO / "benchmarks"))
    import results

    case = f"sglang {found.version}"
    rows = [
        results.Row(case, f"worst error in {found.passed} tests", found.worst, "", TOLERANCE, "lower"),
        results.Row(case, "wall time", round(found.seconds), "s", None, "lower"),
    ]
    results.write("versions", rows, f"python tests/version_suite.py {found.version}", join=True)


def main() -> int:
    """Run the versions that are named, or all."""
    wanted = sys.argv[1:] or list(TESTED_VERSIONS)
    outcomes = []
    for version in wanted:
        with tempfile.TemporaryDirectory(prefix="ray_extract-versions-") as folder:
            outcomes.append(run(version, WHOLE, Path(folder)))
        print(outcomes[-1].said, end="")
        print(table(outcomes[-1:]), flush=True)
        if outcomes[-1].right:
            write(outcomes[-1])
    if len(outcomes) > 1:
        print(f"\n{table(outcomes)}")
    return 0 if all(found.right for found in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
