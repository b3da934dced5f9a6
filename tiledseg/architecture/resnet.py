"""ResNet encoders (He et al., 2016) as runs of nodes. Names are those of torchvision's modules, so its files fit.

A block is `layerI.J`: convolutions, each with its norm, and a sum with the shortcut, which is projected if the block
changes size or channels. ResNet-18 and 34 have blocks of two 3 x 3 convolutions. ResNet-50 has bottlenecks of 1 x 1,
3 x 3 (with the stride) and 1 x 1 convolutions, the last with four times as many channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.architecture.network import groups_of
from tiledseg.geometry.graph import INPUT, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Add
from tiledseg.geometry.layers.pixelwise import Activation, Dropout, Mark, norm_or_mark
from tiledseg.geometry.layers.resampling import MaxPool

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}  # of layer1 to layer4


@dataclass(frozen=True)
class ResNet:
    """A ResNet encoder: `encoder` is a key of `BLOCKS`.

    `stride`: of its deepest tensor: 32, or 8 with dilations in place of the strides of layer3 and layer4 (Yu et al.,
    2017).
    """

    encoder: str
    base_channels: int
    norm: str
    stride: int = 32

    @property
    def expansion(self) -> int:
        return 4 if self.encoder == "resnet50" else 1

    def channels(self, layer: int) -> int:
        """Return the channels of `layer` 1 to 4; 0 is the stem."""
        return self.base_channels * (1 if layer == 0 else self.expansion << (layer - 1))

    def output(self, layer: int) -> str:
        """Return the name of the last node of `layer`; 0 is the stem, before its pooling."""
        return "relu" if layer == 0 else f"layer{layer}.{BLOCKS[self.encoder][layer - 1] - 1}.relu"

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes from the network's input to the output of layer4."""
        yield Node("conv1", Convolution(self.base_channels, 7, 2, 3, bias=self.has_bias), (INPUT,))
        yield self.normed("bn1", self.base_channels)
        yield Node("relu", Activation(0.0))
        yield Node("maxpool", MaxPool(3, 2, 1))
        channels, last = self.base_channels, "maxpool"
        for layer in range(1, 5):
            stride, dilation = 1 if layer == 1 else 2, 1
            if self.stride == 8 and layer > 2:
                stride, dilation = 1, 1 << (layer - 2)
            for block in range(BLOCKS[self.encoder][layer - 1]):
                # torchvision's first block keeps the dilation of the layer before, as DRN's do.
                before = max(1, dilation // 2) if block == 0 else dilation
                steps = stride if block == 0 else 1, before
                yield from self._block(f"layer{layer}.{block}", last, channels, self.channels(layer), *steps)
                channels, last = self.channels(layer), f"layer{layer}.{block}.relu"

    @property
    def has_bias(self) -> bool:
        """True without a norm, which would have its own shift."""
        return self.norm == "none"

    def normed(self, name: str, channels: int) -> Node:
        return Node(name, norm_or_mark(self.norm, groups_of(channels)))

    def _block(self, name: str, source: str, channels: int, made: int, stride: int, dilation: int) -> Iterator[Node]:
        narrow = made // self.expansion
        kernels = [(1, narrow), (3, narrow), (1, made)] if self.expansion > 1 else [(3, narrow), (3, made)]
        strided = 1 if self.expansion > 1 else 0  # the convolution that has the stride
        for i, (kernel, width) in enumerate(kernels):
            step, reach = stride if i == strided else 1, dilation if kernel == 3 else 1
            layer = Convolution(width, kernel, step, reach * (kernel // 2), reach, bias=self.has_bias)
            yield Node(f"{name}.conv{i + 1}", layer, (source,) if i == 0 else ())
            yield self.normed(f"{name}.bn{i + 1}", width)
            if i + 1 < len(kernels):
                yield Node(f"{name}.relu{i + 1}", Activation(0.0))
        body = shortcut = f"{name}.bn{len(kernels)}"
        if stride > 1 or channels != made:
            yield Node(f"{name}.downsample.0", Convolution(made, 1, stride, bias=self.has_bias), (source,))
            yield self.normed(f"{name}.downsample.1", made)
            shortcut = f"{name}.downsample.1"
        yield Node(f"{name}.add", Add(), (body, shortcut if shortcut != body else source))
        yield Node(f"{name}.relu", Activation(0.0))


def file_names(nodes: Iterator[Node]) -> dict[str, str]:
    """Return the names of nodes with weights, by themselves: they are torchvision's."""
    return {node.name: node.name for node in nodes if node.layer.counts(1).weights}


class Module(NamedTuple):
    """A module of `blocks` blocks, whose convolutions have `widths` times the base channels; the first has the
    stride."""

    blocks: int
    widths: tuple[int, ...]
    pooled: bool = False
    stride: int = 1
    dilation: int = 1
    dropout: float | None = None


MODULES = {
    2: Module(3, (2, 2), pooled=True),
    3: Module(3, (4, 4), pooled=True),
    4: Module(6, (8, 8), stride=2),
    5: Module(3, (8, 16), dilation=2),
    6: Module(1, (8, 16, 32), dilation=4, dropout=0.3),
    7: Module(1, (16, 32, 64), dilation=4, dropout=0.5),
}


@dataclass(frozen=True)
class WideResNet:
    """A wide ResNet-38 encoder. `base_channels`: of the first convolution, 64 in the published one."""

    base_channels: int
    norm: str

    def channels(self, module: int) -> int:
        return self.base_channels * (MODULES[module].widths[-1] if module > 1 else 1)

    def output(self, module: int) -> str:
        """Return the name of the last node of `module`, 1 to 7."""
        return "mod1.conv1" if module == 1 else f"mod{module}.block{MODULES[module].blocks}.add"

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes from the network's input to the output of module 7."""
        yield Node("mod1.conv1", self._convolution(1, 3), (INPUT,))
        before = 1
        for number, module in MODULES.items():
            if module.pooled:
                yield Node(f"pool{number}", MaxPool(3, 2, 1))
            for block in range(1, module.blocks + 1):
                yield from self._block(f"mod{number}.block{block}", module, before, block == 1)
                before = module.widths[-1]

    def normed(self, name: str, channels: int) -> list[Node]:
        return [Node(f"{name}.0", norm_or_mark(self.norm, groups_of(channels))), Node(f"{name}.1", Activation(0.0))]

    def _convolution(self, width: int, kernel: int, stride: int = 1, dilation: int = 1) -> Convolution:
        padding = dilation * (kernel // 2)
        return Convolution(width * self.base_channels, kernel, stride, padding, dilation, bias=self.norm == "none")

    def _block(self, name: str, module: Module, before: int, is_first: bool) -> Iterator[Node]:
        stride = module.stride if is_first else 1
        projected = stride > 1 or before != module.widths[-1]
        yield Node(f"{name}.input", Mark())
        yield from self.normed(f"{name}.bn1", before * self.base_channels)
        kernels = (1, 3, 1) if len(module.widths) == 3 else (3, 3)
        last = f"{name}.convs.conv{len(kernels)}"
        for i, (kernel, width) in enumerate(zip(kernels, module.widths, strict=True), start=1):
            dilation = module.dilation if kernel == 3 else 1
            if i == len(kernels) and module.dropout is not None:
                yield Node(f"{name}.convs.dropout", Dropout(module.dropout))
            yield Node(f"{name}.convs.conv{i}", self._convolution(width, kernel, stride if i == 1 else 1, dilation))
            if i < len(kernels):
                yield from self.normed(f"{name}.convs.bn{i + 1}", width * self.base_channels)
        shortcut = f"{name}.input"
        if projected:
            shortcut = f"{name}.proj_conv"
            yield Node(shortcut, self._convolution(module.widths[-1], 1, stride), (f"{name}.bn1.1",))
        yield Node(f"{name}.add", Add(), (last, shortcut))
