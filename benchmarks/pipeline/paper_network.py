"""The networks of the paper's table: this project's presets, and the paper's own, whose decoder is half as wide."""

from __future__ import annotations

from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.config import ModelConfig
from tiledseg.geometry.layer import (
    Activation,
    Convolution,
    Dropout,
    Layer,
    MaxPool,
    Norm,
    PopConcatenate,
    Stash,
    Upsample,
)

NETWORKS = ("paper", "ours")
BANDS, CLASSES = 4, 2


def network_layers(network: str, model: str, base_channels: int) -> tuple[Layer, ...]:
    """The layers of a preset `model`, as wide as this project builds it, or as the paper did."""
    if network == "paper":
        return paper_layers(PRESETS[model].levels - 1, base_channels)
    return build_network(ModelConfig(name=model, base_channels=base_channels), BANDS, CLASSES).layers()


def paper_layers(poolings: int, base_channels: int = 64, classes: int = 1) -> tuple[Layer, ...]:
    """The paper's U-Net: as wide as ours on the way down, but half as wide on the way up, with plain upsampling.

    So is the U-Net of torchgpipe's benchmarks, on which the paper's pipeline stands: decoder level l has
    base / 2 * 2^l channels, the bottom narrows again in its last convolution.
    """

    def units(name: str, *widths: int) -> list[Layer]:
        return [
            layer
            for i, width in enumerate(widths)
            for layer in (
                Convolution(f"{name}.conv{i}", width, 3, padding=1, bias=False),
                Dropout(f"{name}.dropout{i}"),
                Norm(f"{name}.norm{i}", "instance"),
                Activation(f"{name}.act{i}"),
            )
        ]

    base, half = base_channels, base_channels // 2
    layers: list[Layer] = []
    for level in range(poolings):
        layers += units(f"down{level}", base << level, base << level)
        layers += [Stash(f"down{level}.stash", f"skip{level}"), MaxPool(f"down{level}.pool")]
    layers += units("bottom", base << poolings, half << poolings)
    for level in reversed(range(poolings)):
        layers += [Upsample(f"up{level}"), PopConcatenate(f"up{level}.pop", f"skip{level}", base << level)]
        layers += units(f"up{level}", half << level, half << level)
    return (*layers, Convolution("head", classes, 1))
