"""Put each fault of `faults.py` into a copy of the tree and see its tests fail: `python -m tests.mutations [WORD ...]`.

Words choose faults by parts of their names. Exits with 1 where a fault is not caught. `make mutations` runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.comm.launching import MPIRUN, ROOT, oversubscribe
from tests.mutations.faults import FAULTS, Fault

SECONDS = 900
COPIED = ("tiledseg", "tests", "benchmarks", "jobs", "docs", ".ci")
FILES = ("pyproject.toml", "setup.cfg", "Makefile", "README.md", "constraints.txt", "CHANGELOG.md", "CONTRIBUTING.md")


def copy_tree(to: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, to / name)
    (ROOT / "build").mkdir(exist_ok=True)  # the pretend GPU is compiled there
    for name in (".venv", "build"):
        (to / name).symlink_to(ROOT / name)


# Lines of a test that fails: pytest's; those of a rank that pytest does not report; the traceback of one that aborts.
_FAILURE = re.compile(r"^(?:FAILED|ERROR) tests/.*|^rank \d+: .* failed in .*|^  File .*/tests/.*", re.MULTILINE)


def failure(root: Path, fault: Fault) -> str:
    """Return a line on the fault's tests that fail in the tree at `root`, empty where none does or none has begun."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    if fault.ranks > 1:
        assert MPIRUN is not None, "these tests need mpirun"
        launcher = [MPIRUN, *oversubscribe(), "-n", str(fault.ranks)]
        command = [*launcher, *command, "--only-mpi", "-m", "mpi", "--color=no"]
    else:
        command += ["-m", "not mpi"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    words = [*command, *fault.tests.split()]
    try:
        done = subprocess.run(
            words, cwd=root, env=environment, capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"over {SECONDS} s"
    line = _FAILURE.search(done.stdout + done.stderr)
    return line[0].strip()[:160] if line and done.returncode else ""


def main(words: list[str]) -> int:
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    missed = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = Path(folder)
        copy_tree(root)
        for fault in chosen:
            place = root / "tiledseg" / fault.file
            source = place.read_text()
            place.write_text(source.replace(fault.old, fault.new))
            begun = time.monotonic()
            why = failure(root, fault)
            place.write_text(source)
            missed += [] if why else [fault.name]
            word, seconds = "caught" if why else "MISSED", time.monotonic() - begun
            print(f"{word} {seconds:5.0f} s  {fault.name}  ({fault.file}; {fault.tests}) {why}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
