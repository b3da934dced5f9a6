"""The U-Net as a value: its options and its graph.

Level l has base_channels * 2^l channels. A convolution unit is always four layers (convolution, dropout, norm,
activation), even if one does nothing, so a balance list fits all options: N = 4 n (2D + 1) + 4D + 1 layers for n units
a level and D = L - 1 poolings.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.architecture.network import check_groups, check_options, groups_of
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution, TransposedConvolution
from tiledseg.geometry.layers.joins import Concatenate
from tiledseg.geometry.layers.pixelwise import Activation, Dropout, Mark, norm_or_mark
from tiledseg.geometry.layers.resampling import MaxPool, Upsample


@dataclass(frozen=True)
class UNet:
    """The options of a U-Net for `bands` input bands and `classes` output classes."""

    levels: int = 5
    convs_per_level: int = 2
    kernel: int = 3
    base_channels: int = 64
    padding: str = "same"
    norm: str = "none"
    upsampling: str = "transposed"
    dropout: float = 0.0
    bands: int = 4
    classes: int = 2

    def __post_init__(self) -> None:
        check_options(self)
        if self.kernel % 2 == 0:
            raise ConfigError(f"model.kernel is {self.kernel}, an even number that shifts the image; give an odd one")
        widths = [(f"level {level}", self.channels(level)) for level in range(self.levels)]
        check_groups(self.norm, widths, self.base_channels)

    @property
    def in_words(self) -> str:
        return (
            f"U-Net of {self.levels} levels, {self.convs_per_level} convolutions a level, kernel {self.kernel} x "
            f"{self.kernel}, {self.base_channels} base channels\n"
            f"padding {self.padding}, upsampling {self.upsampling}, norm {self.norm}"
        )

    def channels(self, level: int) -> int:
        return self.base_channels << level

    def graph(self) -> Graph:
        """Return the nodes, encoder to head. A mark keeps each level's output for the way up."""
        bottom = self.levels - 1
        shrink = 0 if self.padding == "same" else self.convs_per_level * (self.kernel - 1)  # each side, by a level
        crop = shrink  # each side of a skip: as the levels below shrink it
        nodes: list[Node] = []
        for level in range(bottom):
            nodes += self._units(f"encoder{level}", level)
            nodes += [Node(f"encoder{level}.stash", Mark()), Node(f"encoder{level}.pool", MaxPool())]
        nodes += self._units("bottom", bottom)
        for level in reversed(range(bottom)):
            is_transposed = self.upsampling == "transposed"
            layer = TransposedConvolution(self.channels(level)) if is_transposed else Upsample(self.upsampling)
            up = Node(f"decoder{level}.up", layer)
            skipped = f"encoder{level}.stash", up.name
            nodes += [up, Node(f"decoder{level}.pop", Concatenate((crop, 0)), skipped)]
            nodes += self._units(f"decoder{level}", level)
            crop = 2 * (crop + shrink)
        return Graph((*nodes, Node("head", Convolution(self.classes, 1))))

    def _units(self, prefix: str, level: int) -> list[Node]:
        channels = self.channels(level)
        padding = self.kernel // 2 if self.padding == "same" else 0
        bias = self.norm == "none"  # a norm brings its own shift
        units: list[Node] = []
        for i in range(self.convs_per_level):
            units += [
                Node(f"{prefix}.conv{i}", Convolution(channels, self.kernel, padding=padding, bias=bias)),
                Node(f"{prefix}.dropout{i}", Dropout(self.dropout) if self.dropout else Mark()),
                Node(f"{prefix}.norm{i}", norm_or_mark(self.norm, groups_of(channels))),
                Node(f"{prefix}.act{i}", Activation()),
            ]
        return units
