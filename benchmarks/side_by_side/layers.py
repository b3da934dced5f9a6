"""Kinds of layers and networks that spatial peers are asked to compute, each behind a convolution of one pixel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import nn
from torch.nn import functional

import tiledseg
from benchmarks.foreign_networks.networks import NETWORKS
from benchmarks.large_model_support.network import PlainUNet

BANDS, WIDTH, SIZE = 3, 4, (64, 96)


class Windows(nn.Module):
    """Attention within windows of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x_BCHW.shape
        x = x_BCHW.permute(0, 2, 3, 1).reshape(batch, height // 8, 8, width // 8, 8, channels)
        q, k, v = self.mix(x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 64, 1, channels)).transpose(1, 2).chunk(3, -1)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y = y.reshape(batch, height // 8, width // 8, 8, 8, channels).permute(0, 1, 3, 2, 4, 5)
        return y.reshape(batch, height, width, channels).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Attention of all pixels to all pixels, after a stride of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.mix = nn.Conv2d(WIDTH, WIDTH, 4, 4), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = self.patches(x_BCHW)
        x = x_BCHW.flatten(2).transpose(1, 2)
        q, k, v = self.mix(x).reshape(*x.shape[:2], 3, 1, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return y.transpose(1, 2).reshape(x_BCHW.shape)


class Squeeze(nn.Module):
    """Channels weighted by their means over the image."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW * functional.adaptive_avg_pool2d(x_BCHW, 1).sigmoid()


def unet(width: int = 8, bands: int = BANDS, classes: int = 2) -> PlainUNet:
    """Return a U-Net of torch's own layers: 3 levels, no norm."""
    return PlainUNet(3, width, bands, classes, normed=False)


def norm_chain(width: int = 16) -> nn.Sequential:
    parts = (
        (nn.Conv2d(bands, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()) for bands in (BANDS, *[width] * 7)
    )
    return nn.Sequential(*chain.from_iterable(parts))


def halo_free(width: int = 16) -> nn.Sequential:
    parts = nn.Conv2d(BANDS, width, 1), nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU()
    return nn.Sequential(*parts, nn.ConvTranspose2d(width, width, 2, 2), nn.ReLU(), nn.Conv2d(width, 2, 1))


COSTS: dict[str, Callable[[], nn.Module]] = {
    "convolutions, group norms": norm_chain,
    "U-Net": unet,
    "no halo": halo_free,
}
tiledseg.declare(Windows, tiledseg.Windows(8))  # tracing knows the windows of published packages alone
C = WIDTH
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution, kernel 3": lambda: nn.Conv2d(C, C, 3, padding=1),
    "convolution, kernel 7": lambda: nn.Conv2d(C, C, 7, padding=3),
    "convolution, kernel 3, no padding": lambda: nn.Conv2d(C, C, 3),
    "convolution, kernel 3, reflected edge": lambda: nn.Conv2d(C, C, 3, padding=1, padding_mode="reflect"),
    "convolution, even kernel 4, `same`": lambda: nn.Conv2d(C, C, 4, padding="same"),
    "convolution, kernel 3, stride 2": lambda: nn.Conv2d(C, C, 3, 2, 1),
    "convolution, kernel 4, stride 2": lambda: nn.Conv2d(C, C, 4, 2, 1),
    "convolution, kernel 5, stride 4": lambda: nn.Conv2d(C, C, 5, 4, 2),
    "convolution, dilation 3": lambda: nn.Conv2d(C, C, 3, padding=3, dilation=3),
    "convolution of groups": lambda: nn.Conv2d(C, C, 3, padding=1, groups=C),
    "transposed, kernel 2, stride 2": lambda: nn.ConvTranspose2d(C, C, 2, 2),
    "transposed, kernel 4, stride 2": lambda: nn.ConvTranspose2d(C, C, 4, 2, 1),
    "transposed, kernel 3, stride 2, output padding": lambda: nn.ConvTranspose2d(C, C, 3, 2, 1, 1),
    "max pooling 2": lambda: nn.MaxPool2d(2),
    "max pooling 3, stride 2": lambda: nn.MaxPool2d(3, 2, 1),
    "mean pooling 2": lambda: nn.AvgPool2d(2),
    "mean pooling 3, stride 1": lambda: nn.AvgPool2d(3, 1, 1),
    "mean of the image (squeeze)": Squeeze,
    "batch norm": lambda: nn.BatchNorm2d(C),
    "instance norm": lambda: nn.InstanceNorm2d(C, affine=True),
    "group norm": lambda: nn.GroupNorm(2, C),
    "resizing x 2, nearest": lambda: nn.Upsample(scale_factor=2),
    "resizing x 2, bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "resizing x 2, bilinear, aligned corners": lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
    "pixel unshuffle": lambda: nn.PixelUnshuffle(2),
    "attention in windows of 8": Windows,
    "attention over the image": Attention,
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
        module: nn.Module = nn.Sequential(nn.Conv2d(BANDS, WIDTH, 1), LAYERS[name]())
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
