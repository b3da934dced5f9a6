"""The parts of the training images that are drawn, or left out.

By content: the classes in the labels, region by region, where a region is a tile's core, or a small square of an image.
Draws depend on counts and random numbers alone, so every rank makes the same.

By place: images are cut into blocks. Some blocks, drawn by a seed alone, are validated on; the others are trained on,
but for what lies within a gap of a block that is validated on: it counts nowhere. With a gap of the network's halo no
output that is validated depends on a pixel that is trained on, nor the other way round."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.tiling import Tiling
from tiledseg.raster.labels.label_map import LabelMap, count_classes, read_labels
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.statistics import Region

READ_AT_ONCE = 8  # squares along each side


class ByContent(NamedTuple):
    """The user's choice. `skip_empty`: regions without a label that counts are never drawn. `balance`: the share of
    draws for a class, each class that occurs as likely as any other."""

    skip_empty: bool
    balance: float


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

    def draw(self, by_class: bool, generator: random.Random) -> int:
        """Return a region: one of the pixels with a label that counts is drawn, where `by_class` of a drawn class."""
        kind = 1 + int(generator.random() * (len(self._ends) - 1)) if by_class else 0
        ends = self._ends[kind]
        return int(np.searchsorted(ends, int(generator.random() * int(ends[-1])), side="right"))

    @functools.cached_property
    def _ends(self) -> list[NDArray[np.int64]]:
        """Return the running sums of pixels over the regions: of all classes, then of each class that occurs."""
        return [np.cumsum(counts_R) for counts_R in (self.counts.sum(1), *self.counts.T) if counts_R.any()]


MOST_BLOCKS = 4096
"""The most blocks of an image, along rows and along columns."""


@dataclass(frozen=True)
class SplitPart:
    """The pixels of an image that count: those within `boxes`, or where `outside`, those farther than `gap` pixels
    (along rows, along columns) from each of them, diagonals included."""

    boxes: tuple[Box, ...]
    outside: bool = False
    gap: tuple[int, int] = (0, 0)

    def inside(self, box: Box) -> NDArray[np.bool_]:
        """Return True for the pixels of `box` that count, (height, width)."""
        found_HW = np.full(box.shape, self.outside)
        for one in self.boxes:
            around = self.gap if self.outside else (0, 0)
            rows, cols = (
                slice(max(side.start - gap - whole.start, 0), max(side.stop + gap - whole.start, 0))
                for side, whole, gap in zip((one.row, one.col), (box.row, box.col), around, strict=True)
            )
            found_HW[rows, cols] = not self.outside
        return found_HW


@dataclass(frozen=True)
class SplitCut:
    """A cut of an image of `shape` (height, width): into so many `blocks`, with a `gap` in pixels, each along rows
    and columns."""

    shape: tuple[int, int]
    blocks: tuple[int, int]
    gap: tuple[int, int]

    def boxes(self) -> list[Box]:
        """Return the blocks. Raises ConfigError where there are more than pixels, or far too many."""
        (height, width), (rows, cols) = self.shape, self.blocks
        if rows > height or cols > width:
            raise ConfigError(
                f"data.split is {list(self.blocks)} blocks, but an image is {height} x {width} px; give fewer"
            )
        if max(self.blocks) > MOST_BLOCKS:
            raise ConfigError(
                f"data.split makes {rows} x {cols} blocks of an image; give a side that makes {MOST_BLOCKS} along each "
                "at most"
            )
        sides = (
            [Interval(size * part // parts, size * (part + 1) // parts) for part in range(parts)]
            for size, parts in ((height, rows), (width, cols))
        )
        return [Box(row, col) for row, col in itertools.product(*sides)]


@dataclass(frozen=True)
class SpatialSplit:
    """A spatial split. `cuts`: of each image. `share`: of all blocks, validated on."""

    cuts: tuple[SplitCut, ...]
    share: float
    seed: int

    def parts(self) -> tuple[tuple[SplitPart, ...], tuple[SplitPart, ...]]:
        """Return (trained on, validated on), each a part of every image. Raises ConfigError where an image has fewer
        pixels than blocks."""
        every = [(image, block) for image, cut in enumerate(self.cuts) for block in cut.boxes()]
        if len(every) < 2:
            raise ConfigError("data.split is 1 block in all, but one is trained and one validated on; give more blocks")
        count = min(max(round(self.share * len(every)), 1), len(every) - 1)
        words = [f"tiledseg.split {self.seed} {number}" for number in range(len(every))]
        order = sorted(range(len(every)), key=lambda number: hashlib.sha256(words[number].encode()).digest())
        held_out = [every[at] for at in sorted(order[:count])]
        validated = [tuple(block for of, block in held_out if of == image) for image in range(len(self.cuts))]
        trained = tuple(SplitPart(boxes, True, cut.gap) for boxes, cut in zip(validated, self.cuts, strict=True))
        return trained, tuple(SplitPart(boxes) for boxes in validated)
