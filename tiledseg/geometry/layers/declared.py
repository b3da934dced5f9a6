"""Leaves that are not traced: modules with a footprint declared by the user, and modules that run on crops of one size.

Crops lie on a grid fixed in the image, so a module of one input size maps images of any size (decision 0020). A pixel's
scores are the mean over all crops that cover it, weighted by the pixel's place in the crop. Grid, weights and the order
of the sum (row by row of crops) follow from the image's size and `CropGrid` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.joins import ImageLayer
from tiledseg.geometry.layers.layer import Layer, LayerMemory, LayerWindow, Shape
from tiledseg.units import SINGLE_BYTES


@dataclass(frozen=True)
class Leaf(Layer):
    """A module that is not traced, for images whose sides are multiples of `size`. It has `weights` weights and
    `out_channels`; an output pixel takes `work` multiply-adds, and `kept` values for the backward pass."""

    out_channels: int
    size: int = 1
    weights: int = 0
    work: int = 1
    kept: int = 0

    protects_output = True  # a view
    kept_inputs = (0,)
    is_cheap = False

    @property
    def window_grid(self) -> int:
        return self.size

    def output_size(self, size: int, *others: int) -> int:
        if size % self.size:
            raise GeometryError(f"its windows of {self.size} do not fill {size} positions; give another size")
        return size

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        hidden = 4 * max(inputs)  # the gradient of a hidden layer, four times as wide in all published blocks
        return LayerMemory(kept=self.kept * shape[1] * shape[2] * width, transient=hidden)


@dataclass(frozen=True)
class DeclaredLeaf(Leaf):
    """A module whose output depends on the windows of `size` positions that meet its `stride` inputs and `reach` more
    on either side. Windows begin at `shift` plus multiples of `size` in the image, and are clipped at its ends.

    Over ranks, a window's owner computes all of its outputs: the edge of the outputs moves to the nearest window's.
    `Returned` moves it back.

        windows   |   0   |   1   |   2   |      an edge of inputs at the end of 0
        shifted   | |   1   |   2   |   | |      the left rank computes the shifted window 1: half of its input comes by
                                                 an exchange, and half of its output goes back by another
    """

    shift: int = 0
    reach: int = 0
    stride: int = 1

    clamps = True

    @cached_property
    def window(self) -> LayerWindow:
        return LayerWindow(self.stride)

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        first = (out.start * self.stride - self.reach - self.shift) // self.size
        stop = -((self.shift - out.stop * self.stride - self.reach) // self.size)
        return Interval(first * self.size + self.shift, stop * self.size + self.shift)

    def output_size(self, size: int, *others: int) -> int:
        return super().output_size(size) // self.stride

    def output_edge(self, edge: int, *others: int) -> int:
        nearest = (2 * (edge - self.shift) + self.size) // (2 * self.size)
        return (nearest * self.size + self.shift) // self.stride

    @property
    def moved(self) -> int:
        """The positions by which an edge between unshifted windows moves."""
        return self.output_edge(0)

    def fits_edge(self, *edges: int) -> bool:
        return edges[0] % self.size == 0


@dataclass(frozen=True)
class WholeLeaf(ImageLayer, Leaf):
    """A module whose outputs depend on the whole image. Over ranks, each gathers the whole input and computes all."""

    stride = 1
    reach = 0
    moved = 0
    takes = "a whole image, as is declared"
    sees_all = True


@dataclass(frozen=True)
class Returned(Layer):
    """The identity, which moves edges between ranks back by `moved` positions, for the results of shifted windows."""

    moved: int = 0

    gradient = "same"
    keeps_zero = True
    protects_output = True  # the leaf's

    def output_edge(self, edge: int, *others: int) -> int:
        return edge - self.moved


class Crop(NamedTuple):
    """A crop along one dim, in positions of the image. `read`: its pixels, mirrored beyond the image's ends; `used`:
    the pixels in the image whose scores count."""

    read: Interval
    used: Interval


@dataclass(frozen=True)
class CropGrid:
    """A grid of crops of `window` x `window` pixels, of which neighbours share the fraction `overlap` of a side.

    `blend`: the weight of a pixel by its place in the crop: `gaussian` (a deviation of an eighth of a side, at least
    0.001), `cosine` (the square of a sine), `mean` (all alike), or `centre` (1 in the crop with the nearest centre, 0
    in others). `ends`: `inside`, the last crop is shifted to end with the image; `mirrored`, the grid begins half an
    overlap before the image, where pixels are mirrored. An image smaller than a crop is mirrored.
    """

    window: int
    overlap: float = 0.5
    blend: str = "gaussian"
    ends: str = "inside"

    @property
    def step(self) -> int:
        """The distance of neighbouring crops in pixels."""
        return max(1, int(self.window * (1 - self.overlap)))

    @property
    def in_words(self) -> str:
        return f"crops of {self.window} px, overlap {self.overlap:g}, blend {self.blend}, ends {self.ends}"

    def crops(self, size: int) -> list[Crop]:
        """Return the crops along a dim of `size` pixels."""
        window, step = self.window, self.step
        if self.ends == "mirrored":
            starts = [*range(-((window - step) // 2), size - (window - step) // 2, step)]
        elif size > window:
            starts = [*range(0, size - window, step), size - window]
        else:
            starts = [-((window - size) // 2)]
        reads = [Interval(start, start + window) for start in starts]
        if self.blend != "centre":
            return [Crop(read, read.clip(Interval(0, size))) for read in reads]
        edges = [0, *((one + other + window - 1) // 2 + 1 for one, other in pairwise(starts)), size]
        return [Crop(read, Interval(*edge)) for read, edge in zip(reads, pairwise(edges), strict=True)]

    def core(self, part: Interval, size: int) -> Interval:
        """Return the core of a tile with the context `part`, which extends a crop beyond it or to the image's ends."""
        more = self.window - 1
        return Interval(part.start + (more if part.start > 0 else 0), part.stop - (more if part.stop < size else 0))

    def needed(self, part: Interval, size: int) -> list[Crop]:
        """Return the crops whose scores count in the core of a tile with the context `part`."""
        core = self.core(part, size)
        return [crop for crop in self.crops(size) if crop.used.start < core.stop and crop.used.stop > core.start]

    @cached_property
    def weights(self) -> list[float]:
        """The weights along one dim. A pixel's weight is the product over both dims (at least 0.001 for `gaussian`)."""
        middle, side = (self.window - 1) / 2, self.window
        if self.blend == "gaussian":
            return [math.exp(-(((place - middle) / (side / 8)) ** 2) / 2) for place in range(side)]
        if self.blend == "cosine":
            return [math.sin(math.pi * (place + 0.5) / side) ** 2 for place in range(side)]
        return [1.0] * side


@dataclass(frozen=True)
class Crops(Layer):
    """An untraced module with `weights` parameters and scores of `out_channels` classes, run on the crops of `grid`, or
    (None) only on whole images. `kept`, `work`: measured bytes that autograd keeps of a crop in float32, and
    multiply-adds of a pixel; 0 if it is not trained."""

    grid: CropGrid | None
    out_channels: int
    weights: int = 0
    kept: int = 0
    work: int = 0

    asks_place = True
    can_rebuild = False
    is_cheap = False

    @property
    def usual_grid(self) -> int:
        """Two steps of crops: tiles then have an even number of new crops a dim, which fill batches of 4."""
        return 2 * self.grid.step if self.grid else 1

    @property
    def window(self) -> LayerWindow:
        more = self.grid.window - 1 if self.grid else 0
        return LayerWindow(padding=more, reach=2 * more)

    def memory(self, inputs: Sequence[int], shape: Shape, width: int, work: int) -> LayerMemory:
        return LayerMemory(kept=self.kept * width // SINGLE_BYTES)
