"""Which tile of which image."""

from __future__ import annotations

from typing import NamedTuple


class TileReference(NamedTuple):
    """Tile `tile` of image `image`, both counted from 0."""

    image: int
    tile: int

    @property
    def draw(self) -> None:
        """None: the tile as it lies on the disk."""
