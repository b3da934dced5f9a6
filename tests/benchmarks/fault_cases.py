"""Cases of `benchmarks.faults`, in a program of their own: it forks, and has one thread."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.faults.case import Result
from benchmarks.faults.kinds import KINDS
from tests.comm.launching import ROOT, clean_environment
from tests.conftest import NIGHTLY

SECONDS = 2900 if NIGHTLY else 900  # 100 to 150 s by itself, 280 beside other work


def check_half(half: int, tmp_path: Path) -> None:
    """Of the first 100 cases of the seed that is published, or of all 300 of a night."""
    cases = 150 if NIGHTLY else 50
    kept = tmp_path / "results.jsonl"
    words = ["--seed", "0", "--first", str(half * cases), "--cases", str(cases), "--keep", str(kept)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *words],
        **{"capture_output": True, "text": True, "timeout": SECONDS, "cwd": ROOT, "env": clean_environment()},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [Result(**json.loads(line)) for line in kept.read_text().splitlines()]
    assert [result.number for result in results] == list(range(half * cases, (half + 1) * cases))
    assert {result.kind for result in results} == set(KINDS)
    assert all(result.in_time and result.named and result.equal for result in results), done.stdout
    assert {result.mpirun for result in results} == {True, False}, "some start as users start them"
    assert f"| all | {cases} |" in done.stdout
