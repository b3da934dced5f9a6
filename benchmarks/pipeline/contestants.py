"""Who takes part in the side-by-side run, and how each is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launching import mpirun, python

# The C library hands freed memory back to the system, which then has to fill pages with zeros again: it is told not to.
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
CHANNELS_LAST, CONTIGUOUS = "channels_last", "contiguous"
SERIAL = "serial"


@dataclass(frozen=True)
class Contestant:
    """A program that takes the workload's flags and prints its line.

    `ranks`: processes under mpirun, 0 for a plain one. `shares`: takes the balance that all share; otherwise it has one
    stage, or finds a balance itself. `path`: what PYTHONPATH must hold for it. `is_ours`: it must run.
    """

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 0
    shares: bool = False
    layout: str = CONTIGUOUS
    is_ours: bool = False
    path: str | None = None

    def command(self, flags: Sequence[str], balance: Sequence[int] | None, reference: Path) -> list[str]:
        """`reference`: the folder in which serial gradients are kept, a file for each layout."""
        module = f"benchmarks.pipeline.{self.program}"
        start = mpirun(self.ranks, module) if self.ranks else python(module)
        kept = ["--layout", self.layout, "--reference", str(reference / f"{self.layout}.safetensors")]
        shared = ["--balance", *map(str, balance)] if self.shares and balance else []
        return [*start, *flags, *kept, *shared, *self.arguments]

    def environment(self) -> dict[str, str]:
        if self.path is None:
            return {}
        return {"PYTHONPATH": os.pathsep.join(filter(None, (self.path, os.environ.get("PYTHONPATH"))))}


def one_process(layout: str) -> Contestant:
    words = layout.replace("_", " ")
    return Contestant(f"one process, {words}", SERIAL, layout=layout, is_ours=True)


def ours(name: str, stages: int, *arguments: str, shares: bool = False) -> Contestant:
    flags = ("--stages", str(stages), *arguments)
    return Contestant(f"tiledseg, {name}", "ours", flags, stages, shares, CHANNELS_LAST, is_ours=True)


def finder(stages: int) -> Contestant:
    """Ours with the automatic balance: its first job finds the one that all share."""
    return ours("1f1b, automatic balance", stages, "--schedule", "1f1b", "--measured")


def contestants(stages: int, torchgpipe: str | None) -> list[Contestant]:
    """One process, ours, torch's pipelining and torchgpipe, in the order in which they take turns."""
    return [
        one_process(CHANNELS_LAST),
        finder(stages),
        ours("1f1b", stages, "--schedule", "1f1b", shares=True),
        ours("gpipe", stages, "--schedule", "gpipe", shares=True),
        ours("folded, automatic balance", stages, "--schedule", "folded", "--measured"),
        _torch("1f1b", stages),
        _torch("gpipe", stages),
        one_process(CONTIGUOUS),
        _torchgpipe("as it is", torchgpipe),
        _torchgpipe("a thread a partition", torchgpipe, "--workers", "partition"),
        _torchgpipe(f"{stages} threads an operator", torchgpipe, "--threads", str(stages)),
    ]


def _torch(schedule: str, stages: int) -> Contestant:
    flags = ("--stages", str(stages), "--schedule", schedule)
    return Contestant(f"torch.distributed.pipelining, {schedule}", "peers.torch_pipelining", flags, stages, True)


def _torchgpipe(name: str, path: str | None, *arguments: str) -> Contestant:
    return Contestant(f"torchgpipe, {name}", "peers.torchgpipe_pipeline", arguments, shares=True, path=path)
