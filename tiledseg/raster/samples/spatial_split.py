"""The pixels that are trained on, and validated on, where both are parts of the same images.

Images are cut into blocks. Some blocks, drawn by a seed alone, are validated on; the others are trained on, but for
what lies within a gap of a block that is validated on: it counts nowhere. With a gap of the network's halo no
output that is validated depends on a pixel that is trained on, nor the other way round.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box, Interval

MOST_BLOCKS = 4096
"""Of an image, along rows and along columns."""


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
        return [Box(row, col) for row in _cuts(height, rows) for col in _cuts(width, cols)]


@dataclass(frozen=True)
class SpatialSplit:
    """A spatial split. `cuts`: of each image. `share`: of all blocks, validated on."""

    cuts: tuple[SplitCut, ...]
    share: float
    seed: int

    def parts(self) -> tuple[tuple[SplitPart, ...], tuple[SplitPart, ...]]:
        """Return (trained on, validated on), each a part of every image.

        Raises ConfigError where an image has fewer pixels than blocks.
        """
        every = [(image, block) for image, cut in enumerate(self.cuts) for block in cut.boxes()]
        if len(every) < 2:
            raise ConfigError("data.split is 1 block in all, but one is trained and one validated on; give more blocks")
        count = min(max(round(self.share * len(every)), 1), len(every) - 1)
        order = sorted(range(len(every)), key=self._drawn)
        held_out = [every[at] for at in sorted(order[:count])]
        validated = [tuple(block for of, block in held_out if of == image) for image in range(len(self.cuts))]
        trained = tuple(SplitPart(boxes, True, cut.gap) for boxes, cut in zip(validated, self.cuts, strict=True))
        return trained, tuple(SplitPart(boxes) for boxes in validated)

    def _drawn(self, number: int) -> bytes:
        return hashlib.sha256(f"tiledseg.split {self.seed} {number}".encode()).digest()


def _cuts(size: int, parts: int) -> list[Interval]:
    return [Interval(size * part // parts, size * (part + 1) // parts) for part in range(parts)]
