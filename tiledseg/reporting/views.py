"""Places of rasters to look at: chosen once by the seed, and how the pixels of a part come into their pictures."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.records import dataclass

SIDE = 256
"""Pixels a side of a picture, at most."""


@dataclass(frozen=True)
class View:
    """A picture of image number `image`: every `stride`-th pixel of `box`, its first one included."""

    image: int
    box: Box
    stride: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) of the picture."""
        return -(-self.box.height // self.stride), -(-self.box.width // self.stride)

    def part(self, core: Box) -> tuple[tuple[slice, slice], tuple[slice, slice]] | None:
        """Where the pixels of `core`, of the same image, go in the picture, and which of the core they are; None where
        it has none of them. Cores that cover a raster once fill the picture once."""
        rows, cols = (
            _side(view, side, self.stride)
            for view, side in zip((self.box.row, self.box.col), (core.row, core.col), strict=True)
        )
        return None if rows is None or cols is None else ((rows[0], cols[0]), (rows[1], cols[1]))


def _side(view: Interval, core: Interval, stride: int) -> tuple[slice, slice] | None:
    there = core.clip(view)
    first, stop = -(-(there.start - view.start) // stride), -(-(there.stop - view.start) // stride)
    if first >= stop:
        return None
    begin = view.start + first * stride - core.start
    return slice(first, stop), slice(begin, begin + (stop - first - 1) * stride + 1, stride)


def choose_views(shapes: Sequence[tuple[int, int]], count: int, seed: int) -> tuple[View, ...]:
    """At most `count` views of images of these shapes (height, width): all of the first one, thinned, and then windows
    of every pixel, drawn by the seed, from each image in turn. No two are the same; small images have few."""
    if count < 1:
        return ()
    views = [_overview(0, shapes[0])]
    digest = hashlib.sha256(f"tiledseg.views {seed}".encode()).digest()
    generator = random.Random(int.from_bytes(digest[:8], "big"))
    for number in range(1, count):
        image = number % len(shapes)
        views.append(_window(image, shapes[image], generator))
    return tuple(dict.fromkeys(views))


def _overview(image: int, shape: tuple[int, int]) -> View:
    return View(image, Box.of_shape(shape), max(1, -(-max(shape) // SIDE)))


def _window(image: int, shape: tuple[int, int], generator: random.Random) -> View:
    sides = []
    for size in shape:
        start = int(generator.random() * (max(0, size - SIDE) + 1))
        sides.append(Interval(start, start + min(size, SIDE)))
    return View(image, Box(*sides))
