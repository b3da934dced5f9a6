"""What a run is to do, and on what: the question that `planning.run.plan` answers."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from tiledseg.architecture.foreign import ForeignNetwork
from tiledseg.architecture.network import Network
from tiledseg.geometry.graph import Graph, one_of_equals
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.geometry.memory_words import USUAL_LOSS, LossBytes
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.run.memory.blocks import BlocksAsked
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.windows import Windows
from tiledseg.records import dataclass
from tiledseg.units.widths import ACTIVATION_BYTES

if TYPE_CHECKING:
    from tiledseg.planning.memory.store import Store


class Extent(NamedTuple):
    """A raster to cut: its (height, width) in pixels, and, of a tile store, the grid that it was cut by."""

    shape: tuple[int, int]
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class RunQuestion:
    """What a run is to do, and on what.

    `rasters` are trained on or mapped, `held_out` ones validated on; `memory`: bytes that each of `ranks` may use.
    `grid` and `halo` (pixels) as asked for, None for auto. A step has `tiles_per_step` tiles, or all tiles of
    `images_per_step` images; a map is one step on one image. `machine`: what a rank reaches, None where nobody knows.
    `frozen`: the nodes whose weights are not trained; `still_norms`: running statistics are constants in training too.
    `recompute`: what is computed once more in place of keeping it: auto (what `memory` demands), none, compact (what is
    nearly free), or all.
    `tiles_per_batch`: tiles of one shape that run at once (or images, where a norm over a step has all of these go
    together), None for one, in fp64 as many as fit and pay: batches of at most `batch_pixels` pixels do, which only a
    device can tell.
    `windows`: what is trained on in place of the rasters' tiles; as so many tiles a step where they are exact, else as
    images. `loss`: what it needs beyond the network's usual one. `blocks`: tiles are computed in blocks, one after the
    other. `offload`: what autograd keeps leaves memory; `store`: where tensors may leave for as `memory` demands.
    `turned`: the rasters that are also shown with rows for columns. `budgeted`: the user has said what `memory` may be:
    a step that does not fit is refused.
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
    batch_pixels: int = 0
    windows: Windows | None = None
    blocks: BlocksAsked | None = None
    offload: bool = False
    store: Store | None = None
    turned: tuple[int, ...] = ()
    budgeted: bool = False
    loss: LossBytes = USUAL_LOSS

    def __post_init__(self) -> None:
        if self.machine is not None:
            object.__setattr__(self, "machine", self.machine.computing(self.precision))

    @property
    def validates_alone(self) -> bool:
        """Whether validation is spread by itself: windows that are images say nothing of how rasters are to be."""
        return self.windows is not None and not self.windows.exact

    @property
    def at_once(self) -> int:
        """Images, or tiles where a step has so many, that a step may take."""
        return max(self.images_per_step, self.tiles_per_step or 1)

    @property
    def graph(self) -> Graph:
        graph = self.network.graph().with_frozen(self.frozen).with_loss(self.loss)
        graph = graph.with_still_statistics() if self.still_norms else graph
        if self.recomputes:
            graph = graph.with_memory(named_policy(graph, self.network.bands, self.recompute))
        return one_of_equals(graph)

    @property
    def recomputes(self) -> bool:
        """Whether the user has said what is computed once more."""
        return self.trains and self.recompute in ("compact", "all")

    @property
    def keyed(self) -> bool:
        """Whether keys of the configuration say what the network consists of, and not its author's code."""
        return not isinstance(self.network, ForeignNetwork)

    @property
    def value_bytes(self) -> int:
        return ACTIVATION_BYTES[self.precision]

    @property
    def waits_for_times(self) -> bool:
        """Whether the balance is to follow from times that are measured: see `balanced`."""
        return self.trains and self.parallel.stages > 1 and self.parallel.timed

    @property
    def is_profiled(self) -> bool:
        """Whether more is known of the machine than three figures."""
        return self.machine is not None and self.machine.profile is not None

    @property
    def has_seconds(self) -> bool:
        """Whether the time of a step can be said: on a known machine, of whole images, without stages."""
        whole = self.trains and self.tiles_per_step is None
        return whole and self.parallel.stages == 1 and self.machine is not None
