"""Formats of maps on the disk: their words and sizes. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tiledseg.errors import ConfigError

COG, GTIFF, ZARR = FORMATS = ("cog", "gtiff", "zarr")
VIEWS = NO_VIEWS, REFLECTIONS, TURNS = ("none", "reflections", "turns")
"""The raster alone; it and its three reflections; these and their transposes, which are all quarter turns too."""

BLENDS, ENDS = ("gaussian", "cosine", "mean", "centre"), ("inside", "mirrored")
"""Ways to blend the crops of a map, and what lies beyond its image (`geometry.layers.declared.CropGrid`)."""

BLOCK = 512
"""Side of a block, pixels."""

_WORST = 1.02
"""A compressed file of noise, by its pixels' bytes."""

AUTO = "auto"
COMPRESSIONS = (AUTO, "deflate", "zstd", "none")


def _blocks(height: int, width: int) -> int:
    return -(-height // BLOCK) * -(-width // BLOCK)


@dataclass(frozen=True)
class Packing:
    """Format and compression of a raster. `compress` auto: deflate, which every program reads; `gtiff` is never
    compressed. `average`: overviews hold means of pixels, as shares need; others hold the most frequent value."""

    format: str = "cog"
    compress: str = AUTO
    average: bool = False

    def __post_init__(self) -> None:
        if self.format == GTIFF and self.compress not in (AUTO, "none"):
            raise ConfigError(f"--compress is {self.compress}, but --format gtiff is not compressed; use --format cog")

    def of_shares(self) -> Packing:
        """Return the packing of class probabilities. auto leaves float32 as it is, since its last bits are noise."""
        return replace(self, average=True, compress="none" if self.compress == AUTO else self.compress)

    @property
    def codec(self) -> str:
        """Return GDAL's name of the compression."""
        return "deflate" if self.compress == AUTO else self.compress

    @property
    def second_file(self) -> bool:
        """Return True if the plain file, whose pixels any rank can put in place, is packed into another one."""
        return self.format != GTIFF

    def bytes(self, height: int, width: int, pixel: int) -> int:
        """Return the most bytes of the disk: the plain file, the packed one, and GDAL's uncompressed overviews.
        `pixel`: bytes of a pixel with all bands."""
        plain, overviews = _blocks(height, width), 0
        while max(height, width) > BLOCK and self.format == "cog":  # each overview halves the one before
            height, width = -(-height // 2), -(-width // 2)
            overviews += _blocks(height, width)
        packed = _WORST * (plain + overviews) + overviews if self.second_file else 0
        return math.ceil((plain + packed) * BLOCK * BLOCK * pixel)


PLAIN = Packing(GTIFF)
