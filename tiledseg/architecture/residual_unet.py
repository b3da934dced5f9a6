"""A U-Net whose encoder is a ResNet, as a value: its options and its graph.

    input - stem/2 - layer1/4 - layer2/8 - layer3/16 - layer4/32
             |          |         |          |            |
    head -  up  -----  up  ----- up  ------ up  <---------'

Each step up doubles the size, concatenates the encoder's tensor of that size (the last step none), and convolves twice
(3 x 3). The decoder has 4, 2, 1, 1/2 and 1/4 times the base channels: 256, 128, 64, 32, 16, as in
`segmentation_models_pytorch` (Iakubovskii, 2019), which has 24,436,369 weights for ResNet-34, 3 bands and 1 class.
Strided 1 x 1 shortcuts keep every other pixel, so sizes are halved five times and the alignment is 32.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.architecture.network import check_groups, check_options, unit
from tiledseg.architecture.resnet import BLOCKS, ResNet, file_names
from tiledseg.config.checks import one_of
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution, TransposedConvolution
from tiledseg.geometry.layers.joins import Concatenate
from tiledseg.geometry.layers.resampling import Upsample

STEPS = 5


@dataclass(frozen=True)
class ResidualUNet:
    """The options of a residual U-Net. `base_channels`: of the stem (64 in the published encoders)."""

    encoder: str = "resnet34"
    base_channels: int = 64
    norm: str = "batch"
    upsampling: str = "nearest"
    bands: int = 3
    classes: int = 2

    def __post_init__(self) -> None:
        check_options(self)
        one_of("model.encoder", self.encoder, tuple(BLOCKS))
        widths = [(f"decoder{step}", self.channels(step)) for step in range(STEPS)]
        check_groups(self.norm, [("the encoder's first layer", self.base_channels), *widths], self.base_channels)

    @property
    def in_words(self) -> str:
        return (
            f"residual U-Net with encoder {self.encoder}, {self.base_channels} base channels\n"
            f"upsampling {self.upsampling}, norm {self.norm}"
        )

    @property
    def resnet(self) -> ResNet:
        return ResNet(self.encoder, self.base_channels, self.norm)

    def channels(self, step: int) -> int:
        """Return the channels of the decoder at `step`, at the input's size divided by 2^step."""
        return max(1, self.base_channels << step >> 2)

    def file_names(self, normed: bool) -> dict[str, str]:
        return file_names(self.resnet.nodes())

    def graph(self) -> Graph:
        nodes = list(self.resnet.nodes())
        for step in reversed(range(STEPS)):
            name, channels = f"decoder{step}", self.channels(step)
            is_transposed = self.upsampling == "transposed"
            nodes.append(
                Node(f"{name}.up", TransposedConvolution(channels) if is_transposed else Upsample(self.upsampling))
            )
            if step:
                nodes.append(Node(f"{name}.join", Concatenate(), (self.resnet.output(step - 1), f"{name}.up")))
            for i in range(2):
                nodes += unit(name, i, Convolution(channels, 3, padding=1, bias=self.resnet.has_bias), self.norm)
        return Graph((*nodes, Node("head", Convolution(self.classes, 3, padding=1))))
