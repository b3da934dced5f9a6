"""Means over a grid of parts of the whole image, whatever its size, computed upon and brought back to the image."""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.joins import sees_image
from tiledseg.geometry.layers.resampling import Enlarging
from tiledseg.geometry.shapes import count_parameters, tensor_channels


@dataclass(frozen=True)
class PooledBranch(Enlarging):
    """A branch of a pyramid: the image's means over `bins` parts a dim, `inner` nodes on these, and their output
    resized to `factor` times the size of the input, bilinear, with corners `aligned` or not.

    Bin i of a dim of N positions is [floor(i N / bins), ceil((i + 1) N / bins)), as of torch's adaptive pooling.
    `cells`: bins of both dims.
    """

    bins: int
    cells: int
    inner: Graph
    aligned: bool
    factor: int = 1

    statistics = "image"
    can_rebuild = False  # a sum over all ranks

    def in_words(self, module: str | None) -> str:
        return sees_image(module, "means of parts of an image")

    def output_channels(self, channels: int, *others: int) -> int:
        return tensor_channels(self.inner, channels)[self.inner.results[0]]

    def parameters(self, channels: int) -> int:
        return count_parameters(self.inner, channels)

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count partial means; backward their gradients."""
        return channels * self.cells, channels * self.cells

    def computed(self, read: int, given: int) -> int:
        return given


def bins_of(size: int, bins: int) -> tuple[Interval, ...]:
    """Return the positions of each bin."""
    return tuple(Interval(i * size // bins, -(-(i + 1) * size // bins)) for i in range(bins))
