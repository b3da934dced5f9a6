"""A leaf whose footprint its user states, and the strip that goes back to its owner after a shifted one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.layer import Layer, Shape


@dataclass(frozen=True)
class DeclaredLeaf(Layer):
    """A module that sees, for an output, the windows of `size` positions that meet its `stride` inputs and `reach` more
    on either side. The windows begin at `shift` and its multiples in the image, whose ends clip them.

    It has `weights` and `out_channels`; an output pixel takes `work` multiply-adds, and `kept` values for the backward
    pass.

    Between ranks a window belongs to one owner, who gives all of its outputs: the edge of the outputs moves to the
    nearest window's. `Returned` brings it back.

        windows   |   0   |   1   |   2   |      an edge of inputs at the end of 0
        shifted   | |   1   |   2   |   | |      the left rank computes the shifted window 1: half of it comes by an
                                                 exchange, and half of what it gives goes back by another
    """

    out_channels: int
    size: int = 1
    shift: int = 0
    reach: int = 0
    stride: int = 1
    weights: int = 0
    work: int = 1
    kept: int = 0

    clamps = True
    protects_output = True  # a view
    kept_inputs = (0,)
    is_cheap = False

    @property
    def window_grid(self) -> int:
        return self.size

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        first = (out.start * self.stride - self.reach - self.shift) // self.size
        stop = -((self.shift - out.stop * self.stride - self.reach) // self.size)
        return Interval(first * self.size + self.shift, stop * self.size + self.shift)

    def output_size(self, size: int, *others: int) -> int:
        if size % self.size:
            raise GeometryError(f"its windows of {self.size} do not fill {size} positions; give a multiple")
        return size // self.stride

    def output_edge(self, edge: int, *others: int) -> int:
        nearest = (2 * (edge - self.shift) + self.size) // (2 * self.size)
        return (nearest * self.size + self.shift) // self.stride

    @property
    def moved(self) -> int:
        """The positions by which an edge between windows that are not shifted moves."""
        return self.output_edge(0)

    def fits_edge(self, *edges: int) -> bool:
        return edges[0] % self.size == 0

    def output_channels(self, channels: int, *others: int) -> int:
        return self.out_channels

    def parameters(self, channels: int) -> int:
        return self.weights

    def multiply_adds(self, channels: int) -> int:
        return self.work

    def kept_besides(self, shape: Shape, width: int) -> int:
        return self.kept * shape[1] * shape[2] * width

    def transient_bytes(self, inputs: Sequence[int], shape: Shape) -> int:
        return 4 * max(inputs)  # the gradient of a hidden layer, as wide in all published blocks


@dataclass(frozen=True)
class Returned(Layer):
    """A tensor as it is, whose edges between ranks go back by `moved` positions: the results of shifted windows."""

    moved: int = 0

    gradient = "same"
    keeps_zero = True
    protects_output = True  # the leaf's

    def output_edge(self, edge: int, *others: int) -> int:
        return edge - self.moved
