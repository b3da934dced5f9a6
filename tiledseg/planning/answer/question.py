"""What is asked of the planner, checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from tiledseg.architecture.network import Network
from tiledseg.architecture.unet import UNet
from tiledseg.config_checks import MOST, Range
from tiledseg.errors import ConfigError
from tiledseg.planning.machine import Machine
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import Extent, RunQuestion
from tiledseg.widths import ACTIVATION_BYTES

MOST_BYTES = 2**63 - 1
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)} | {"KB": 1000}


@dataclass(frozen=True)
class Question:
    """A raster, a network and a cluster.

    `size` (height, width) in pixels; `grid` (rows, cols), None for auto; `stride` S of the paper's formula;
    `gpu_memory` in bytes, None where not given; `gpus` in all, None for as many as an image has tiles. `mesh` (rows,
    cols) of ranks that share an image, None for one a tile; `machine`: what a rank is assumed to reach. `window`: side
    of random windows, None without.
    """

    size: tuple[int, int]
    network: Network
    grid: tuple[int, int] | None = None
    stride: int = 1
    precision: str = "fp32"
    gpu_memory: int | None = None
    gpus_per_node: int = 6
    images: int = 1
    gpus: int | None = None
    mesh: tuple[int, int] | None = None
    machine: Machine = field(default_factory=Machine)
    window: int | None = None

    def __post_init__(self) -> None:
        for flag, values in (
            ("--size", self.size),
            ("--grid", self.grid or ()),
            ("--stride", (self.stride,)),
            ("--gpus-per-node", (self.gpus_per_node,)),
            ("--images", (self.images,)),
            ("--gpus", () if self.gpus is None else (self.gpus,)),
            ("--mesh", self.mesh or ()),
            ("--window", () if self.window is None else (self.window,)),
        ):
            for value in values:
                Range(1, MOST).check(flag, value)
        if self.gpu_memory is not None:
            Range(1, MOST_BYTES).check("--gpu-memory", self.gpu_memory)
        if self.grid is None and self.gpu_memory is None:
            raise ConfigError("--grid is auto, which fits tiles to a GPU; give --gpu-memory, 16GiB say, or a grid")
        if self.grid is None and self.stride != 1:
            raise ConfigError(f"--grid is auto, but networks of --stride {self.stride} have no exact plan; give a grid")
        if self.stride != 1 and not isinstance(self.network, UNet):
            raise ConfigError(
                f"--stride is {self.stride}, the paper's formula for its U-Nets, but the network is another one; leave "
                "one of --stride and --model out"
            )
        if self.mesh is not None and self.stride != 1:
            raise ConfigError(
                f"--mesh is given, but networks of --stride {self.stride} have no exact plan; leave it out"
            )

        if self.window is not None and self.window > min(self.size):
            raise ConfigError(f"--window is {self.window}, but the raster has {min(self.size)} px along one side")
        if self.window is not None and self.stride != 1:
            raise ConfigError(
                f"--window is {self.window}, but networks of --stride {self.stride} have no exact plan; leave it out"
            )

    @property
    def bytes_per_value(self) -> int:
        return ACTIVATION_BYTES[self.precision]


def run_question(
    question: Question, parallel: Parallelism, ranks: int, grid: tuple[int, int] | None = None
) -> RunQuestion:
    """The training run, a step an image, that is asked about; memory that is not given is no limit."""
    memory = MOST_BYTES if question.gpu_memory is None else question.gpu_memory
    network, precision, machine = question.network, question.precision, question.machine
    return RunQuestion(
        network, (Extent(question.size),), ranks, memory, parallel, precision, grid=grid, machine=machine
    )


def parse_bytes(text: str) -> int:
    """Bytes of '16GiB', '16 GB', '512MiB', '1.5TiB' or a plain number. Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*", text)
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"memory '{text}' is no number of bytes; give 16GiB, 16GB, 512MiB or a plain number")
    size = float(match[1]) * _UNITS[match[2]]
    return int(size) if math.isfinite(size) else MOST_BYTES + 1
