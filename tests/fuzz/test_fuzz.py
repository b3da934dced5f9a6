"""Random cases of damage, and the proof that the harness would see what it looks for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.comm.launching import ROOT, clean_environment
from tests.conftest import NIGHTLY


def harness(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """The harness in a process of its own: it forks, which a process with threads must not."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=clean_environment(), check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_planted_faults_are_found() -> None:
    """One for each thing that it looks for; and nothing is found where nothing was planted."""
    done = harness("tests.fuzz.plants", seconds=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": found: ") == 11
    assert done.stdout.count(": no fault: []") == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_cases() -> None:
    """No traceback, no hang, nothing lost, nothing changed; a fault comes with the command that shows it again."""
    cases = 600 if NIGHTLY else 36
    done = harness("tests.fuzz", "--cases", str(cases), "--seed", "0", seconds=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| all | {cases} |" in done.stdout
