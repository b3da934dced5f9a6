"""The tests marked `cuda`: the law on the GPU against twins on the CPU. Without a GPU they are skipped by name."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

from benchmarks.gpu.part import Part, SkippedError, begin_part
from benchmarks.launching import python_ranks

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    part = begin_part(__file__)
    files = marked_files(part.small)
    part.measure("one rank", "tests", lambda: run_tests(part, [sys.executable], files, "cuda and not mpi"))
    part.measure("two ranks", "tests", lambda: two_ranks(part, files), needs=15)
    part.measure("whole runs", "tests", lambda: whole_runs(part), needs=30)
    part.measure("one rank, looking for races", "tests", lambda: sanitized(part, files), needs=30)
    return int(part.failed)


def marked_files(small: bool) -> list[str]:
    """Files of tests that name the mark; in the small form the first one of the law."""
    found = sorted(p for p in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.cuda" in p.read_text())
    return [str(path) for path in found if not small or "law" in path.parts][: 1 if small else None]


def two_ranks(part: Part, files: list[str]) -> dict[str, int]:
    """The communicating ones, both ranks on the one GPU."""
    part.needs_gpu()
    communicating = [path for path in files if "/comm/" in path]
    return run_tests(part, python_ranks(2), communicating, "cuda and mpi", "--only-mpi")


def whole_runs(part: Part) -> dict[str, int]:
    """Commands on the GPU beside the CPU's: losses, checkpoints, maps; and every function that tracing takes."""
    part.needs_gpu()
    files = [f"tests/pretend_gpu/{name}.py" for name in ("test_runs", "test_gpu_path")]
    return run_tests(part, [sys.executable], files, "not mpi")


def sanitized(part: Part, files: list[str]) -> dict[str, int]:
    """Those of one rank under torch's sanitizer, which raises where two streams are not ordered."""
    part.needs_gpu()
    return run_tests(part, ["env", "TORCH_CUDA_SANITIZER=1", sys.executable], files, "cuda and not mpi")


def run_tests(part: Part, python: list[str], files: list[str], mark: str, *flags: str) -> dict[str, int]:
    """Counts by outcome; a line for each test that failed. Raises RuntimeError where pytest itself fails.

    Raises SkippedError where all were skipped.
    """
    rank = "$OMPI_COMM_WORLD_RANK" if "mpirun" in python[0] else "0"  # pytest fills it in: a report for each rank
    name = f"{part.name}-{len(python)}"
    report = part.work / f"{name}-0.xml"
    written = f"--junitxml={part.work / name}-{rank}.xml"
    pytest = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-m", mark, written, *flags]
    done = subprocess.run(
        [*python, *pytest, *files], capture_output=True, text=True, cwd=ROOT, timeout=max(1.0, part.left), check=False
    )
    print(done.stdout, done.stderr, flush=True)
    if done.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"pytest ended with code {done.returncode}: {(done.stdout or done.stderr).strip()[-300:]}")
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = _outcome(case)
        counts[outcome] += 1
        if outcome == "failed":
            part.measure(f"{case.get('classname')}::{case.get('name')}", None, partial(_fail, case))
    if counts["skipped"] and not counts["passed"] + counts["failed"]:
        raise SkippedError(f"{counts['skipped']} tests say there is no GPU")
    return counts


def _outcome(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def _fail(case: ElementTree.Element) -> None:
    found = case.find("failure")
    raise AssertionError(str((found if found is not None else case.find("error")).get("message")))  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main())
