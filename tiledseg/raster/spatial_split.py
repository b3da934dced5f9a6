"""Which pixels of an image are trained on, and which validated on, where both are parts of the same images.

Images are cut into blocks. Some blocks, drawn by a seed alone, are validated on; the others are trained on, but for
what lies within `gap` pixels of a block that is validated on: it counts nowhere. With a gap of the network's halo no
output that is validated depends on a pixel that is trained on, nor the other way round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval


@dataclass(frozen=True)
class Part:
    """The pixels of an image that count: those within `boxes`, or where `outside`, those farther than `gap` pixels from
    each of them, diagonals included."""

    boxes: tuple[Box, ...]
    outside: bool = False
    gap: int = 0

    def inside(self, box: Box) -> NDArray[np.bool_]:
        """Which pixels of `box` count, (height, width)."""
        found_HW = np.full(box.shape, self.outside)
        for one in self.boxes:
            around = self.gap if self.outside else 0
            rows, cols = (
                slice(max(side.start - around - seen.start, 0), max(side.stop + around - seen.start, 0))
                for side, seen in ((one.row, box.row), (one.col, box.col))
            )
            found_HW[rows, cols] = not self.outside
        return found_HW


@dataclass(frozen=True)
class SpatialSplit:
    """`blocks`: of each image, along rows and columns; `share`: of all blocks, validated on; `gap` in pixels."""

    blocks: tuple[int, int]
    share: float
    gap: int
    seed: int

    def parts(self, shapes: Sequence[tuple[int, int]]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """(trained on, validated on), each a part of every image; `shapes` (height, width).

        Raises ConfigError where an image has fewer pixels than blocks, or a gap leaves an image nothing to train on.
        """
        every = [(image, block) for image in range(len(shapes)) for block in self._blocks(shapes[image])]
        if len(every) < 2:
            raise ConfigError("data.split is 1 block in all, but one is trained and one validated on; give more blocks")
        count = min(max(round(self.share * len(every)), 1), len(every) - 1)
        order = sorted(range(len(every)), key=self._drawn)
        held_out = [every[at] for at in sorted(order[:count])]
        validated = [tuple(block for of, block in held_out if of == image) for image in range(len(shapes))]
        return tuple(Part(boxes, True, self.gap) for boxes in validated), tuple(Part(boxes) for boxes in validated)

    def _blocks(self, shape: tuple[int, int]) -> list[Box]:
        rows, cols = self.blocks
        if rows > shape[0] or cols > shape[1]:
            raise ConfigError(
                f"data.split is {list(self.blocks)} blocks, but an image is {shape[0]} x {shape[1]} px; give fewer"
            )
        return [Box(row, col) for row in _cuts(shape[0], rows) for col in _cuts(shape[1], cols)]

    def _drawn(self, number: int) -> bytes:
        return hashlib.sha256(f"tiledseg.split {self.seed} {number}".encode()).digest()


def _cuts(size: int, parts: int) -> list[Interval]:
    return [Interval(size * part // parts, size * (part + 1) // parts) for part in range(parts)]
