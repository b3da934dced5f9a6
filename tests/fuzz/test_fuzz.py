"""Random cases of damage, and the proof that the harness sees what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.forks import Interruption, Outcome
from tests.comm.launching import ROOT, clean_environment
from tests.conftest import NIGHTLY
from tests.fuzz.__main__ import common_faults, faults_of_files
from tests.fuzz.trials import Trial, aftermath, same

BEFORE = {"image.tif": "1", "map.tif": "2"}
KILLED = Interruption("SIGKILL", seconds=1.0)


@pytest.mark.parametrize(
    ("code", "err", "after", "interruption", "fault"),
    [
        (0, "", {**BEFORE, "map.tif": "3"}, None, None),
        (2, "error: x\n", BEFORE, None, None),
        (-9, "", {**BEFORE, ".map.tif.part": "3"}, KILLED, None),
        (0, "Traceback (most recent call last)\n", BEFORE, None, "traceback"),
        (-11, "", BEFORE, KILLED, "exit code -11"),
        (1, "", BEFORE, None, "exit 1 with 0 lines"),
        (2, "error: x\nerror: y\n", BEFORE, None, "exit 2 with 2 lines"),
        (0, "", {**BEFORE, "image.tif": "3"}, None, "input changed: image.tif"),
        (2, "error: x\n", {**BEFORE, "map.tif": "3"}, None, "input changed: map.tif"),
        (0, "", {**BEFORE, "stray": "3"}, None, "left over: stray"),
        (0, "", {**BEFORE, ".map.tif.part": "3"}, None, "left over: .map.tif.part"),
    ],
)
def test_faults_are_seen(
    code: int, err: str, after: dict[str, str], interruption: Interruption | None, fault: str | None
) -> None:
    trial = Trial("predict", [], "", ("map.tif",), lambda folder: [], interruption)
    outcome = Outcome(code, "", err, 1.0, False)
    faults = common_faults(trial, outcome) + faults_of_files(trial, outcome, BEFORE, after)
    assert [each.startswith(str(fault)) for each in faults] == ([] if fault is None else [True]), faults


def test_a_damaged_map_is_seen(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference/map.tif").write_bytes(b"pixels")
    trial = Trial("predict", [], "", ("map.tif",), lambda folder: same(folder, "map.tif"), KILLED)
    for data, faults in ((b"pixels", []), (b"qixels", ["map.tif is not that of undamaged material"])):
        (tmp_path / "map.tif").write_bytes(data)
        assert same(tmp_path, "map.tif") == faults
        found = aftermath(trial, Outcome(0, "", "", 1.0, False), tmp_path)
        assert found == [f"after the interruption: {fault}" for fault in faults]


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
