"""How maps are kept on the disk: the words, and what they cost. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

FORMATS = ("cog", "gtiff")
PROBABILITY_TYPES = ("float32", "uint8")

_CLASSIC_LIMIT = 4_000_000_000
"""Bytes above which a file is BigTIFF: classic TIFF has 32-bit offsets, and needs room for its directory."""

_OVERVIEWS = 4 / 3
"""Pixels of a raster and of all its overviews, of which each has a quarter of those before, by those of the raster."""

_WORST = {"deflate": 1.02, "zstd": 1.02, "lzw": 1.5, "none": 1.0}
"""A file of noise by its pixels' bytes: noise grows by compression (measured with lzw: 1.21)."""


COMPRESSIONS = tuple(_WORST)


@dataclass(frozen=True)
class Packing:
    """How a raster is kept. `average`: overviews hold means of pixels (shares), else what most pixels have."""

    format: str = "cog"
    compress: str = "deflate"
    average: bool = False

    @property
    def second_file(self) -> bool:
        """Whether the plain file, whose pixels any rank can put in place, is packed into another one."""
        return (self.format, self.compress) != ("gtiff", "none")

    def bytes(self, plain: int) -> int:
        """Of the disk, at worst, until the plain file of so many is let go: both files, and GDAL's overviews."""
        if not self.second_file:
            return plain
        while_made = self._overviews - 1  # GDAL's, in a file of their own
        return math.ceil(plain * (1 + _WORST[self.compress] * (self._overviews + while_made)))

    def is_big(self, plain: int) -> bool:
        """Whether a file of so many bytes of pixels has to be BigTIFF."""
        return plain * _WORST[self.compress] * self._overviews > _CLASSIC_LIMIT

    @property
    def _overviews(self) -> float:
        return _OVERVIEWS if self.format == "cog" else 1.0


PLAIN = Packing("gtiff", "none")
