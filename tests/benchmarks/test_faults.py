"""Random faults befall small runs (`benchmarks/faults`): a case of every kind, and the harness finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.case import Result, wrong_end
from benchmarks.faults.job import Order
from benchmarks.faults.kinds import KINDS, Moment, draw_trial
from benchmarks.faults.table import table
from tests.comm.launching import ROOT, clean_environment
from tests.conftest import NIGHTLY
from tests.fuzz.process import Outcome

FIRST = 630
"""From here on comes one case of each kind, of which only the stuck rank needs two ranks (left out here)."""


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_fault_of_every_kind_ends_in_time_with_its_cause_and_costs_no_bit(tmp_path: Path) -> None:
    cases = 100 if NIGHTLY else len(KINDS)
    first, ranks = (0, "2") if NIGHTLY else (FIRST, "1")
    kept = tmp_path / "results.jsonl"
    words = ["--seed", "0", "--first", str(first), "--cases", str(cases), "--keep", str(kept), "--most-ranks", ranks]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *words],
        **{"capture_output": True, "text": True, "timeout": 2900, "cwd": ROOT, "env": clean_environment()},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [Result(**json.loads(line)) for line in kept.read_text().splitlines()]
    assert {result.kind for result in results} == (set(KINDS) if NIGHTLY else set(KINDS) - {"stuck rank"})
    assert all(result.in_time and result.named and result.equal for result in results)
    assert f"| all | {len(results)} |" in done.stdout


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
    trial = draw_trial(0, list(KINDS).index("full disk"))
    found = wrong_end(trial, outcome)
    assert any(fault.startswith(wrong) for fault in found) if wrong else found == []


def test_figures_of_the_table() -> None:
    def result(lost: int | None, recovery: float | None, ranks: int = 1, equal: bool = True) -> Result:
        return Result(0, "kill -9", ranks, "", -9, 2.0, True, True, equal, lost is None, lost, recovery, [], "")

    text = table([result(1, 0.5), result(4, 1.5), result(None, None), result(2, 9.0, ranks=2, equal=False)])
    row = "| 4 | 1 | 4 | 4 | 1 | 3 | 2 / 4 | 1.0 s / 1.5 s | 9.0 s / 9.0 s | 2.0 s |"
    assert text.splitlines()[2:] == [f"| kill -9 {row}", f"| all {row}"]
