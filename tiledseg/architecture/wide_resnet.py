"""The wide ResNet-38 of Wu et al. (2019) as a run of nodes, in the form that G-SCNN's published code takes.

Blocks activate first: norm and activation stand before each convolution, and the sum ends the block. The shortcut is
projected, from the activated tensor, where channels change. Modules are named as in that code, so its files fit. One
convolution comes first, then two poolings, each before a module, and one module that halves the size. Dilations of 2
and 4 follow, so the deepest tensor has an eighth of the size. The last two modules are bottlenecks, and drop channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.geometry.graph import INPUT, Node
from tiledseg.geometry.layers.activations import Activation, Dropout, Mark
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Add
from tiledseg.geometry.layers.norms import Norm
from tiledseg.geometry.layers.resampling import MaxPool


class Module(NamedTuple):
    """A module: `blocks` of convolutions with so many times the base channels; the first one has the stride."""

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
    """A wide ResNet-38. `base_channels`: of the first convolution, 64 in the published one."""

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
        return [
            Node(f"{name}.0", Norm(self.norm, groups=min(8, channels))),
            Node(f"{name}.1", Activation(0.0)),
        ]

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
