"""What is measured: training steps of one network on one image, in some halo modes, over some ranks. Standard library
and geometry only, so the driver stays free of torch and MPI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError, TiledsegError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.decomposition import decompose
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.planning.walk.cost_model import Machine
from tiledseg.planning.walk.mode_cost import Task, mode_cost

BANDS, CLASSES = 4, 5
VALUE_BYTES = 4  # all of it is float32


@dataclass(frozen=True)
class StepCase:
    """A halo mode. `fusion` and `overlap` are those of mode `layer`."""

    halo: str
    fusion: int = 1
    overlap: bool = False

    def __str__(self) -> str:
        words = [self.halo]
        if self.fusion != 1:
            words.append(f"fusion {'whole' if self.fusion >= WHOLE else self.fusion}")
        if self.overlap:
            words.append("overlap")
        return ", ".join(words)


READ, EXCHANGE, LAYER = StepCase("read"), StepCase("exchange"), StepCase("layer")
FUSED, OVERLAPPED = StepCase("layer", 2), StepCase("layer", overlap=True)


@dataclass(frozen=True)
class StepJob:
    """One job: its ranks as rows x cols of one image of size x size pixels, each with a tile; its cases, taken in turn
    step by step; `steps` timed ones of each, after one to warm up."""

    mesh: tuple[int, int]
    cases: tuple[StepCase, ...]
    size: int
    levels: int
    base_channels: int
    steps: int
    transport: str = "auto"

    def __post_init__(self) -> None:
        alignment = network_footprint(self.network.graph()).alignment
        if self.size < 1 or self.size % alignment:
            raise ConfigError(
                f"--size is {self.size}, no multiple of {alignment}; give one, so that nothing is mirrored"
            )
        if self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}; give at least 1")

    @property
    def ranks(self) -> int:
        return self.mesh[0] * self.mesh[1]

    @property
    def network(self) -> UNet:
        return UNet(self.levels, base_channels=self.base_channels, bands=BANDS, classes=CLASSES)

    @property
    def tiling(self) -> Tiling:
        """A tile a rank."""
        return make_tiling((self.size, self.size), self.mesh, network_footprint(self.network.graph()))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> StepJob:
        fields = json.loads(text)
        fields["cases"] = tuple(StepCase(**case) for case in fields["cases"])
        fields["mesh"] = tuple(fields["mesh"])
        return StepJob(**fields)


def mesh_of(ranks: int) -> tuple[int, int]:
    """The ranks as the squarest rows x cols, no fewer rows than columns (rows travel in one piece): 2 x 1, 2 x 2."""
    cols = max(n for n in range(1, int(ranks**0.5) + 1) if ranks % n == 0)
    return ranks // cols, cols


def planned(job: StepJob, case: StepCase) -> tuple[float, int, int]:
    """(E, halo bytes, halo messages) that the planner gives for a step: multiply-adds over those of the undivided
    network, and what all ranks send. Messages and bytes of mode read are 0."""
    task = Task(job.network.graph(), BANDS, decompose(job.tiling, job.mesh), VALUE_BYTES)
    cost = mode_cost(task, Machine(), case.halo, case.fusion)
    return cost.work / task.undivided_work, cost.traffic.step.bytes, cost.traffic.step.messages


def check_losses(losses: Sequence[Sequence[float]], names: Sequence[str], bound: float = 1e-5) -> float:
    """The largest relative difference of any loss from the first case's at the same step.

    Raises TiledsegError where it is above `bound`: the times of different results mean nothing.
    """
    worst, name = 0.0, names[0]
    for other, found in zip(names[1:], losses[1:], strict=True):
        for a, b in zip(losses[0], found, strict=True):
            difference = abs(b - a) / abs(a)
            if not difference <= worst:
                worst, name = difference, other
    if not worst <= bound:
        raise TiledsegError(
            f"the loss of '{name}' differs from that of '{names[0]}' by {worst:.1e} relative, not {bound:g}"
        )
    return worst
