"""Store work of a start, at 32 to 256 ranks: it grows no faster than the ranks times their logarithm."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from itertools import pairwise
from typing import Any

import pytest

from tests.comm.launching import clean_environment, run_job
from tests.conftest import NIGHTLY
from tiledseg.comm.launch import Launch, open_files_needed, store_operations
from tiledseg.comm.session import check_open_files
from tiledseg.comm.watching.verdict import Report
from tiledseg.comm.watching.watch import Board, Watch
from tiledseg.errors import ConfigError

SIZES = (32, 64, 128, 256) if NIGHTLY else (32, 256)


def started(*sizes: int, **environ: str) -> dict[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.comm.many_ranks", *map(str, sizes)]
    done = run_job(command, 100, clean_environment(environ))
    assert done.code == 0, done.err
    return {int(size): found for size, found in json.loads(done.out).items()}


@pytest.fixture(scope="module")
def starts() -> dict[int, dict[str, Any]]:
    """Meeting, a sum and a message of every communicator that a mesh of replicas x 2 x 4 x 2 has, and the end."""
    return started(*SIZES)


@pytest.mark.parametrize("what", ["operations", "bytes"])
def test_store_work_grows_no_faster_than_p_log_p(starts: dict[int, dict[str, Any]], what: str) -> None:
    """Rank 0, which keeps the store, does all of it. With a full mesh twice the ranks made eight times the bytes."""
    for few, many in pairwise(SIZES):
        grown = starts[many]["total"][what] / starts[few]["total"][what]
        assert many / few <= grown <= many * math.log2(many) / (few * math.log2(few))


def test_what_a_rehearsal_says_of_the_store_is_a_bound_and_no_loose_one(starts: dict[int, dict[str, Any]]) -> None:
    """A rank of a mesh of replicas x 2 x 4 x 2 is in four groups, and has five neighbours at most."""
    for size in SIZES:
        bound = store_operations(size, 4, 5)
        assert 0.8 * bound < starts[size]["total"]["operations"] <= bound


@pytest.mark.parametrize("what", ["operations", "bytes"])
def test_what_one_rank_asks_of_the_store_grows_with_the_logarithm(starts: dict[int, dict[str, Any]], what: str) -> None:
    for few, many in pairwise(SIZES):
        first, most = (max(rank[what] for rank in starts[size]["ranks"]) for size in (few, many))
        assert most / first <= math.log2(many) / math.log2(few)
        assert starts[many]["ranks"][0][what] / starts[few]["ranks"][0][what] <= math.log2(many) / math.log2(few)


def test_the_count_sees_a_full_mesh() -> None:
    """What the assertions are there for: each rank asks for each other's address."""
    few, many = (found["total"] for found in started(16, 32, TORCH_GLOO_LAZY_INIT="0").values())
    bound = 32 * 5 / (16 * 4)
    assert many["operations"] > 1.1 * bound * few["operations"]
    assert many["bytes"] > 1.4 * bound * few["bytes"]


def test_a_watch_asks_the_store_twice_a_look_whatever_the_ranks() -> None:
    asked: list[str] = []

    class Counted(Board):
        def __init__(self) -> None:
            self.root = Report(0, "n0", 1, 0.0, False, "step 1")

        def put(self, report: Report) -> None:
            asked.append("put")

        def read(self, ranks: Any) -> list[Report]:
            asked.append(f"read {len(ranks)}")
            return [self.root]

    watch = Watch(Counted(), Launch(7, 1200, 1, 6, "slurm"), "n1", 600.0)
    asked.clear()
    for _ in range(3):
        watch._look(5.0)
    assert asked == ["put", "read 1"] * 3


def test_open_files_of_1200_ranks() -> None:
    """Rank 0 has two connections of each rank; the others have some for each doubling, and their peers."""
    assert 2400 < open_files_needed(1200, keeps_store=True) < 2600
    assert open_files_needed(1200, keeps_store=False) - open_files_needed(600, keeps_store=False) < 10
    assert open_files_needed(1200, keeps_store=False) < 256
    assert open_files_needed(1200, keeps_store=False, peers=63) == open_files_needed(1200, keeps_store=False) + 63


def test_too_few_open_files_are_refused_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of 1024, as many systems have them: rank 0 of 1200 needs more, the others do not."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    check_open_files(Launch(1, 1200, 1, 6, "slurm"))
    check_open_files(Launch(0, 400, 0, 6, "slurm"))
    with pytest.raises(ConfigError, match=r"no more than 1024 files .* 2\d\d\d are needed on rank 0 of 1200; raise it"):
        check_open_files(Launch(0, 1200, 0, 6, "slurm"))


def test_the_agent_of_torchrun_keeps_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own limit counts, which its ranks cannot raise."""
    asked: list[int] = []

    def limits(process: int, kind: int) -> tuple[int, int]:
        asked.append(process)
        return 1024, 4096

    monkeypatch.setattr(resource, "prlimit", limits)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    check_open_files(Launch(0, 400, 0, 6, "torchrun"))
    check_open_files(Launch(6, 1200, 0, 6, "torchrun"))
    with pytest.raises(ConfigError, match=r"2\d{3} are needed by torchrun, which starts 1200 ranks; raise it"):
        check_open_files(Launch(0, 1200, 0, 6, "torchrun"))
    assert asked == [os.getppid()] * 2
