"""G-SCNN as a value (Takikawa et al., 2019): its options and its graph.

    input -+- encoder: m1 ---- m2 ---- m3/4 ---- m4/8 ------------ m7/8       the regular stream
           |            |      |        |         |                 |
           |            |      |       gate1     gate2             gate3
           |            '------|- block -'- block -'- block --------'- edges   the shape stream, at full size
           |                   |                                      |
           '- gradients -------|----------------------- join with them, to m7's size
                               |                                      |
      scores - up - 2 convolutions - join - up - narrow - pyramid of m7, its image's mean, and edges

A gate computes a factor from 1 to 2 from the shape stream and one channel of the encoder, and multiplies the stream by
it. The pyramid (ASPP) has dilations of 12, 24 and 36 at an eighth of the size.

Differences from the published code, and their reasons:
- It uses Canny edges of the image, whose hysteresis has no limited reach and so no halo. Here each band's gradients by
  fixed filters (Sobel) are used; or, with `edge_band`, the last band, which holds edges and the encoder does not read.
- It resizes with aligned corners, where a pixel's place depends on the image's size. Here centres are aligned. Edges
  are reduced to m7's size as means of 8 x 8 pixels.
- The image's mean has one value in all pixels, which a norm over the image would turn into zero: this branch's norm is
  over a pixel's channels. Without it (`image_mean` false) and with norm none or pixel all halo modes are exact.
- Edges are scores: the loss applies the logistic function, once.

With 19 classes and an edge band these are 137,278,125 weights. The published code (github.com/nv-tlabs/GSCNN,
network/gscnn.py) has 137,278,190, of which 65 (dsn1) are never used.

Outputs: scores of classes; scores of edges; and gradients of the smoothed probabilities of classes, for the loss that
joins both tasks (see `training.objective`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiledseg.architecture.network import check_groups, check_options, unit
from tiledseg.architecture.resnet import ResNet, WideResNet, file_names
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution, FixedFilters
from tiledseg.geometry.layers.joins import Add, Concatenate, ImageMean, Multiply
from tiledseg.geometry.layers.pixelwise import Activation, FormulaSlot, Pixelwise, Sigmoid, norm_or_mark
from tiledseg.geometry.layers.resampling import AveragePool
from tiledseg.geometry.shapes import resized

Filter = tuple[tuple[float, ...], ...]

SOBEL: tuple[Filter, Filter] = (
    ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0)),
    ((-1.0, -2.0, -1.0), (0.0, 0.0, 0.0), (1.0, 2.0, 1.0)),
)
RATES = (12, 24, 36)


def smoothed_gradients(sigma: float = 1.0, reach: int = 2) -> tuple[Filter, Filter]:
    """Return filters of central differences along columns and rows, smoothed by a Gaussian over 2 `reach` + 1
    pixels."""
    weights = [math.exp(-0.5 * (at / sigma) ** 2) for at in range(-reach, reach + 1)]
    smooth = [0.0, *(weight / sum(weights) for weight in weights), 0.0]
    steep = [0.5 * (after - before) for before, after in zip([0.0, *smooth[:-1]], [*smooth[1:], 0.0], strict=True)]
    by_column = tuple(tuple(-s * w for s in steep) for w in smooth)
    return by_column, tuple(zip(*by_column, strict=True))


GRADIENTS = smoothed_gradients()
REACH = len(GRADIENTS[0]) // 2
"""Pixels on each side on which a smoothed gradient depends."""


@dataclass(frozen=True)
class GatedSCNN:
    """The options of a G-SCNN. `base_channels`: of the encoder's first layer. `edge_band`: the last band has edges."""

    encoder: str = "wide38"
    base_channels: int = 64
    norm: str = "batch"
    image_mean: bool = True
    edge_band: bool = False
    bands: int = 3
    classes: int = 2

    def __post_init__(self) -> None:
        check_options(self)
        if self.base_channels % 8:
            raise ConfigError(f"model.base_channels is {self.base_channels}; give a multiple of 8 for gated_scnn")
        if self.edge_band and self.bands < 2:
            wrong = f"model.arguments: edge_band is true, but the image has {self.bands} band"
            raise ConfigError(f"{wrong}; give an image whose last band is edges")
        check_groups(self.norm, [("the shape stream", self._narrow(2)), ("it", self._narrow(4))], self.base_channels)

    @property
    def in_words(self) -> str:
        mean = "" if self.image_mean else ", without the image's mean"
        edges = ", the last band is edges" if self.edge_band else ""
        return f"G-SCNN with encoder {self.encoder}, {self.base_channels} base channels\nnorm {self.norm}{mean}{edges}"

    @property
    def trunk(self) -> ResNet | WideResNet:
        if self.encoder == "wide38":
            return WideResNet(self.base_channels, self.norm)
        return ResNet(self.encoder, self.base_channels, self.norm, stride=8)

    @property
    def taps(self) -> tuple[int, int, int, int, int]:
        """The encoder's own numbers of m1, m2, m3, m4 and m7: modules of a wide ResNet, or layers of a ResNet."""
        return (1, 2, 3, 4, 7) if self.encoder == "wide38" else (0, 1, 1, 2, 4)

    def file_names(self, normed: bool) -> dict[str, str]:
        return file_names(self.trunk.nodes())

    def graph(self) -> Graph:
        """Return the nodes: encoder, shape stream, pyramid, decoder, and the boundaries for the loss."""
        nodes = [Node("gradients", FixedFilters(SOBEL), (INPUT,))]
        if self.edge_band:
            bands = self.bands - 1
            nodes = [
                Node("image", Pixelwise("narrow", (FormulaSlot(0), 1, 0, bands), bands), (INPUT,)),
                Node("gradients", Pixelwise("narrow", (FormulaSlot(0), 1, bands, 1), 1), (INPUT,)),
            ]
        first, *others = self.trunk.nodes()
        nodes += [Node(first.name, first.layer, ("image" if self.edge_band else INPUT,)), *others]
        for part in (self._shape_stream, self._pyramid, self._decoder):
            part(nodes)
        return Graph(tuple(nodes), ("scores", "edges", "boundaries"))

    def _narrow(self, by: int) -> int:
        return max(1, self.base_channels // by)

    def _unit(self, name: str, channels: int, kernel: int, dilation: int = 1, source: str = "") -> list[Node]:
        padding, bias = dilation * (kernel // 2), self.norm == "none"
        return unit(name, "", Convolution(channels, kernel, 1, padding, dilation, bias), self.norm, source)

    def _shape_stream(self, nodes: list[Node]) -> None:
        m1, _, *gating = (self.trunk.output(tap) for tap in self.taps)
        nodes.append(resized(nodes, "shape.input", m1, INPUT))
        width = self.base_channels
        for number, tap in enumerate(gating, start=1):
            nodes += self._block(f"res{number}", nodes[-1].name, width)
            width = max(1, width // 2)
            nodes.append(Node(f"d{number}", Convolution(width, 1)))
            nodes.append(Node(f"dsn{number}", Convolution(1, 1), (tap,)))
            nodes.append(resized(nodes, f"dsn{number}.up", f"dsn{number}", INPUT))
            nodes += self._gate(f"gate{number}", f"d{number}", f"dsn{number}.up", width)
        nodes.append(Node("edges", Convolution(1, 1, bias=False)))

    def _block(self, name: str, source: str, width: int) -> list[Node]:
        """Return two convolutions and the sum with their input."""
        first, second = self._unit(f"{name}.0", width, 3, source=source), self._unit(f"{name}.1", width, 3)[:2]
        last = Node(f"{name}.add", Add(), (f"{name}.1.norm", source)), Node(f"{name}.act", Activation(0.0))
        return [*first, *second, *last]

    def _gate(self, name: str, stream: str, gating: str, width: int) -> list[Node]:
        """Return stream * (1 + a), with a computed from the stream and `gating`; then a 1 x 1 convolution."""
        return [
            Node(f"{name}.join", Concatenate(), (stream, gating)),
            Node(f"{name}.norm0", norm_or_mark(self.norm)),
            Node(f"{name}.conv0", Convolution(width + 1, 1)),
            Node(f"{name}.act", Activation(0.0)),
            Node(f"{name}.conv1", Convolution(1, 1)),
            Node(
                f"{name}.norm1", norm_or_mark("none" if self.norm == "pixel" else self.norm)
            ),  # of one channel: its sign
            Node(f"{name}.alpha", Sigmoid()),
            Node(f"{name}.gated", Multiply(), (stream, f"{name}.alpha")),
            Node(f"{name}.sum", Add(), (f"{name}.gated", stream)),
            Node(f"{name}.conv", Convolution(width, 1, bias=False)),
        ]

    def _pyramid(self, nodes: list[Node]) -> None:
        deep, width = self.trunk.output(self.taps[4]), 4 * self.base_channels
        joined = []
        if self.image_mean:
            nodes += [
                Node("pyramid.mean", ImageMean(), (deep,)),
                Node("pyramid.mean.conv", Convolution(width, 1, bias=self.norm == "none")),
                Node("pyramid.mean.norm", norm_or_mark("none" if self.norm == "none" else "pixel")),
                Node("pyramid.mean.act", Activation(0.0)),
            ]
            joined.append("pyramid.mean.act")
        nodes += [
            Node("edges.probability", Sigmoid(), ("edges",)),
            Node("edges.join", Concatenate(), ("edges.probability", "gradients")),
            Node("edges.weigh", Convolution(1, 1, bias=False)),
            Node("edges.act", Sigmoid()),
            Node("edges.down", AveragePool(8)),
            *self._unit("pyramid.edges", width, 1),
            *self._unit("pyramid.0", width, 1, source=deep),
        ]
        for rate in RATES:
            nodes += self._unit(f"pyramid.{rate}", width, 3, rate, deep)
        joined += ["pyramid.edges.act", "pyramid.0.act", *(f"pyramid.{rate}.act" for rate in RATES)]
        nodes.append(Node("pyramid", Concatenate((0,) * len(joined)), tuple(joined)))
        nodes.append(Node("pyramid.narrow", Convolution(width, 1, bias=False)))

    def _decoder(self, nodes: list[Node]) -> None:
        fine, width = self.trunk.output(self.taps[1]), 4 * self.base_channels
        nodes.append(Node("fine", Convolution(3 * self.base_channels // 4, 1, bias=False), (fine,)))
        nodes.append(resized(nodes, "pyramid.up", "pyramid.narrow", "fine"))
        nodes.append(Node("decoder.join", Concatenate(), ("fine", "pyramid.up")))
        nodes += [*self._unit("decoder.0", width, 3), *self._unit("decoder.1", width, 3)]
        nodes.append(Node("decoder.head", Convolution(self.classes, 1, bias=False)))
        nodes.append(resized(nodes, "scores", "decoder.head", INPUT))
        nodes.append(Node("probabilities", Pixelwise("softmax", (FormulaSlot(0), 1), self.classes), ("scores",)))
        nodes.append(Node("boundaries", FixedFilters(GRADIENTS)))
