"""The question that `planning.run.plan` answers: a run's network, rasters, ranks, memory and settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tiledseg.architecture.network import ForeignNetwork, Network
from tiledseg.geometry.graph import USUAL_LOSS, Graph, LossBytes, one_of_equals
from tiledseg.geometry.halo import Footprint, round_up
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.geometry.tiling import Tiling, largest_window, make_tiling
from tiledseg.planning.run.blocks import BlockSettings
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.cost_model import Machine, Store
from tiledseg.units import ACTIVATION_BYTES, MOST_BYTES


class Extent(NamedTuple):
    """A raster to cut: its (height, width) in pixels. `grid`: the (rows, cols) of a tile store; None for a raster."""

    shape: tuple[int, int]
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class WindowSteps:
    """Steps of `per_step` windows of `side` x `side` pixels, drawn anywhere in the rasters. An `exact` window has the
    network's halo. Any other window is a small image of its own, with zeros beyond its edges."""

    side: int
    per_step: int
    exact: bool

    def tilings(self, rasters: Sequence[tuple[int, int]], footprint: Footprint) -> tuple[Tiling, ...]:
        """Return tilings of one tile each: the largest exact window of each raster, else every window of a step."""
        sizes = [(self.side, self.side)] * self.per_step
        if self.exact:
            sizes = [largest_window(raster, self.side, footprint) for raster in rasters]
        return tuple(make_tiling(size, (1, 1), footprint) for size in sizes)

    def parts(self, rasters: Sequence[tuple[int, int]], footprint: Footprint) -> int:
        """Return 1 where a norm sees a whole image in each window, else 2: a window is then a part of an image."""
        is_image = not self.exact or all(max(raster) <= round_up(self.side, footprint.alignment) for raster in rasters)
        return 1 if is_image else 2

    @property
    def in_words(self) -> str:
        """The windows as a line of the log."""
        kind = "with their halos" if self.exact else "as small images of their own: no halo, zeros beyond their edges"
        return f"windows of {self.side} px, {self.per_step} a step, {kind}"


@dataclass(frozen=True)
class RunQuestion:
    """A run before it is planned: its network, rasters, ranks, memory and settings.

    `rasters` are trained on or mapped, `held_out` ones validated on. `turned`: numbers of the rasters that are also
    shown transposed. `memory`: bytes that each of `ranks` may use. `budgeted`: the user has set these bytes, so a
    larger step is refused. `grid`, `halo` (pixels): None for auto. A step has `tiles_per_step` tiles, or all tiles of
    `images_per_step` images; a map is one step on one image. `windows`: drawn in place of the rasters' tiles.
    `tiles_per_batch`: tiles that run at once, or images where these go through the network together; None for one.
    `machine`: the speed of a rank, None where it is not known. `frozen`: nodes whose weights are not trained.
    `still_norms`: running statistics are constants in training too. `loss`: bytes beyond those of the usual loss.
    `recompute`: auto (as `memory` demands), none, or all. `blocks`: settings of blocks
    of a tile. `offload`: all kept tensors are offloaded. `store`: the place of tensors that `memory` does not hold.

    `images`: images of an epoch, for the command `plan`. In its questions 0 `ranks` mean one rank a tile, and 0
    `images_per_step` as many images as the ranks take at a tile each. An unknown `memory` is `MOST_BYTES`.
    """

    network: Network
    rasters: tuple[Extent, ...]
    ranks: int
    memory: int
    parallel: Parallelism = field(default_factory=Parallelism)
    precision: str = "fp32"
    held_out: tuple[Extent, ...] = ()
    grid: tuple[int, int] | None = None
    halo: int | None = None
    trains: bool = True
    tiles_per_step: int | None = None
    images_per_step: int = 1
    machine: Machine | None = None
    frozen: frozenset[str] = frozenset()
    still_norms: bool = False
    recompute: str = "auto"
    tiles_per_batch: int | None = None
    windows: WindowSteps | None = None
    blocks: BlockSettings | None = None
    offload: bool = False
    store: Store | None = None
    turned: tuple[int, ...] = ()
    budgeted: bool = False
    loss: LossBytes = USUAL_LOSS
    images: int = 1

    def __post_init__(self) -> None:
        if self.machine is not None:
            object.__setattr__(self, "machine", self.machine.computing(self.precision))

    @property
    def limit(self) -> int | None:
        """Bytes that a rank may use, None where they are not known."""
        return None if self.memory >= MOST_BYTES else self.memory

    @property
    def figures(self) -> Machine:
        """The machine's figures, assumed ones where no machine is known."""
        return self.machine or Machine()

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the largest raster."""
        return max((extent.shape for extent in self.rasters), key=math.prod)

    @property
    def validates_alone(self) -> bool:
        """True if validation has a spread of its own: training windows that are images do not cut the rasters."""
        return self.windows is not None and not self.windows.exact

    @property
    def items_per_step(self) -> int:
        """Tiles of a step if set, else images."""
        return max(self.images_per_step, self.tiles_per_step or 1)

    @cached_property
    def graph(self) -> Graph:
        """The network's graph with frozen nodes, loss, norms and recomputation as set."""
        graph = self.network.graph().with_frozen(self.frozen)
        graph = graph if graph.loss == self.loss else replace(graph, loss=self.loss)
        graph = graph.with_still_statistics() if self.still_norms else graph
        if self.recomputes:
            graph = replace(graph, memory=named_policy(graph, self.recompute))
        return one_of_equals(graph)

    @property
    def recomputes(self) -> bool:
        """True if the user has set what is recomputed."""
        return self.trains and self.recompute == "all"

    @property
    def keyed(self) -> bool:
        """True if keys of the configuration define the network, not its author's code."""
        return not isinstance(self.network, ForeignNetwork)

    @property
    def value_bytes(self) -> int:
        return ACTIVATION_BYTES[self.precision]

    @property
    def or_bf16(self) -> str:
        """The words for a narrower precision as a remedy; empty where values have 16 bits already."""
        return ", or train.precision bf16" if self.value_bytes > 2 else ""
