"""The network that is trained: one flat sequence of modules with stash and pop skips."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.layer import Layer
from tiledseg.models.blocks import PopSkip, StashSkip, build_layer
from tiledseg.models.skip import last_pops, verify_skips


class FlatNetwork(nn.Module):
    """Layers run one after the other; a stash keeps the tensor at hand, a pop takes it up again.

    Modules are named by their layers, so a checkpoint does not depend on how the sequence is later cut or wrapped.
    """

    def __init__(self, layers: Sequence[Layer], bands: int) -> None:
        super().__init__()
        verify_skips(layers)
        self.descriptions = tuple(layers)
        self.bands = bands
        self.layers = nn.ModuleDict()
        self._last_pops = set(last_pops(layers).values())
        channels = bands
        for layer in layers:
            self.layers[layer.name.replace(".", "-")] = build_layer(layer, channels)
            channels = layer.output_channels(channels)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits of shape (B, classes, height, width) of the network's output."""
        return self.run_layers(x_BCHW, {}, 0, len(self.descriptions))

    def run_layers(self, x_BCHW: torch.Tensor, skips: dict[str, torch.Tensor], first: int, stop: int) -> torch.Tensor:
        """The output of layer `stop` - 1 from the input of layer `first`.

        `skips` holds what earlier layers have stashed for these; it is given what these stash, and loses what nobody
        pops any more.
        """
        for layer, module in islice(zip(self.descriptions, self.layers.values(), strict=True), first, stop):
            if isinstance(module, PopSkip):
                x_BCHW = module(x_BCHW, skips[module.skip])
                if layer.name in self._last_pops:
                    del skips[module.skip]
            else:
                x_BCHW = module(x_BCHW)
            if isinstance(module, StashSkip):
                skips[module.skip] = x_BCHW
        return x_BCHW


def build_unet(unet: UNet, seed: int | None = None) -> FlatNetwork:
    """A U-Net with weights drawn from `seed` alone (He's for leaky ReLU), so every rank draws the same."""
    network = FlatNetwork(unet.layers(), unet.bands)
    if seed is not None:
        _initialise(network, torch.Generator().manual_seed(seed))
    return network


def _initialise(network: nn.Module, generator: torch.Generator) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight, a=0.01, nonlinearity="leaky_relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
