"""A rank that is stuck or stopped is named, with what every rank does, and the job ends; one that works on is left."""

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.comm.launching import Done, mpirun, needs_mpirun
from tiledseg.comm.doing import changes, current, doing, tick, waiting
from tiledseg.comm.launch import Launch
from tiledseg.comm.watch import Board, Report, SeenReport, Watch, verdict

JOB = str(Path(__file__).with_name("job.py"))
DEADLINE = 6.0
SUM = Report(0, "n0", 9, DEADLINE, True, "step 2, a sum over ranks")


def everyone(size: int, *others: Report) -> list[SeenReport]:
    """All ranks wait in a sum, but for `others`."""
    reports = {rank: SUM._replace(rank=rank) for rank in range(size)} | {one.rank: one for one in others}
    return [SeenReport(report, 0.0) for report in reports.values()]


def test_words_of_a_rank() -> None:
    before = changes()
    assert current() == ("its own work", False)
    with doing("step %d", 3), doing("tile %d", 7):
        assert current() == ("step 3, tile 7", False)
        with waiting("a sum"):
            assert current() == ("step 3, tile 7, a sum", True)
        tick()
    assert changes() == before + 7


STUCK = Report(2, "n1", 9, DEADLINE, False, "step 2, reading tile 5")
SUMMED = "waiting in: step 2, a sum over ranks"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (everyone(4, STUCK), f"rank 2 on n1 stuck in: step 2, reading tile 5; ranks 0-1, 3 {SUMMED}. "),
        (
            [*everyone(4)[:2], SeenReport(STUCK._replace(age=0.0), 0.5 * DEADLINE)],
            f"rank 2 on n1 not answering, last in: step 2, reading tile 5; ranks 0-1 {SUMMED}. ",
        ),
        (everyone(4, Report(0, "n0", 9, 0.5 * DEADLINE, False, "validation")), None),
        (
            everyone(4, SUM._replace(rank=3, words="a barrier")),
            f"every rank waits for another; ranks 0-2 {SUMMED}; rank 3 on n0 waiting in: a barrier. ",
        ),
    ],
    ids=["stuck", "silent", "one works on", "all wait"],
)
def test_the_ranks_that_hold_up_a_job_are_named_first(seen: list[SeenReport], words: str | None) -> None:
    line = verdict(seen, DEADLINE)
    if words is None:
        assert line is None
    else:
        assert line is not None
        assert line.startswith(f"no rank has made progress for 6 s: {words}")


def test_the_line_stays_short_on_many_ranks() -> None:
    seen = [SeenReport(SUM._replace(rank=r, words=f"step 2, messages with rank {r + 1}"), 0.0) for r in range(1200)]
    line = verdict(seen, DEADLINE)
    assert line is not None
    assert len(line) < 1000
    assert "1195 more groups" in line


def test_a_watch_asks_the_store_twice_a_look_and_counts_how_long_a_report_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the number of ranks."""
    asked: list[str] = []
    root = SUM

    class Counted(Board):
        def __init__(self, *_: object) -> None:
            """No store."""

        def put(self, report: Report) -> None:
            asked.append("put")

        def read(self, ranks: Sequence[int]) -> list[Report]:
            asked.append(f"read {len(ranks)}")
            return [root]

    monkeypatch.setattr("tiledseg.comm.watch.Board", Counted)
    watch = Watch(dist.HashStore(), Launch(7, 1200, 1, 6, "slurm"), {}, 600.0)
    asked.clear()
    for beat in (9, 9, 10):
        root = SUM._replace(beat=beat)
        watch._look(5.0)
    assert asked == ["put", "read 1"] * 3
    assert [watch._observe(0, report, 2.0).unchanged for report in (root, root, None)] == [2.0, 4.0, 6.0]
    assert watch._observe(1, None, 2.0).unchanged == 2.0


def check_end(done: Done, words: str) -> None:
    assert done.code == 1, done.err
    assert len(done.errors) == 1, done.err
    assert re.search(words, done.errors[0]), done.errors[0]
    assert "Traceback" not in done.err
    seconds = done.ended - float(re.findall(r"failing at ([\d.]+)", done.out)[0])
    assert seconds < DEADLINE + 60


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "transport", "words"),
    [
        ("turn", "gloo", r"6 s: rank 2 on \S+ stuck in: step 2, counting sheep; ranks 0-1 waiting in: step 2, a sum"),
        ("stop root", "mpi", r"6 s: rank 0 on \S+ not answering, last in: step 2, counting sheep; .*[12]"),
    ],
    ids=["turning_gloo", "root_stopped_mpi"],
)
def test_a_job_that_stands_still_ends(way: str, transport: str, words: str) -> None:
    check_end(mpirun(3, JOB, way, "--transport", transport, "--deadline", f"{DEADLINE:g}", seconds=120), words)


@needs_mpirun
@pytest.mark.slow
def test_a_long_piece_of_work_that_ticks_is_left_alone() -> None:
    """Ten seconds of one rank, while the others wait, under a deadline of six."""
    done = mpirun(2, JOB, "busy", "--deadline", f"{DEADLINE:g}", seconds=120)
    assert (done.code, done.errors) == (0, [])
    assert "done" in done.out


def test_rank_0_keeps_the_store_until_all_have_looked_for_the_last_time() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    watches = [Watch(store, Launch(rank, 2, rank, 2, "torchrun"), {}, DEADLINE) for rank in range(2)]
    last = threading.Thread(target=watches[0].stop)
    last.start()
    last.join(0.3)
    assert last.is_alive()
    watches[1].stop()
    last.join(10)
    assert not last.is_alive()


def test_who_meets_a_lost_peer_names_it() -> None:
    """One that asks reads all reports, the others read what it found: no traffic that grows with the ranks squared."""
    for stopped, words in (((), ""), ((1, 2), r"ranks 1-2 not answering, last in: .+")):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
        watches = [Watch(store, Launch(rank, 4, rank, 4, "torchrun"), {}, DEADLINE) for rank in range(4)]
        for rank, watch in enumerate(watches):
            if rank not in stopped:
                watch.start()
        with ThreadPoolExecutor(2) as asking:
            answers = list(asking.map(lambda watch: watch.lost(0.0), (watches[0], watches[3])))
        assert all(re.fullmatch(words, answer) for answer in answers), answers
        for watch in reversed(watches):  # rank 0's waits for the others
            watch.stop()
