"""From the layers of a flat network to those that compute a rank's part; what cannot be exact is refused by name.

The converted network shares weights and buffers with the original, under the original's names: optimizers and
checkpoints keep to that and do not know how the image is spread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tiledseg.comm.axes import Axes
from tiledseg.errors import ConfigError
from tiledseg.geometry.layer import Activation, Layer, PopConcatenate, Stash
from tiledseg.models.blocks import PopSkip, StashSkip
from tiledseg.models.convolution import SteadyConvolution
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.norm import BatchNorm, GroupNorm, InstanceNorm, PixelNorm
from tiledseg.models.unet import FlatNetwork
from tiledseg.models.upsample import Upsample
from tiledseg.spatial.conv import SpatialConvolution, SpatialTransposedConvolution
from tiledseg.spatial.norm import SpatialBatchNorm, SpatialNorm
from tiledseg.spatial.place import Place, SpatialLayer
from tiledseg.spatial.pool import SpatialAveragePool, SpatialMaxPool
from tiledseg.spatial.upsample import SpatialUpsample

# No pixel of their output looks at another: they compute a block as they compute an image. These are zero at zero.
ZERO_AT_ZERO = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Hardswish,
    ChannelDropout,
)
POINTWISE = (*ZERO_AT_ZERO, nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardsigmoid, PixelNorm)

REASONS: dict[type[nn.Module], str] = {
    nn.Dropout: "draws its numbers by the order of calls, which the tiling changes; use ChannelDropout",
    nn.Dropout2d: "draws its numbers by the order of calls, which the tiling changes; use ChannelDropout",
    nn.AlphaDropout: "draws its numbers by the order of calls, which the tiling changes; use ChannelDropout",
    nn.RReLU: "draws its slopes by the order of calls, which the tiling changes; use LeakyReLU",
    nn.LayerNorm: "takes statistics over a fixed size of image; use GroupNorm with one group, or PixelNorm",
    nn.SyncBatchNorm: "takes statistics over all ranks, also those of other images; use BatchNorm2d",
    nn.AdaptiveAvgPool2d: "makes an output of a fixed size from the whole image; use AvgPool2d",
    nn.AdaptiveMaxPool2d: "makes an output of a fixed size from the whole image; use MaxPool2d",
    nn.Flatten: "gives up rows and columns, by which the image is spread; use 1 x 1 convolutions",
    nn.Linear: "mixes the last dim, which is the image's columns; use a 1 x 1 convolution",
}


class Pointwise:
    """A layer that is the same on any block."""

    fill = 0.0

    def __init__(self, name: str, module: nn.Module) -> None:
        self.module = module
        kind = Activation if isinstance(module, ZERO_AT_ZERO) else Layer
        self.descriptions: tuple[Layer, Layer] = kind(name), kind(name)

    def __call__(self, x_BCHW: torch.Tensor, place: Place) -> torch.Tensor:
        result: torch.Tensor = self.module(x_BCHW)
        return result


class SkipMark(Pointwise):
    """Where the network keeps a tensor for later."""

    def __init__(self, name: str, module: StashSkip) -> None:
        super().__init__(name, module)
        self.skip = module.skip
        self.descriptions = Stash(name, module.skip), Stash(name, module.skip)


class SkipConcatenation:
    """Concatenates the skip's window, cut to the input's, before the input."""

    fill = 0.0

    def __init__(self, name: str, module: PopSkip) -> None:
        self.skip = module.skip
        pop = PopConcatenate(name, module.skip, 0, module.crop)
        self.descriptions: tuple[Layer, Layer] = pop, pop

    def __call__(self, x_BCHW: torch.Tensor, place: Place) -> torch.Tensor:
        raise TypeError("a concatenation takes two tensors: use join")

    @staticmethod
    def join(x_BCHW: torch.Tensor, skip_BCHW: torch.Tensor) -> torch.Tensor:
        """The two tensors, which cover the same pixels, along channels."""
        return torch.cat([skip_BCHW, x_BCHW], dim=1)


@dataclass(frozen=True)
class ConvertedLayers:
    """A network's layers, ready for a block, and their geometry along rows and along columns."""

    layers: tuple[SpatialLayer, ...]
    rows: tuple[Layer, ...]
    cols: tuple[Layer, ...]


def convert_layers(network: FlatNetwork | nn.Sequential, axes: Axes) -> ConvertedLayers:
    """Convert every layer of a flat network, or raise one ConfigError that names each that cannot be, and why."""
    layers: list[SpatialLayer] = []
    faults: list[str] = []
    for name, module in named_layers(network):
        try:
            layers.append(convert_layer(name, module, axes))
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(f"the network cannot be spread over ranks: {'; '.join(faults)}; or use parallel.halo read")
    rows, cols = (tuple(layer.descriptions[dim] for layer in layers) for dim in (0, 1))
    return ConvertedLayers(tuple(layers), rows, cols)


def named_layers(network: FlatNetwork | nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """The layers in order, with the names that messages call them by."""
    if isinstance(network, FlatNetwork):
        yield from zip((d.name for d in network.descriptions), network.layers.values(), strict=True)
    else:
        yield from network.named_children()


def convert_layer(name: str, module: nn.Module, axes: Axes) -> SpatialLayer:
    """The spatial twin of one layer. Raises ConfigError, with its name and the reason, where there is none.

    Exact types only: a subclass may compute anything.
    """
    kind = type(module)
    if kind in (nn.Conv2d, SteadyConvolution):
        return SpatialConvolution(name, module)  # type: ignore[arg-type]
    if kind is nn.ConvTranspose2d:
        return SpatialTransposedConvolution(name, module)  # type: ignore[arg-type]
    if kind is nn.MaxPool2d:
        return SpatialMaxPool(name, module)  # type: ignore[arg-type]
    if kind is nn.AvgPool2d:
        return SpatialAveragePool(name, module)  # type: ignore[arg-type]
    if kind in (nn.Upsample, Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d):
        return SpatialUpsample(name, module)  # type: ignore[arg-type]
    if kind in (nn.BatchNorm2d, BatchNorm):
        return SpatialBatchNorm(name, "batch", module, axes)  # type: ignore[arg-type]
    if kind in (nn.GroupNorm, GroupNorm):
        return SpatialNorm(name, "group", module, axes)  # type: ignore[arg-type]
    if kind in (nn.InstanceNorm2d, InstanceNorm):
        return SpatialNorm(name, "instance", module, axes)  # type: ignore[arg-type]
    if kind is StashSkip:
        return SkipMark(name, module)  # type: ignore[arg-type]
    if kind is PopSkip:
        return SkipConcatenation(name, module)  # type: ignore[arg-type]
    if kind in POINTWISE:
        return Pointwise(name, module)
    reason = REASONS.get(kind, "is not known to give the same result on a part of the image as on all of it")
    raise ConfigError(f"layer '{name}' ({kind.__name__}) {reason}")
