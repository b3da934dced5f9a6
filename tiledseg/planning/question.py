"""What is asked of the planner, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiledseg.architecture.network import Network
from tiledseg.architecture.unet import UNet
from tiledseg.config.checks import MOST, Range
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.units.quantities import MOST_BYTES
from tiledseg.units.widths import ACTIVATION_BYTES


@dataclass(frozen=True)
class Question:
    """A raster, a network and a cluster.

    `size` (height, width) in pixels; `grid` (rows, cols), None for auto; `stride` S of the paper's formula;
    `gpu_memory` in bytes, None where not known; `gpus` in all, None for as many as an image has tiles, and of a node,
    None for those of the machine; `mesh` (rows, cols) of ranks that share an image, None for one a tile; `machine`:
    what a rank is assumed to reach. `window`: side of random windows, None without. `memory_budget`: bytes that a step
    may take, tensors being rebuilt if need be; `recompute`: what is computed once more whatever the memory, as
    `memory.recompute` has it for nodes.
    """

    size: tuple[int, int]
    network: Network
    grid: tuple[int, int] | None = None
    stride: int = 1
    precision: str = "fp32"
    gpu_memory: int | None = None
    gpus_per_node: int | None = None
    images: int = 1
    gpus: int | None = None
    mesh: tuple[int, int] | None = None
    machine: Machine = field(default_factory=Machine)
    window: int | None = None
    memory_budget: int | None = None
    recompute: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "machine", self.machine.computing(self.precision))
        for flag, values in (
            ("--size", self.size),
            ("--grid", self.grid or ()),
            ("--stride", (self.stride,)),
            ("--gpus-per-node", () if self.gpus_per_node is None else (self.gpus_per_node,)),
            ("--images", (self.images,)),
            ("--gpus", () if self.gpus is None else (self.gpus,)),
            ("--mesh", self.mesh or ()),
            ("--window", () if self.window is None else (self.window,)),
        ):
            for value in values:
                Range(1, MOST).check(flag, value)
        if self.gpu_memory is not None:
            Range(1, MOST_BYTES).check("--gpu-memory", self.gpu_memory)
        if self.memory_budget is not None:
            Range(1, MOST_BYTES).check("--memory-budget", self.memory_budget)
        if self.memory_budget is not None and self.stride != 1:
            raise ConfigError(
                f"--memory-budget is given, but networks of --stride {self.stride} have no exact plan; leave it out"
            )
        if self.recompute != "auto" and (self.memory_budget is not None or self.stride != 1):
            budget = "--memory-budget is given, which chooses that"
            other = f"--stride is {self.stride}" if self.memory_budget is None else budget
            raise ConfigError(f"--recompute is {self.recompute}, but {other}; leave one of them out")
        if self.grid is None and self.gpu_memory is None:
            raise ConfigError(
                "--grid is auto, which fits tiles to a GPU; give --gpu-memory, 16GiB say, --machine, or a grid"
            )
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
    def node_gpus(self) -> int:
        """GPUs of a node: as given, else of the machine."""
        return self.gpus_per_node or self.machine.ranks_per_host

    @property
    def graph(self) -> Graph:
        """The network's, with what is computed once more."""
        graph = self.network.graph()
        named = self.recompute in ("compact", "all")
        return graph.with_memory(named_policy(graph, self.network.bands, self.recompute)) if named else graph

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
        network,
        (Extent(question.size),),
        ranks,
        memory,
        parallel,
        precision,
        grid=grid,
        machine=machine,
        recompute=question.recompute,
    )
