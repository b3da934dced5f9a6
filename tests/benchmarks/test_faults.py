"""Random faults befall small runs (`benchmarks/faults`), and the harness finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.case import Result
from benchmarks.faults.kinds import KINDS
from tests.comm.launching import ROOT, clean_environment
from tests.conftest import NIGHTLY

# Of the seed that is published. By day, what befalls files that are read: kills, signals, lost nodes, full disks and
# damaged checkpoints have tests in tests/crash, tests/checkpoint, tests/test_signals.py and tests/test_train.py.
FIRST, CASES = (0, 300) if NIGHTLY else (list(KINDS).index("raster cut"), 10)
SECONDS = 5800 if NIGHTLY else 900


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_random_faults_end_in_time_with_their_cause_and_cost_no_bit(tmp_path: Path) -> None:
    """In a process of its own: the harness forks, which a process with threads must not."""
    kept, numbers = tmp_path / "results.jsonl", ["--first", str(FIRST), "--cases", str(CASES)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--seed", "0", "--keep", str(kept), *numbers],
        **{"capture_output": True, "text": True, "timeout": SECONDS, "cwd": ROOT, "env": clean_environment()},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [Result(**json.loads(line)) for line in kept.read_text().splitlines()]
    assert [result.number for result in results] == list(range(FIRST, FIRST + CASES))
    assert {result.kind for result in results} == set(list(KINDS)[FIRST:])
    assert all(result.in_time and result.named and result.equal for result in results), done.stdout
    assert {result.mpirun for result in results} == {NIGHTLY, False}, "some start as users start them"
    assert f"| all | {CASES} |" in done.stdout
