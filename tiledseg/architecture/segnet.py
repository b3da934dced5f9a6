"""SegNet as a value (Badrinarayanan et al., 2017): its options and its graph.

    input - 2 convolutions - pool - 2 - pool - 3 - pool - 3 - pool - 3 - pool
                              | indices  |          |          |          |
     head - 1 ---------- unpool - 2 - unpool - 3 - unpool - 3 - unpool - 3 - unpool

The encoder is the 13 convolutions of VGG-16. Each pooling gives the places of its maxima, at which the mirrored decoder
puts its values: no features are skipped to the decoder, only a byte for each value.

Convolutions have biases, before norms too, as in the published network: 29,449,355 weights with batch norm, 3 bands and
11 classes (29.46 M by Paszke et al., 2016, ENet, table 5). A norm cancels such a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.architecture.network import check_groups, check_options, unit
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.resampling import MaxIndices, MaxPool, MaxUnpool

CONVOLUTIONS = (2, 2, 3, 3, 3)  # of VGG-16, by level
WIDEST = 8  # times the first level's channels


@dataclass(frozen=True)
class SegNet:
    """A SegNet's options: `levels` of VGG-16's encoder, the first of `base_channels`, and their mirror."""

    levels: int = 5
    base_channels: int = 64
    norm: str = "batch"
    bands: int = 3
    classes: int = 2

    def __post_init__(self) -> None:
        check_options(self)
        if self.levels > len(CONVOLUTIONS):
            raise ConfigError(
                f"model.levels is {self.levels}; give 1 to {len(CONVOLUTIONS)} for segnet, the levels of VGG-16"
            )
        widths = [(f"level {level}", self.channels(level)) for level in range(self.levels)]
        check_groups(self.norm, widths, self.base_channels)

    @property
    def in_words(self) -> str:
        return f"SegNet of {self.levels} levels, {self.base_channels} base channels\nnorm {self.norm}"

    def channels(self, level: int) -> int:
        return self.base_channels * min(WIDEST, 1 << level)

    def graph(self) -> Graph:
        nodes: list[Node] = []
        for level in range(self.levels):
            nodes += self._units(f"encoder{level}", [self.channels(level)] * CONVOLUTIONS[level])
            nodes.append(Node(f"encoder{level}.indices", MaxIndices()))
            nodes.append(Node(f"encoder{level}.pool", MaxPool(), (nodes[-2].name,)))
        for level in reversed(range(self.levels)):
            unpooled = nodes[-1].name, f"encoder{level}.indices"
            nodes.append(Node(f"decoder{level}.unpool", MaxUnpool(), unpooled))
            widths = [self.channels(level)] * (CONVOLUTIONS[level] - 1)
            nodes += self._units(f"decoder{level}", [*widths, self.channels(level - 1)] if level else widths)
        return Graph((*nodes, Node("head", Convolution(self.classes, 3, padding=1))))

    def file_names(self, normed: bool) -> dict[str, str]:
        """Return VGG-16's names, which number convolutions, norms (if `normed`), activations and poolings."""
        names, number = {}, 0
        for level in range(self.levels):
            for i in range(CONVOLUTIONS[level]):
                names[f"encoder{level}.conv{i}"] = f"features.{number}"
                if self.norm == "batch" and normed:
                    names[f"encoder{level}.norm{i}"] = f"features.{number + 1}"
                number += 3 if normed else 2
            number += 1
        return names

    def _units(self, prefix: str, widths: list[int]) -> list[Node]:
        layers = [Convolution(width, 3, padding=1) for width in widths]
        return [node for i, layer in enumerate(layers) for node in unit(prefix, i, layer, self.norm)]
