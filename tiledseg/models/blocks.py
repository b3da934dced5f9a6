"""From a layer's description to the torch module that computes it."""

from __future__ import annotations

import torch
from torch import nn

from tiledseg.geometry.layer import (
    Activation,
    Convolution,
    Dropout,
    Layer,
    MaxPool,
    Norm,
    PopConcatenate,
    Stash,
    TransposedConvolution,
    Upsample,
)
from tiledseg.models import upsample
from tiledseg.models.convolution import SteadyConvolution
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.norm import BatchNorm, GroupNorm, InstanceNorm, PixelNorm


class StashSkip(nn.Module):
    """Marks where the sequence keeps its tensor; the sequence itself holds it."""

    def __init__(self, skip: str) -> None:
        super().__init__()
        self.skip = skip

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW


class PopSkip(nn.Module):
    """Concatenates a stashed tensor, cropped by `crop` pixels a side, before the input, along channels."""

    def __init__(self, skip: str, crop: int) -> None:
        super().__init__()
        self.skip = skip
        self.crop = crop

    def forward(self, x_BCHW: torch.Tensor, skip_BCHW: torch.Tensor) -> torch.Tensor:
        if self.crop:
            skip_BCHW = skip_BCHW[:, :, self.crop : -self.crop, self.crop : -self.crop]
        return torch.cat([skip_BCHW, x_BCHW], dim=1)


def build_layer(layer: Layer, channels: int) -> nn.Module:
    """The module of one layer that takes `channels` channels."""
    match layer:
        case Convolution():
            return SteadyConvolution(
                channels,
                layer.out_channels,
                layer.kernel,
                stride=layer.stride,
                padding=layer.padding,
                dilation=layer.dilation,
                bias=layer.bias,
            )
        case TransposedConvolution():
            return nn.ConvTranspose2d(channels, layer.out_channels, layer.kernel, stride=layer.kernel, bias=layer.bias)
        case MaxPool():
            return nn.MaxPool2d(layer.kernel)
        case Upsample():
            align = None if layer.mode == "nearest" else False
            return upsample.Upsample(scale_factor=layer.factor, mode=layer.mode, align_corners=align)
        case Norm():
            return _build_norm(layer, channels)
        case Dropout():
            return ChannelDropout(layer.name, layer.probability)
        case Activation():
            return nn.LeakyReLU(layer.negative_slope, inplace=True)
        case Stash():
            return StashSkip(layer.skip)
        case PopConcatenate():
            return PopSkip(layer.skip, layer.crop)
    raise TypeError(f"no module for the layer description {type(layer).__name__}; add it to build_layer")


def _build_norm(layer: Norm, channels: int) -> nn.Module:
    match layer.kind:
        case "none":
            return nn.Identity()
        case "pixel":
            return PixelNorm(channels)
        case "instance":
            return InstanceNorm(channels, affine=True)
        case "group":
            return GroupNorm(layer.groups, channels)
        case "batch":
            return BatchNorm(channels)
    raise TypeError(f"no module for the norm '{layer.kind}'; add it to build_layer")
