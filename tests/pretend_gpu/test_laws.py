"""Communicating tests on ranks with a pretend GPU each, over the tests' NCCL and over MPI.

No test has a race, and no rank touches another one's GPU. And the tests of one rank that are marked `cuda`.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import NIGHTLY
from tests.pretend_gpu.harness import PretendGpu

RUNS = "tests/law/test_runs.py"
FOLDERS = ("tests/law", "tests/spatial", "tests/pipeline", "tests/comm", "tests/execution")


@dataclass(frozen=True)
class Session:
    ranks: int
    transport: str
    tests: tuple[str, ...]
    alone: bool = False  # each rank sees one GPU, its own

    def __str__(self) -> str:
        return f"{self.ranks}-{self.transport}{'-one-visible' if self.alone else ''}"


SESSIONS = [
    Session(2, "nccl", ("-k", "that_of_one_rank and (exchange or folded or windows)", RUNS), alone=True),
    Session(2, "mpi", ("-k", "that_of_one_rank and exchange", RUNS)),
]
if NIGHTLY:
    SESSIONS += [Session(ranks, "nccl", (folder,)) for ranks in (2, 4) for folder in FOLDERS]


@pytest.mark.timeout(3000 if NIGHTLY else 300)
@pytest.mark.parametrize("session", SESSIONS, ids=str)
def test_laws_hold_without_races(session: Session, pretend_gpu: PretendGpu) -> None:
    options = {"PRETEND_GPU_TRANSPORT": session.transport, **({"PRETEND_GPU_ALONE": "1"} if session.alone else {})}
    ran = pretend_gpu.run(
        ["-m", "pytest", "--only-mpi", "-m", "mpi", "-q", "--color=no", "-p", "no:cacheprovider", *session.tests],
        ranks=session.ranks,
        devices=1 if session.alone else session.ranks,
        timeout=2900 if NIGHTLY else 280,
        **options,
    ).sound()
    own = [["0"]] * session.ranks if session.alone else [[str(number)] for number in range(session.ranks)]
    assert sorted(list(report["contexts"]) for report in ran.reports) == own, "a GPU a rank, by the launcher's order"
    assert all(report["launches"] > 0 for report in ran.reports)


FILES = ("tests/pipeline/test_devices.py", "tests/law/test_devices.py", "tests/memory/test_host_on_gpu.py")
# Hundreds of MiB.
TOO_LARGE = "a_loop_ends or allocators_peak"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file).stem)
def test_tests_of_a_gpu(file: str, pretend_gpu: PretendGpu) -> None:
    words = ["-q", "--color=no", "-x", "-p", "no:cacheprovider", "-m", "cuda", "-k", f"not ({TOO_LARGE})"]
    ran = pretend_gpu.run(["-m", "pytest", *words, file], timeout=380).sound()
    assert "skipped" not in ran.out.splitlines()[-1]
