"""Ranks on several hosts: the losses are those of one rank, and a host that is cut off is named in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from tests.comm.launching import MPIRUN, Done
from tests.conftest import NIGHTLY
from tests.crash.runs import Material, check_close, train
from tests.hosts.jobs import by_hand, by_mpirun, by_torchrun, end_of
from tests.hosts.namespaces import hosts, why_no_hosts

REASON = why_no_hosts()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be made: {REASON}"),
    pytest.mark.usefixtures("without_plots"),
]
nightly = pytest.mark.skipif(not NIGHTLY, reason="TILEDSEG_NIGHTLY is not set")

IMAGES = ("--train.tiles_per_step", "null")
MODES = {
    "read": (),
    "exchange": (*IMAGES, "--parallel.halo", "exchange"),
    "layer": (*IMAGES, "--parallel.halo", "layer"),
}
SHORT = ("--train.epochs", "2")
DEADLINE = 6.0
SECONDS_TO_LEAVE = 6.0
"""From the deadline to the end of the last rank: the watch's graces, and room for a busy machine."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.make(tmp_path_factory.mktemp("hosts"))


def command(material: Material, folder: Path, *options: str) -> list[str]:
    first, *rest = material.train_command(folder)
    return [f"tiledseg.{first}", *rest, *options]


def check_run(material: Material, name: str, mode: str, start: Callable[[list[str]], list[Popen[str]]]) -> None:
    alone, folder = material.root / f"{name}-alone", material.root / name
    assert train(material, alone, *MODES[mode], *SHORT) == 0
    ends = end_of(start(command(material, folder, *MODES[mode], *SHORT)), 100)
    assert [done.code for done in ends] == [0] * len(ends), [done.err for done in ends]
    check_close(folder, alone)


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun here")
def test_losses_under_mpirun_are_those_of_one_rank(material: Material) -> None:
    with hosts(2) as nodes:
        check_run(material, "mpirun", "layer", lambda words: by_mpirun(nodes, words, material.root / "agent"))


@nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_under_torchrun_are_those_of_one_rank(material: Material, ranks: int) -> None:
    with hosts(2) as nodes:
        check_run(material, f"torchrun-{ranks}", "layer", lambda words: by_torchrun(nodes, words, ranks))


@nightly
@pytest.mark.parametrize("mode", MODES)
def test_losses_on_four_hosts_are_those_of_one_rank(material: Material, mode: str) -> None:
    with hosts(4) as nodes:
        check_run(material, f"four-{mode}", mode, lambda words: by_hand(nodes, words))


@nightly
@pytest.mark.parametrize("cut", [1, 0])
def test_a_host_that_is_cut_off_is_named_in_time(material: Material, cut: int) -> None:
    """Each side names the other, and no rank is left."""
    folder = material.root / f"cut-{cut}"
    words = command(material, folder, *MODES["layer"], "--train.epochs", "100000", "--parallel.deadline", f"{DEADLINE}")
    moment: list[float] = []

    def cut_off() -> None:
        await_steps(folder, 3)
        nodes[cut].pull_cable()
        moment.append(time.time())

    with hosts(2) as nodes:
        ends = end_of(by_hand(nodes, words), 60, cut_off)
    for rank, done in enumerate(ends):
        assert done.code == 1, done.err
        print(f"rank {rank} left {done.ended - moment[0]:.1f} s after the cut")
        assert done.ended - moment[0] < DEADLINE + SECONDS_TO_LEAVE
        check_named(done, 1 - rank)


def check_named(done: Done, lost: int) -> None:
    assert len(done.errors) == 1, done.err
    assert f"no rank has made progress for {DEADLINE:g} s: rank {lost} on node{lost} not answering" in done.errors[0]


def await_steps(folder: Path, number: int, seconds: float = 40) -> None:
    """Returns once `number` steps are in the run's log."""
    end, log = time.monotonic() + seconds, folder / "metrics.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < number:
        assert time.monotonic() < end, f"no {number} steps within {seconds:g} s"
        time.sleep(0.05)
