"""doctor tells what a job runs on, and its sums are right."""

import json
import sys
from typing import Any

import pytest
import torch

from tests.comm.launching import clean_environment, mpirun, needs_mpirun, run_job
from tiledseg.comm.diagnosis import find_trouble

DOCTOR = ["-m", "tiledseg.doctor"]


def test_alone() -> None:
    done = run_job([sys.executable, *DOCTOR], environ=clean_environment())
    assert (done.code, done.err) == (0, "")
    assert "1 rank, launcher serial, transport serial" in done.out
    assert torch.__version__ in done.out
    assert "no bandwidth measured" in done.out
    assert "freed memory  kept" in done.out or "freed memory  given back: " in done.out


@needs_mpirun
def test_json_of_two_ranks() -> None:
    done = mpirun(2, *DOCTOR, "--format", "json", "--transport", "mpi")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert (told["launcher"], told["transport"]) == ("openmpi", "mpi")
    assert [(rank["rank"], rank["threads"]) for rank in told["ranks"]] == [(0, 1), (1, 1)]
    assert sorted(rank["local_rank"] for rank in told["ranks"]) == [0, 1]
    assert all(rank["versions"]["torch"] == torch.__version__ for rank in told["ranks"])
    assert [transfer["bytes"] for transfer in told["transfers"]] == [8, 2**16, 2**20, 2**24, 2**26]
    for transfer in told["transfers"]:
        assert transfer["bytes_per_second"] == pytest.approx(transfer["bytes"] / transfer["seconds"])
        assert transfer["bus_bytes_per_second"] == transfer["bytes_per_second"]  # 2 (P-1) / P is 1 at P = 2


def report(rank: int, threads: int = 2, torch: str = "2.13") -> dict[str, Any]:
    return {"rank": rank, "host": "a", "threads": threads, "cores": 8, "versions": {"torch": torch}}


def test_versions_that_differ_and_too_many_threads_are_named() -> None:
    trouble = find_trouble([report(0), report(1), report(2, torch="2.12"), report(3, torch="2.12")])
    assert trouble == ["torch differs between ranks: 2.12 on rank 2, 2.13 on rank 0"]
    trouble = find_trouble([report(rank, threads=3) for rank in range(3)])
    assert trouble == ["a: 3 ranks run 9 threads on 8 cores: lower one of them"]
