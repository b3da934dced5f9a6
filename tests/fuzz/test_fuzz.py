"""Random cases of damage, and the proof that the harness sees what it looks for."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.forks import Interruption, Outcome
from tests.comm.launching import ROOT, clean_environment
from tests.conftest import NIGHTLY
from tests.fuzz.__main__ import Trial, faults_of

BEFORE = {"image.tif": "1", "map.tif": "2"}


@pytest.mark.parametrize(
    ("code", "err", "after", "killed", "fault"),
    [
        (0, "", {"map.tif": "3"}, False, None),
        (2, "error: x\n", {}, False, None),
        (-9, "", {".map.tif.part": "3"}, True, None),
        (0, "Traceback (most recent call last)\n", {}, False, "traceback"),
        (1, "error: x (unforeseen; y)\n", {}, False, "unforeseen error"),
        (-11, "", {}, True, "exit code -11"),
        (1, "", {}, False, "exit 1 with 0 lines"),
        (2, "error: x\nerror: y\n", {}, False, "exit 2 with 2 lines"),
        (0, "", {"image.tif": "3"}, False, "input changed: image.tif"),
        (2, "error: x\n", {"map.tif": "3"}, False, "input changed: map.tif"),
        (0, "", {"stray": "3"}, False, "left over: stray"),
        (0, "", {".map.tif.part": "3"}, False, "left over: .map.tif.part"),
    ],
)
def test_faults_are_seen(code: int, err: str, after: dict[str, str], killed: bool, fault: str | None) -> None:
    trial = Trial("predict", interruption=Interruption("SIGKILL", seconds=1.0) if killed else None)
    faults = faults_of(trial, Outcome(code, "", err, 1.0, False), BEFORE, BEFORE | after)
    assert [each.startswith(str(fault)) for each in faults] == ([] if fault is None else [True]), faults


def test_another_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    for folder in (tmp_path, tmp_path / "reference"):
        (folder / "map.tif").write_bytes(b"pixels")
    assert Trial("predict").result_faults(tmp_path) == []
    (tmp_path / "map.tif").write_bytes(b"qixels")
    assert Trial("predict").result_faults(tmp_path) == ["map.tif is not that of undisturbed commands"]
    assert Trial("train").result_faults(tmp_path) == ["the run is not finished"]


HANGS = """
from pathlib import Path
from time import sleep
from benchmarks.forks import run_ranks
print([(end.code, end.hung) for end in run_ranks(lambda: sleep(60), 2, Path("/"), 0.5)])
print([(end.code, end.hung) for end in run_ranks(lambda: 1 / 0, 2, Path("/"), 60)])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_cases() -> None:
    """No traceback, no hang, nothing lost, nothing changed; a fault comes with the command that shows it again.

    In a process of its own: the harness forks, which a process with threads must not.
    """

    def told(*words: str) -> str:
        command = [sys.executable, *words]
        environ = clean_environment()
        done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=ROOT, env=environ, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert told("-c", HANGS) == "[(-9, True), (-9, True)]\n[(99, False), (99, False)]\n"
    cases = 600 if NIGHTLY else 12
    assert f"--cases {cases}: 0 faults" in told("-m", "tests.fuzz", "--cases", str(cases), "--seed", "0")
