"""How maps are kept on the disk: the words, and what they cost. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tiledseg.errors import ConfigError

FORMATS = ("cog", "gtiff")
PROBABILITY_TYPES = ("float32", "uint8")

BLOCK = 512
"""Side of a block, pixels."""

_CLASSIC_LIMIT = 4_000_000_000
"""Bytes above which a file is BigTIFF: classic TIFF has 32-bit offsets, and needs room for its directory."""

_WORST = {"deflate": 1.02, "zstd": 1.02, "lzw": 1.5, "none": 1.0}
"""A file of noise by its pixels' bytes: noise grows by compression (measured with lzw: 1.21)."""

AUTO = "auto"
COMPRESSIONS = (AUTO, *_WORST)


_BELONGS_TO = {"probability_type": "probabilities", "minimum_area": "polygons", "polygons_classes": "polygons"}


def check_files(given: Mapping[str, Any], key: Callable[[str], str] = str) -> None:
    """Raise ConfigError for what is given without the file that it is said of; `key`: what messages call a name."""
    for name, file in _BELONGS_TO.items():
        if given[name] is not None and given[file] is None:
            raise ConfigError(f"{key(name)} is {given[name]}, but {key(file)} is not given; give it")


class BlockBytes(NamedTuple):
    """Of the whole blocks of a raster, and of those of all its overviews, without compression."""

    plain: int
    overviews: int


def overview_shapes(height: int, width: int) -> list[tuple[int, int]]:
    """Of a raster: each has half the rows and columns of the one before, and the last one fits a block."""
    found = []
    while max(height, width) > BLOCK:
        height, width = -(-height // 2), -(-width // 2)
        found.append((height, width))
    return found


def block_bytes(height: int, width: int, pixel: int) -> BlockBytes:
    """`pixel`: bytes of one, with all bands."""
    overviews = sum(_blocks(*shape) for shape in overview_shapes(height, width))
    return BlockBytes(_blocks(height, width) * BLOCK * BLOCK * pixel, overviews * BLOCK * BLOCK * pixel)


def _blocks(height: int, width: int) -> int:
    return -(-height // BLOCK) * -(-width // BLOCK)


@dataclass(frozen=True)
class Packing:
    """How a raster is kept. `compress` auto: deflate, which every program reads. `average`: of shares, whose overviews
    hold means of pixels; others hold what most pixels have."""

    format: str = "cog"
    compress: str = AUTO
    average: bool = False

    def of_shares(self, dtype: str) -> Packing:
        """That of class probabilities beside a map. auto: float32 as it is, since its last bits are noise."""
        plain = dtype == "float32" and self.compress == AUTO
        return replace(self, average=True, compress="none" if plain else self.compress)

    @property
    def codec(self) -> str:
        """By its name: GDAL's."""
        return "deflate" if self.compress == AUTO else self.compress

    @property
    def second_file(self) -> bool:
        """Whether the plain file, whose pixels any rank can put in place, is packed into another one."""
        return (self.format, self.codec) != ("gtiff", "none")

    def bytes(self, blocks: BlockBytes) -> int:
        """Of the disk, at worst, until the plain file is let go: both files, and the one in which GDAL makes overviews,
        which is not compressed."""
        if not self.second_file:
            return blocks.plain
        return math.ceil(blocks.plain + self._worst(blocks) + self._overviews(blocks))

    def is_big(self, blocks: BlockBytes) -> bool:
        """Whether the file has to be BigTIFF."""
        return self._worst(blocks) > _CLASSIC_LIMIT

    def _worst(self, blocks: BlockBytes) -> float:
        return _WORST[self.codec] * (blocks.plain + self._overviews(blocks))

    def _overviews(self, blocks: BlockBytes) -> int:
        return blocks.overviews if self.format == "cog" else 0


PLAIN = Packing("gtiff", "none")
