"""The torch module of each layer, built from the layer's description.

A new layer needs a line in `BUILDERS`, and a module beside the others of its kind if torch has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from tiledseg.geometry.layers.convolutions import Convolution, FixedFilters, TransposedConvolution
from tiledseg.geometry.layers.joins import ImageAttention, ImageMax, ImageMean, ImageProducts
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Activation, Dropout, Mark, Norm, OfOnePixel, Pixelwise, Sigmoid
from tiledseg.geometry.layers.resampling import (
    AlignedUpsample,
    AveragePool,
    Border,
    MaxIndices,
    MaxPool,
    MaxUnpool,
    PixelShuffle,
    PixelUnshuffle,
    Upsample,
)
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.layers import pooling, resampling
from tiledseg.models.layers.attention import AttentionOverImage, WholeImageProducts
from tiledseg.models.layers.convolution import FilterBank, OneDnnTransposed, SteadyConvolution
from tiledseg.models.layers.joins import JOINS, JoinModule, WholeImageMax, WholeImageMean
from tiledseg.models.layers.pixelwise import OnePixel, PixelFunction
from tiledseg.models.norm import BatchNorm, GroupNorm, InstanceNorm, PixelNorm


class ModuleSite(NamedTuple):
    """A node for which a module is built: name, layer along rows and `cols`, channels of the inputs; `overwrites`: it
    may overwrite its input."""

    name: str
    layer: Any
    cols: Any
    channels: tuple[int, ...]
    overwrites: bool


NORMS: dict[str, Callable[[Norm, int], nn.Module]] = {
    "pixel": lambda norm, channels: PixelNorm(channels),
    "instance": lambda norm, channels: InstanceNorm(channels, affine=True),
    "group": lambda norm, channels: GroupNorm(norm.groups, channels),
    "batch": lambda norm, channels: BatchNorm(channels),
}


def _convolution(at: ModuleSite, *names: str) -> dict[str, Any]:
    """Return the arguments of a convolution. `names`: further fields of the layer that become (row, col) pairs."""
    pairs: dict[str, Any] = {name: (getattr(at.layer, name), getattr(at.cols, name)) for name in ("dilation", *names)}
    pairs |= {
        "kernel_size": (at.layer.kernel, at.cols.kernel),
        "stride": (at.layer.window.stride, at.cols.window.stride),
    }
    made = {"in_channels": at.channels[0], "out_channels": at.layer.out_channels, "bias": at.layer.bias}
    if any(getattr(layer, "extra", 0) for layer in (at.layer, at.cols)):
        pairs["padding"] = "same"
    return made | {"groups": at.layer.groups} | pairs


def _pooling(at: ModuleSite) -> Any:
    """Return kernel, stride, padding and dilation, each as (row, col)."""
    return list(zip(at.layer.sizes, at.cols.sizes, strict=True))


BUILDERS: dict[type[Layer], Callable[[ModuleSite], nn.Module]] = {
    Convolution: lambda at: SteadyConvolution(**_convolution(at, "padding")),
    FixedFilters: lambda at: FilterBank(at.channels[0], at.layer),
    TransposedConvolution: lambda at: OneDnnTransposed(**_convolution(at, "padding", "output_padding")),
    MaxPool: lambda at: pooling.MaxPoolModule(*_pooling(at)),
    AveragePool: lambda at: pooling.AveragePoolModule(*_pooling(at)[:3]),
    MaxIndices: lambda at: pooling.MaxIndicesModule(*at.layer.sizes),
    MaxUnpool: lambda at: pooling.MaxUnpoolModule(at.layer.factor),
    Upsample: lambda at: resampling.UpsampleModule(scale_factor=at.layer.factor, mode=at.layer.mode),
    AlignedUpsample: lambda at: resampling.AlignedUpsampleModule((at.layer.factor, at.cols.factor)),
    PixelShuffle: lambda at: nn.PixelShuffle(at.layer.factor),
    PixelUnshuffle: lambda at: nn.PixelUnshuffle(at.layer.factor),
    Norm: lambda at: NORMS[at.layer.kind](at.layer, at.channels[0]),
    Dropout: lambda at: ChannelDropout(at.name, at.layer.probability, at.layer.of_images),
    Activation: lambda at: nn.LeakyReLU(at.layer.negative_slope, inplace=at.overwrites),
    Sigmoid: lambda at: nn.Sigmoid(),
    Mark: lambda at: nn.Identity(),
    **dict.fromkeys(JOINS, lambda at: JoinModule(at.layer)),
    ImageMean: lambda at: WholeImageMean(at.layer.total),
    ImageAttention: lambda at: AttentionOverImage(at.layer, at.cols),
    ImageProducts: lambda at: WholeImageProducts(at.layer),
    ImageMax: lambda at: WholeImageMax(at.layer.even),
    Border: lambda at: resampling.BorderModule(at.layer, at.cols),
    Pixelwise: lambda at: PixelFunction(at.layer),
    OfOnePixel: lambda at: OnePixel(nn.Conv2d(at.channels[0], at.layer.out_channels, 1), at.layer),
}
