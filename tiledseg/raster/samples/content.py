"""The classes in the labels of the training images, region by region, and tiles and windows that are drawn by them.

A region is a tile's core, or a small square of an image. Draws depend on counts and random numbers alone, so every
rank makes the same.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.geometry.tiling import Tiling
from tiledseg.raster.labels.label_map import LabelMap, count_classes, read_labels
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.samples.sampling import Sampler, Step, Steps, TileReference, epoch_generator, shuffled

READ_AT_ONCE = 8  # squares along each side


class ByContent(NamedTuple):
    """The user's choice. `skip_empty`: regions without a label that counts are never drawn. `balance`: the share of
    draws for a class, each class that occurs as likely as any other."""

    skip_empty: bool
    balance: float


class Region(NamedTuple):
    """A part of an image, and the number of the tile whose core it is; None of a square."""

    image: int
    box: Box
    tile: int | None = None


Unit = tuple[Region, ...]
"""Regions that are read at once."""


def tile_units(tilings: Sequence[Tiling]) -> list[Unit]:
    """Return the cores of all tiles, each by itself."""
    return [(Region(i, tile.core, tile.index),) for i, tiling in enumerate(tilings) for tile in tiling.tiles]


def square_units(shapes: Sequence[tuple[int, int]], side: int) -> list[Unit]:
    """Return all images cut into squares of `side` pixels, smaller ones at their ends."""
    reach = READ_AT_ONCE * side
    return [
        tuple(Region(image, square) for square in box.blocks(side, side))
        for image, shape in enumerate(shapes)
        for box in Box.of_shape(shape).blocks(reach, reach)
    ]


def count_units(
    units: Sequence[Unit], images: Sequence[RasterReader], labels: Sequence[RasterReader], label_map: LabelMap
) -> NDArray[np.int64]:
    """Return pixels of each class, valid in image and label, in each region of `units`: (regions, classes). Raises what
    reading raises."""
    counts, number = [], 0
    for unit in units:
        if unit[0].image != number:  # units come image by image: no more than one of each kind is held open
            images[number].release()
            labels[number].release()
        number, first, last = unit[0].image, unit[0].box, unit[-1].box
        window = Box(first.row.hull(last.row), first.col.hull(last.col))
        classes_HW = read_labels(labels[number], label_map, window)
        valid_HW = images[number].read(window)[1] & (classes_HW != label_map.ignore_index)
        for region in unit:
            at = region.box.relative_to(window).slices
            counts.append(count_classes(classes_HW[at], valid_HW[at], label_map.count))
    return np.array(counts, np.int64).reshape(-1, label_map.count)


@dataclass(frozen=True, eq=False)
class Content:
    """The regions of all images with their `counts` (regions, classes)."""

    regions: tuple[Region, ...]
    counts: NDArray[np.int64]
    choice: ByContent

    def __post_init__(self) -> None:
        if not self.counts.any():
            raise ConfigError("no training label is in a class; train.skip_empty and train.balance_classes need some")

    @functools.cached_property
    def drawn(self) -> tuple[int, ...]:
        """Return the regions that are drawn at all."""
        if not self.choice.skip_empty:
            return tuple(range(len(self.regions)))
        return tuple(np.flatnonzero(self.counts.sum(1)).tolist())

    def by_class(self, generator: random.Random) -> int:
        """Return a region: a class is drawn, and one of its pixels."""
        return self._draw(1 + int(generator.random() * (len(self._ends) - 1)), generator)

    def by_label(self, generator: random.Random) -> int:
        """Return a region: a pixel with a label that counts is drawn."""
        return self._draw(0, generator)

    def _draw(self, kind: int, generator: random.Random) -> int:
        ends = self._ends[kind]
        return int(np.searchsorted(ends, int(generator.random() * int(ends[-1])), side="right"))

    @functools.cached_property
    def _ends(self) -> list[NDArray[np.int64]]:
        """Return the running sums of pixels over the regions: of all classes, then of each class that occurs."""
        return [np.cumsum(counts_R) for counts_R in (self.counts.sum(1), *self.counts.T) if counts_R.any()]


@dataclass(frozen=True, eq=False)
class ContentSampler(Steps):
    """The steps of `sampler`, of a number of tiles each, but with the tiles that `content` draws.

    An epoch has as many tiles as are drawn at all. A share of them, the balance, is drawn by class, the same tile
    maybe more than once; in the place of the others stand the tiles of a shuffled list. With a share of 0 each of these
    occurs once an epoch. Raises ConfigError where a step takes more tiles than there are.
    """

    sampler: Sampler
    content: Content

    def __post_init__(self) -> None:
        tiles = len(self.content.drawn)
        if self._size > tiles:
            raise ConfigError(
                f"train.tiles_per_step is {self._size}, but train.skip_empty leaves {tiles} of "
                f"{len(self.content.regions)} tiles; give at most {tiles}, or a finer tiling.grid"
            )

    @property
    def seed(self) -> int:
        return self.sampler.seed

    @property
    def _size(self) -> int:
        assert self.sampler.tiles_per_step is not None, "checked with the configuration"
        return self.sampler.tiles_per_step

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.content.drawn) / self._size)

    def steps(self, epoch: int) -> list[Step]:
        generator = epoch_generator(self.seed, epoch)
        numbers = [
            self.content.by_class(generator) if generator.random() < self.content.choice.balance else number
            for number in shuffled(self.content.drawn, generator)
        ]
        regions = [self.content.regions[number] for number in numbers]
        tiles = [TileReference(region.image, region.tile) for region in regions if region.tile is not None]
        return [tuple(sorted(tiles[start : start + self._size])) for start in range(0, len(tiles), self._size)]
