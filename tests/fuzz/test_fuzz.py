"""Random cases of damage, and the proof that the harness would see what it looks for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.comm.launching import ROOT, clean_environment
from tests.conftest import NIGHTLY


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_planted_faults_and_random_cases() -> None:
    """A fault of each kind is found, and none where nothing was planted. Then no traceback, no hang, nothing lost,
    nothing changed; a fault comes with the command that shows it again.

    In a process of its own: the harness forks, which a process with threads must not.
    """
    cases = 600 if NIGHTLY else 12
    command = [sys.executable, "-m", "tests.fuzz", "--plants", "--cases", str(cases), "--seed", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=850, cwd=ROOT, env=clean_environment(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("found: ") == 9
    assert f"--cases {cases}: 0 faults" in done.stdout
