"""Contestants as jobs of their own, which train an epoch when they are told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.launching import python_ranks
from benchmarks.training.job import END, Job, together
from tiledseg.scene import main as scene

Scene = tuple[str, str, int]  # image, labels and pixels a side, as a Job takes them
TOUCHING = 3  # epochs of a job in which memory is touched for the first time: they do not count
TOLERANCE = 1e-4  # of the loss, relative: torch sums that of the plain loop in float32


@contextmanager
def drawn_scene(side: int) -> Iterator[Scene]:
    """Of `side` x `side` pixels, there meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        image, labels = str(Path(folder) / "image.tif"), str(Path(folder) / "labels.tif")
        scene(["--size", str(side), str(side), "--seed", "1", "--image", image, "--labels", labels])
        yield image, labels, side


def started(job: Job) -> subprocess.Popen[str]:
    """Of its ranks, once it is ready: mpirun drops what it is told before."""
    start = python_ranks(job.ranks) if job.ranks > 1 else [sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    command = [*start, "-m", job.module, job.to_json()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    _said(process)
    return process


def epoch_of(*processes: subprocess.Popen[str]) -> dict[str, float]:
    """What one epoch has taken, and its loss; of several at once, an epoch each (`together`)."""
    for process in processes:
        _tell(process, "epoch")
    return together([json.loads(_said(process)) for process in processes])


def end(process: subprocess.Popen[str]) -> None:
    _tell(process, END.strip())


def worst_difference(epochs: Iterable[Mapping[str, float]]) -> float:
    """Of two losses, relative."""
    losses = [epoch["loss"] for epoch in epochs]
    return (max(losses) - min(losses)) / abs(min(losses))


def _tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a contestant ended with code {process.wait(10)}")
    return line
