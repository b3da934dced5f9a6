"""Kinds of layers and networks that spatial peers are asked to compute, each behind a convolution of one pixel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.foreign_networks.networks import NETWORKS
from benchmarks.large_model_support.network import PlainUNet

BANDS, C, SIZE = 3, 4, (64, 96)


def unet(width: int = 8, bands: int = BANDS, classes: int = 2) -> PlainUNet:
    """Return a U-Net of torch's own layers: 3 levels, no norm."""
    return PlainUNet(3, width, bands, classes, normed=False)


def halo_free(width: int = 16) -> nn.Sequential:
    parts = nn.Conv2d(BANDS, width, 1), nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU()
    return nn.Sequential(*parts, nn.ConvTranspose2d(width, width, 2, 2), nn.ReLU(), nn.Conv2d(width, 2, 1))


COSTS: dict[str, Callable[[], nn.Module]] = {"U-Net": unet, "no halo": halo_free}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution, kernel 3": lambda: nn.Conv2d(C, C, 3, padding=1),
    "convolution, kernel 3, no padding": lambda: nn.Conv2d(C, C, 3),
    "convolution, kernel 3, reflected edge": lambda: nn.Conv2d(C, C, 3, padding=1, padding_mode="reflect"),
    "convolution, even kernel 4, `same`": lambda: nn.Conv2d(C, C, 4, padding="same"),
    "convolution, kernel 3, stride 2": lambda: nn.Conv2d(C, C, 3, 2, 1),
    "convolution, kernel 4, stride 2": lambda: nn.Conv2d(C, C, 4, 2, 1),
    "convolution, dilation 3": lambda: nn.Conv2d(C, C, 3, padding=3, dilation=3),
    "convolution of groups": lambda: nn.Conv2d(C, C, 3, padding=1, groups=C),
    "transposed, kernel 2, stride 2": lambda: nn.ConvTranspose2d(C, C, 2, 2),
    "transposed, kernel 4, stride 2": lambda: nn.ConvTranspose2d(C, C, 4, 2, 1),
    "transposed, kernel 3, stride 2, output padding": lambda: nn.ConvTranspose2d(C, C, 3, 2, 1, 1),
    "max pooling 2": lambda: nn.MaxPool2d(2),
    "max pooling 3, stride 2": lambda: nn.MaxPool2d(3, 2, 1),
    "mean pooling 2": lambda: nn.AvgPool2d(2),
    "mean pooling 3, stride 1": lambda: nn.AvgPool2d(3, 1, 1),
    "batch norm": lambda: nn.BatchNorm2d(C),
    "instance norm": lambda: nn.InstanceNorm2d(C, affine=True),
    "group norm": lambda: nn.GroupNorm(2, C),
    "resizing x 2, bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "resizing x 2, bilinear, aligned corners": lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
    "pixel unshuffle": lambda: nn.PixelUnshuffle(2),
}


class First(nn.Module):
    """A network without its further outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y = self.network(x_BCHW)
        while not isinstance(y, torch.Tensor):
            y = y[0]
        return y


def build(name: str) -> nn.Module:
    """Return a layer or network, seeded, without dropout. Raises ImportError where its package is absent."""
    torch.manual_seed(0)
    if name in LAYERS:
        module: nn.Module = nn.Sequential(nn.Conv2d(BANDS, C, 1), LAYERS[name]())
    elif name in COSTS:
        module = COSTS[name]()
    else:
        module = First(NETWORKS[name].module())
    for each in module.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd):
            each.p = 0.0
        for name, value in (("inplace", False), ("drop_prob", 0.0)):  # of stochastic depth
            if hasattr(each, name):
                setattr(each, name, value)
    return module
