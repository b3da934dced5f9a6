"""The networks of the paper's table: this project's presets, and the paper's own, whose decoder is half as wide."""

from __future__ import annotations

from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.config.run import ModelConfig
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Concatenate
from tiledseg.geometry.layers.pixelwise import Activation, Mark, Norm
from tiledseg.geometry.layers.resampling import MaxPool, Upsample

NETWORKS = ("paper", "ours")
BANDS, CLASSES = 4, 2


def network_graph(network: str, model: str, base_channels: int) -> Graph:
    """The graph of a preset `model`, as wide as this project builds it, or as the paper did."""
    if network == "paper":
        return paper_graph(PRESETS[model].levels - 1, base_channels)
    return build_network(ModelConfig(name=model, base_channels=base_channels), BANDS, CLASSES).graph()


def paper_graph(poolings: int, base_channels: int = 64, classes: int = 1) -> Graph:
    """The paper's U-Net: as wide as ours on the way down, but half as wide on the way up, with plain upsampling.

    So is the U-Net of torchgpipe's benchmarks, on which the paper's pipeline stands: decoder level l has
    base / 2 * 2^l channels, the bottom narrows again in its last convolution.
    """

    def units(name: str, *widths: int) -> list[Node]:
        return [
            Node(f"{name}.{kind}{i}", layer)
            for i, width in enumerate(widths)
            for kind, layer in (
                ("conv", Convolution(width, 3, padding=1, bias=False)),
                ("dropout", Mark()),
                ("norm", Norm("instance")),
                ("act", Activation()),
            )
        ]

    base, half = base_channels, base_channels // 2
    nodes: list[Node] = []
    for level in range(poolings):
        nodes += units(f"down{level}", base << level, base << level)
        nodes += [Node(f"down{level}.stash", Mark()), Node(f"down{level}.pool", MaxPool())]
    nodes += units("bottom", base << poolings, half << poolings)
    for level in reversed(range(poolings)):
        taken = f"down{level}.stash", f"up{level}"
        nodes += [Node(f"up{level}", Upsample()), Node(f"up{level}.pop", Concatenate(), taken)]
        nodes += units(f"up{level}", half << level, half << level)
    return Graph((*nodes, Node("head", Convolution(classes, 1))))
