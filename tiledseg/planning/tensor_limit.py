"""Tensors too large for a kernel: found and refused before a run starts, here alone.

Kernels of torch and cuDNN count values in 32 bits: at 2^31 of them in one tensor channels-last bilinear upsampling
fails on GPUs (pytorch#185788), nearest fails or gives zeros without a word (#81665, #141831: "less than INT_MAX"), and
convolutions fail that can be cut along the batch only, where the batch is one image (#80020, #117736, #95024). The
limit is taken for every tensor of every layer, forward and backward (a gradient is as large as its tensor), on GPUs and
CPUs alike: a plan does not know the device, and on a CPU such a tensor takes 8 GiB of float32, where cutting costs
little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiledseg.errors import GeometryError
from tiledseg.geometry.layer import Layer
from tiledseg.geometry.shapes import layer_shapes
from tiledseg.planning.rank_steps import RankSteps

MOST_VALUES = 2**31 - 2


class TensorShape(NamedTuple):
    """What a layer makes: of one image of a batch of one."""

    layer: str
    channels: int
    height: int
    width: int

    @property
    def values(self) -> int:
        return self.channels * self.height * self.width


def largest_tensor(layers: Sequence[Layer], bands: int, context: tuple[int, int]) -> TensorShape:
    """The largest tensor of a network on a context: the input, what a layer makes, concatenations included."""
    shapes = zip(layers, layer_shapes(layers, bands, *context), strict=True)
    made = (TensorShape(layer.name, *shape) for layer, shape in shapes)
    return max((TensorShape("the input", bands, *context), *made), key=lambda shape: shape.values)


def largest_of_block(layers: Sequence[Layer], bands: int, row: RankSteps, col: RankSteps) -> TensorShape:
    """The same of the rank with these steps in layer mode: its block of each tensor, with the halo and padding read."""
    found, channels = [], bands
    for layer, r, c in zip(layers, row, col, strict=True):
        found.append(TensorShape(layer.name, channels, r.read, c.read))
        channels = layer.output_channels(channels)
        found.append(TensorShape(layer.name, channels, r.computed, c.computed))
    return max(found, key=lambda shape: shape.values)


def is_countable(layers: Sequence[Layer], bands: int, context: tuple[int, int]) -> bool:
    """Whether kernels take every tensor of the network on a context."""
    return largest_tensor(layers, bands, context).values <= MOST_VALUES


def check_countable(shapes: Iterable[TensorShape], remedy: str) -> None:
    """Raise GeometryError for the first shape of too many values; `remedy`: what to do, without a full stop."""
    for shape in shapes:
        if shape.values > MOST_VALUES:
            raise GeometryError(
                f"{shape.layer} would make a tensor of {shape.channels} x {shape.height} x {shape.width} = "
                f"{shape.values} values, but kernels count to {MOST_VALUES}; {remedy}"
            )
