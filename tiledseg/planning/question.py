"""The question of `tiledseg plan`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tiledseg.architecture.network import Network
from tiledseg.architecture.unet import UNet
from tiledseg.config.checks import MOST, Range
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.units import ACTIVATION_BYTES, MOST_BYTES

Shape = tuple[int, int]


@dataclass(frozen=True)
class Question:
    """A raster, a network and a cluster.

    `size`: (height, width) in pixels. `grid`: (rows, cols), None for auto. `stride`: S of the paper's formula.
    `gpu_memory`: in bytes, None where not known. `gpus`: in all, None for as many as an image has tiles.
    `gpus_per_node`: None for those of the machine. `mesh`: (rows, cols) of ranks that share an image, None for one a
    tile. `machine`: the speed of a rank. `window`: side of random windows, None without. `memory_budget`: bytes that a
    step may take, tensors being recomputed if need be. `recompute`: as `memory.recompute` for nodes, whatever the
    memory.
    """

    size: Shape
    network: Network
    grid: Shape | None = None
    stride: int = 1
    precision: str = "fp32"
    gpu_memory: int | None = None
    gpus_per_node: int | None = None
    images: int = 1
    gpus: int | None = None
    mesh: Shape | None = None
    machine: Machine = field(default_factory=Machine)
    window: int | None = None
    memory_budget: int | None = None
    recompute: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "machine", self.machine.computing(self.precision))
        counts = "size", "grid", "stride", "gpus_per_node", "images", "gpus", "mesh", "window"
        for name in (*counts, "gpu_memory", "memory_budget"):
            value, most = getattr(self, name), MOST if name in counts else MOST_BYTES
            for number in () if value is None else value if isinstance(value, tuple) else (value,):
                Range(1, most).check(f"--{name.replace('_', '-')}", number)
        recompute = None if self.recompute == "auto" else self.recompute
        if self.stride != 1 and not isinstance(self.network, UNet):
            raise ConfigError(
                f"--stride is {self.stride}, the paper's formula for its U-Nets, but the network is another one; leave "
                "one of --stride and --model out"
            )
        mesh, grid = self.mesh and f"{self.mesh[0]} x {self.mesh[1]}", "auto" if self.grid is None else None
        exact = {"--memory-budget": self.memory_budget, "--recompute": recompute, "--grid": grid, "--mesh": mesh}
        check_exact(self.stride, exact | {"--window": self.window})
        if recompute and self.memory_budget is not None:
            raise ConfigError(
                f"--recompute is {recompute}, but --memory-budget is given, which chooses that; leave one of them out"
            )
        if self.grid is None and self.gpu_memory is None:
            raise ConfigError(
                "--grid is auto, which fits tiles to a GPU; give --gpu-memory, 16GiB say, --machine, or a grid"
            )
        if self.window is not None and self.window > min(self.size):
            raise ConfigError(f"--window is {self.window}, but the raster has {min(self.size)} px along one side")

    @property
    def node_gpus(self) -> int:
        """GPUs of a node: as set, else of the machine."""
        return self.gpus_per_node or self.machine.ranks_per_host

    @property
    def graph(self) -> Graph:
        """The network's graph, with what is recomputed."""
        return self.run(Parallelism(), 1).graph

    @property
    def bytes_per_value(self) -> int:
        return ACTIVATION_BYTES[self.precision]

    def run(self, parallel: Parallelism, ranks: int, grid: Shape | None = None, images: int = 1) -> RunQuestion:
        """Return the training run of a step of so many images; memory that is not known is no limit."""
        memory, rasters = MOST_BYTES if self.gpu_memory is None else self.gpu_memory, (Extent(self.size),)
        question = RunQuestion(self.network, rasters, ranks, memory, parallel, self.precision, grid=grid)
        return replace(question, images_per_step=images, machine=self.machine, recompute=self.recompute)


def check_exact(stride: int, flags: Mapping[str, object]) -> None:
    """Raise ConfigError for the first of `flags` that is given, where the stride is another than 1."""
    for flag, value in flags.items():
        if value is not None and stride != 1:
            raise ConfigError(f"{flag} is {value}, but networks of --stride {stride} have no exact plan; leave it out")
