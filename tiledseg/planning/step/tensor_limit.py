"""Tensors too large for a kernel: found and refused before a run starts, here alone.

Kernels of torch and cuDNN count values in 32 bits, and fail at 2^31 of them in one tensor. Channels-last bilinear
upsampling fails on GPUs (pytorch#185788); nearest fails or gives zeros without a word (#81665, #141831: "less than
INT_MAX"). Convolutions fail that can be cut along the batch only, where the batch is one image (#80020, #117736,
#95024). The limit holds for every tensor of every layer, forward and backward (a gradient is as large as its tensor),
on GPUs and CPUs alike. A plan knows no device; on a CPU such a tensor takes 8 GiB of float32, and cutting costs little.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tiledseg.errors import GeometryError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels, tensor_shapes
from tiledseg.planning.step.rank_steps import RankSteps

MOST_VALUES = 2**31 - 2


class TensorShape(NamedTuple):
    """The output of a layer, of a batch of one image."""

    layer: str
    channels: int
    height: int
    width: int

    @property
    def values(self) -> int:
        return self.channels * self.height * self.width


def largest_tensor(graph: Graph, bands: int, context: tuple[int, int]) -> TensorShape:
    """Return the largest tensor of a network on a context: the input or an output, concatenations included."""
    shapes = zip(graph.names, tensor_shapes(graph, bands, *context), strict=True)
    return max((TensorShape(name, *shape) for name, shape in shapes), key=lambda shape: shape.values)


def largest_of_block(graph: Graph, bands: int, row: RankSteps, col: RankSteps) -> TensorShape:
    """Return that of the rank with these steps in layer mode: a block of a tensor, with the halo and padding read."""
    channels, names = tensor_channels(graph, bands), graph.names
    found = []
    for k, (sources, r, c) in enumerate(zip(graph.sources, row, col, strict=True)):
        for source, of_row, of_col in zip(sources, r.inputs, c.inputs, strict=True):
            found.append(TensorShape(names[k + 1], channels[source], of_row.read, of_col.read))
        found.append(TensorShape(names[k + 1], channels[k + 1], r.computed, c.computed))
    return max(found, key=lambda shape: shape.values)


def is_countable(graph: Graph, bands: int, context: tuple[int, int]) -> bool:
    """Return True if kernels take every tensor of the network on a context."""
    return largest_tensor(graph, bands, context).values <= MOST_VALUES


def check_countable(shapes: Iterable[TensorShape], remedy: str) -> None:
    """Raise GeometryError for the first shape of too many values; `remedy`: what to do, without a full stop."""
    for shape in shapes:
        if shape.values > MOST_VALUES:
            raise GeometryError(
                f"{shape.layer} would make a tensor of {shape.channels} x {shape.height} x {shape.width} = "
                f"{shape.values} values, but kernels count to {MOST_VALUES}; {remedy}"
            )
