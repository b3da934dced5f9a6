"""SegNet as a value (Badrinarayanan et al., 2017): its options in, its graph out.

The encoder is the 13 convolutions of VGG-16. Each pooling keeps where its maxima lay, and the decoder, its mirror, puts
values back there: no features cross from the encoder, one byte a value does.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.errors import ConfigError
from tiledseg.geometry.convolutions import Convolution
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layer import Activation, Norm
from tiledseg.geometry.resampling import MaxIndices, MaxPool, MaxUnpool

CONVOLUTIONS = (2, 2, 3, 3, 3)  # of VGG-16, by level
WIDEST = 8  # times the first level's channels


@dataclass(frozen=True)
class SegNet:
    """`depth` levels of VGG-16's encoder, the first of `base_channels` (VGG-16: 5 and 64), and their mirror."""

    depth: int = 5
    base_channels: int = 64
    norm: str = "batch"
    bands: int = 3
    classes: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= len(CONVOLUTIONS):
            raise ConfigError(f"depth is {self.depth}; give 1 to {len(CONVOLUTIONS)}, the levels of VGG-16")

    def channels(self, level: int) -> int:
        return self.base_channels * min(WIDEST, 1 << level)

    def graph(self) -> Graph:
        """The nodes, encoder to head."""
        nodes: list[Node] = []
        for level in range(self.depth):
            nodes += self._units(f"encoder{level}", [self.channels(level)] * CONVOLUTIONS[level])
            nodes.append(Node(f"encoder{level}.indices", MaxIndices()))
            nodes.append(Node(f"encoder{level}.pool", MaxPool(), (nodes[-2].name,)))
        for level in reversed(range(self.depth)):
            unpooled = nodes[-1].name, f"encoder{level}.indices"
            nodes.append(Node(f"decoder{level}.unpool", MaxUnpool(), unpooled))
            widths = [self.channels(level)] * (CONVOLUTIONS[level] - 1)
            nodes += self._units(f"decoder{level}", [*widths, self.channels(level - 1)] if level else widths)
        return Graph((*nodes, Node("head", Convolution(self.classes, 3, padding=1))))

    def _units(self, prefix: str, widths: list[int]) -> list[Node]:
        bias = self.norm == "none"  # a norm brings its own shift
        return [
            node
            for i, width in enumerate(widths)
            for node in (
                Node(f"{prefix}.conv{i}", Convolution(width, 3, padding=1, bias=bias)),
                Node(f"{prefix}.norm{i}", Norm(self.norm)),
                Node(f"{prefix}.act{i}", Activation(0.0)),
            )
        ]
