"""What a network asks of a tile, as a Python program sees it."""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint, minimum_halo, network_footprint


@dataclass(frozen=True)
class Halo:
    """What a network asks of a tile, in pixels along either dim.

    Core edges lie on multiples of `alignment`. `minimum`: the pixels around a core that its outputs depend on, and no
    fewer; `halo`: those that tiles get, to a legal size of the network's input. Both are the larger side's; `sides` and
    `minimum_sides` have (before, after). `footprint` is what cuts tiles. `asks_place`: the network must know where in
    the image a tile lies, as ours do, and a module that is called on tiles by themselves does not.
    """

    minimum_sides: tuple[int, int]
    footprint: Footprint
    asks_place: bool = False

    @staticmethod
    def of(graph: Graph) -> Halo:
        """Raises GeometryError where no exact tile exists."""
        asks = any(layer.asks_place for layer in graph.layers)
        return Halo(minimum_halo(graph), network_footprint(graph), asks)

    def __repr__(self) -> str:
        sides = f"minimum_sides={self.minimum_sides}, sides={self.sides}"
        return f"Halo(minimum={self.minimum}, halo={self.halo}, alignment={self.alignment}, {sides})"

    @property
    def minimum(self) -> int:
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
