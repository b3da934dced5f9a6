"""Any module as a graph, the one seam to `tracing`, and the halo that its tiles need."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint, minimum_halo, network_footprint
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.run.norms import measuring


@dataclass(frozen=True)
class Halo:
    """The halo that a network needs around a tile, in pixels along either dim.

    Core edges lie on multiples of `alignment`. `minimum`: the pixels around a core that its outputs depend on, and no
    fewer; `halo`: those that tiles get, to a legal size of the network's input. Both are the larger side's; `sides` and
    `minimum_sides` have (before, after). `footprint` is what cuts tiles. `asks_place`: the network must know where in
    the image a tile lies, as ours do, and a module that is called on tiles by themselves does not. `whole_image`: names
    of the nodes that take a mean, a maximum or statistics of the whole image in evaluation too, which no halo covers.
    """

    minimum_sides: tuple[int, int]
    footprint: Footprint
    asks_place: bool = False
    whole_image: tuple[str, ...] = ()

    @staticmethod
    def of(graph: Graph) -> Halo:
        """Return the halo of a graph. Raise GeometryError where no exact tile exists."""
        asks = any(layer.asks_place for layer in graph.layers)
        whole_image = tuple(node.name for node in measuring(graph, trains=False))
        return Halo(minimum_halo(graph), network_footprint(graph), asks, whole_image)

    def __repr__(self) -> str:
        sides = f"minimum_sides={self.minimum_sides}, sides={self.sides}"
        besides = f", whole_image={self.whole_image}" if self.whole_image else ""
        return f"Halo(minimum={self.minimum}, halo={self.halo}, alignment={self.alignment}, {sides}{besides})"

    @property
    def minimum(self) -> int:
        """Return the pixels around a core that its outputs depend on."""
        return max(self.minimum_sides)

    @property
    def halo(self) -> int:
        return max(self.sides)

    @property
    def sides(self) -> tuple[int, int]:
        return self.footprint.before, self.footprint.after

    @property
    def alignment(self) -> int:
        return self.footprint.alignment


def traced(module: nn.Module, bands: int | None = None) -> GraphNetwork:
    """Return the module as a network with the same weights; one of ours is that already.

    `bands`: None for those that its first convolution takes. Raises ConfigError that lists every place that is not
    exact.
    """
    if isinstance(module, GraphNetwork):
        return module
    if not isinstance(module, nn.Module):
        raise ConfigError(f"a {type(module).__name__} is no torch.nn.Module; give one, built")
    from tiledseg.tracing.trace import trace

    return trace(module, _bands_of(module) if bands is None else bands)


def _bands_of(module: nn.Module) -> int:
    first = next((each for each in module.modules() if isinstance(each, nn.Conv2d)), None)
    if first is None:
        raise ConfigError(f"{type(module).__name__} has no convolution that tells its bands; give bands=")
    return first.in_channels
