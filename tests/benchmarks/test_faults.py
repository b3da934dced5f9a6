"""Random faults befall small runs (`benchmarks/faults`), and the harness finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.case import Result, together, wrong_end
from benchmarks.faults.job import Order
from benchmarks.faults.kinds import KINDS, Moment, Trial, draw_trial
from benchmarks.faults.table import table
from tests.comm.launching import ROOT, clean_environment
from tests.conftest import NIGHTLY
from tests.fuzz.process import Outcome

CASES = 300 if NIGHTLY else len(KINDS)  # the first ones of the seed that is published
SECONDS = 5800 if NIGHTLY else 900


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_random_faults_end_in_time_with_their_cause_and_cost_no_bit(tmp_path: Path) -> None:
    """In a process of its own: the harness forks, which a process with threads must not."""
    kept = tmp_path / "results.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--seed", "0", "--cases", str(CASES), "--keep", str(kept)],
        **{"capture_output": True, "text": True, "timeout": SECONDS, "cwd": ROOT, "env": clean_environment()},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [Result(**json.loads(line)) for line in kept.read_text().splitlines()]
    assert [result.number for result in results] == list(range(CASES))
    assert {result.kind for result in results} == set(KINDS)
    assert all(result.in_time and result.named and result.equal for result in results), done.stdout
    assert {result.mpirun for result in results} == {True, False}, "some start as users start them"
    assert f"| all | {CASES} |" in done.stdout


def test_a_case_depends_on_its_seed_and_number() -> None:
    assert [draw_trial(3, n) for n in range(60)] == [draw_trial(3, n) for n in range(60)]
    assert [draw_trial(3, n) for n in range(60)] != [draw_trial(4, n) for n in range(60)]
    order = Order(Moment("kill", 1, step=4), 7, ("--a", "b"))
    assert Order.parse(order.text()) == order


@pytest.mark.parametrize(
    ("outcome", "wrong"),
    [
        (Outcome(1, "", "error: cannot write run/metrics.jsonl: File too large; raise it\n", 1.0, False), ""),
        (Outcome(1, "", "error: something\n", 1.0, False), "cause not named"),
        (Outcome(1, "", "Traceback (most recent call last)\n", 1.0, False), "a traceback"),
        (Outcome(0, "", "", 1.0, False), "cause not told by exit code 0"),
        (Outcome(-9, "", "", 20.0, True), "cause unknown: still running"),
        (Outcome(1, "", 2 * "error: cannot write run/a: File too large\n", 1.0, False), "cause told in 2 lines"),
    ],
)
def test_a_wrong_end_is_found(outcome: Outcome, wrong: str) -> None:
    trial = Trial("full disk", 1, Moment("limit", 0, step=4))
    found = wrong_end(trial, outcome)
    assert any(fault.startswith(wrong) for fault in found) if wrong else found == []


def test_how_a_job_of_several_ranks_ends() -> None:
    fine, bad, killed = (Outcome(code, "", f"{code} ", 1.0, False) for code in (0, 2, -9))
    late = Outcome(-9, "", "", 30.0, True)
    assert together([fine, bad]) == Outcome(2, "", "0 2 ", 1.0, False)
    assert together([bad, killed, fine]).code == -9
    assert together([fine, late]).hung
    assert together([bad, late], stopped=1) == Outcome(2, "", "2 ", 1.0, False)


def test_figures_of_the_table() -> None:
    def result(lost: int | None, recovery: float | None, ranks: int = 1, mpirun: bool = False) -> Result:
        ends = (not mpirun, lost is None, lost, recovery, [], "")
        return Result(0, "kill -9", ranks, mpirun, "", -9, 2.0, True, True, *ends)

    text = table([result(1, 0.5), result(4, 1.5), result(None, None), result(2, 3.0, 2), result(2, 9.0, 2, True)])
    row = "| 5 | 2 | 1 | 5 | 5 | 1 | 4 | 2 / 4 | 1.0 s / 1.5 s | 3.0 s / 3.0 s | 9.0 s / 9.0 s | 2.0 s |"
    assert text.splitlines()[2:] == [f"| kill -9 {row}", f"| all {row}"]
