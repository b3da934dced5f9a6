"""What a cluster does with the tiles: GPUs and nodes an image, rounds and idle ranks an epoch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """`images` images of `tiles` tiles each, one tile a rank and round, on `ranks` ranks.

    A round is a tile for every rank; the last one may leave ranks idle.
    """

    images: int
    tiles: int
    ranks: int

    @property
    def all_tiles(self) -> int:
        return self.images * self.tiles

    @property
    def rounds(self) -> int:
        return -(-self.all_tiles // self.ranks)

    @property
    def idle(self) -> int:
        """Ranks without a tile in the last round."""
        return self.rounds * self.ranks - self.all_tiles

    @property
    def utilisation(self) -> float:
        """Share of the rank-rounds that compute a tile."""
        return self.all_tiles / (self.rounds * self.ranks)


def nodes_per_image(tiles: int, gpus_per_node: int) -> float:
    """Nodes that hold one image with a tile on each GPU; not rounded up, as images share nodes."""
    return tiles / gpus_per_node


def ranks_per_image(ranks: int, images: int) -> int:
    """Tiles that an image must have at least, so that `images` images give every rank one."""
    return -(-ranks // images)
