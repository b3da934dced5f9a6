"""The selection of training pixels, by content and by place.

By content: regions (tile cores, or small squares) are drawn by the classes in their labels. Draws depend on counts and
random numbers alone, so every rank makes the same ones.

By place: images are cut into blocks. Blocks drawn by a seed are for validation, the others for training. Training
pixels within a gap around a validation block do not count. With a gap of the network's halo, no validation output
depends on a training pixel, and no training output on a validation pixel."""

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

READ_AT_ONCE = 8  # squares along each side of a window that is read at once


class ByContent(NamedTuple):
    """The user's rules. `skip_empty`: never draw a region without a valid label. `balance`: share of the draws made by
    class, each class with equal probability."""

    skip_empty: bool
    balance: float


Unit = tuple[Region, ...]
"""Regions that are read at once."""


def tile_units(tilings: Sequence[Tiling]) -> list[Unit]:
    """Return the core of each tile as a unit of its own."""
    return [(Region(i, tile.core, tile.index),) for i, tiling in enumerate(tilings) for tile in tiling.tiles]


def square_units(shapes: Sequence[tuple[int, int]], side: int) -> list[Unit]:
    """Return all images cut into squares of `side` pixels, smaller ones at the borders."""
    reach = READ_AT_ONCE * side
    return [
        tuple(Region(image, square) for square in box.blocks(side, side))
        for image, shape in enumerate(shapes)
        for box in Box.of_shape(shape).blocks(reach, reach)
    ]


def count_units(
    units: Sequence[Unit], images: Sequence[RasterReader], labels: Sequence[RasterReader], label_map: LabelMap
) -> NDArray[np.int64]:
    """Return the number of pixels of each class, valid in image and label, in each region: (regions, classes)."""
    counts = []
    for unit in units:
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
    """The regions of all images with their `counts` (regions, classes) and the rules for drawing them."""

    regions: tuple[Region, ...]
    counts: NDArray[np.int64]
    choice: ByContent

    def __post_init__(self) -> None:
        if not self.counts.any():
            raise ConfigError("no training label is in a class; train.skip_empty and train.balance_classes need some")

    @functools.cached_property
    def drawn(self) -> tuple[int, ...]:
        """Return the regions that can be drawn."""
        if not self.choice.skip_empty:
            return tuple(range(len(self.regions)))
        return tuple(np.flatnonzero(self.counts.sum(1)).tolist())

    def draw(self, by_class: bool, generator: random.Random) -> int:
        """Draw a pixel with a valid label, of a drawn class if `by_class`; return its region."""
        kind = 1 + int(generator.random() * (len(self._ends) - 1)) if by_class else 0
        ends = self._ends[kind]
        return int(np.searchsorted(ends, int(generator.random() * int(ends[-1])), side="right"))

    @functools.cached_property
    def _ends(self) -> list[NDArray[np.int64]]:
        """Return the cumulative pixel counts over the regions: of all classes, then of each class that occurs."""
        return [np.cumsum(counts_R) for counts_R in (self.counts.sum(1), *self.counts.T) if counts_R.any()]


MOST_BLOCKS = 4096
"""Most blocks of an image along rows, and along columns."""


@dataclass(frozen=True)
class SplitPart:
    """The pixels of an image that count: those inside `boxes`; with `outside`, those farther than `gap` pixels (along
    rows, along columns; diagonals included) from every box."""

    boxes: tuple[Box, ...]
    outside: bool = False
    gap: int = 0

    def inside(self, box: Box) -> NDArray[np.bool_]:
        """Return a mask (height, width) of the pixels of `box` that count."""
        counts_HW = np.full(box.shape, self.outside)
        for one in self.boxes:
            near = Box(*(side.expand(self.gap, self.gap) for side in (one.row, one.col))).clip(box)
            if near.area:
                counts_HW[near.relative_to(box).slices] = not self.outside
        return counts_HW


def split_images(
    shapes: Sequence[tuple[int, int]], blocks: Sequence[int] | int, gap: int, share: float, seed: int
) -> tuple[tuple[SplitPart, ...], tuple[SplitPart, ...]]:
    """Return the training part and the validation part of each image of `shapes` (height, width), cut into `blocks`:
    (rows, columns), or the side of one in pixels. `gap`: pixels around a validated block. `share`: of all blocks, for
    validation. Raises ConfigError for fewer than 2 blocks in all, and for more of an image than pixels or
    `MOST_BLOCKS`."""
    every = [(image, block) for image, shape in enumerate(shapes) for block in _blocks(shape, blocks)]
    if len(every) < 2:
        raise ConfigError("data.split is 1 block in all, but one is trained and one validated on; give more blocks")
    count = min(max(round(share * len(every)), 1), len(every) - 1)
    words = [f"tiledseg.split {seed} {number}" for number in range(len(every))]
    order = sorted(range(len(every)), key=lambda number: hashlib.sha256(words[number].encode()).digest())
    held_out = [every[at] for at in sorted(order[:count])]
    validated = [tuple(block for of, block in held_out if of == image) for image in range(len(shapes))]
    return tuple(SplitPart(boxes, True, gap) for boxes in validated), tuple(map(SplitPart, validated))


def _blocks(shape: tuple[int, int], blocks: Sequence[int] | int) -> list[Box]:
    """Return equal blocks of an image; their side is the nearest to a given one."""
    if isinstance(blocks, int):
        blocks = [max(1, (2 * size + blocks) // (2 * blocks)) for size in shape]
    (height, width), (rows, cols) = shape, blocks
    if rows > height or cols > width:
        raise ConfigError(f"data.split is {[*blocks]} blocks, but an image is {height} x {width} px; give fewer")
    if max(blocks) > MOST_BLOCKS:
        most = f"give a side that makes {MOST_BLOCKS} along each at most"
        raise ConfigError(f"data.split makes {rows} x {cols} blocks of an image; {most}")
    sides = (
        [Interval(size * part // parts, size * (part + 1) // parts) for part in range(parts)]
        for size, parts in ((height, rows), (width, cols))
    )
    return [Box(row, col) for row, col in itertools.product(*sides)]
