"""A small network that has every layer: what the U-Net does not need is held to the same laws."""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution, FixedFilters, TransposedConvolution
from tiledseg.geometry.layers.joins import Add, Concatenate, ImageMax, ImageMean, ImageProducts, Multiply
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import (
    Activation,
    Dropout,
    FormulaSlot,
    Layout,
    Mark,
    OfOnePixel,
    Pixelwise,
    Sigmoid,
    norm_or_mark,
)
from tiledseg.geometry.layers.resampling import (
    AlignedUpsample,
    AveragePool,
    Border,
    MaxIndices,
    MaxPool,
    MaxUnpool,
    PixelShuffle,
    PixelUnshuffle,
    Upsample,
)

SOBEL = (
    ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0)),
    ((-1.0, -2.0, -1.0), (0.0, 0.0, 0.0), (1.0, 2.0, 1.0)),
)


@dataclass(frozen=True)
class _Described:
    """`whole`: with layers that see the whole image, which mode `layer` alone computes; `products`: with those of two
    inputs, which no blocks take."""

    whole: bool = False
    bands: int = 2
    classes: int = 3
    products: bool = True

    @property
    def norm(self) -> str:
        return "batch" if self.whole else "none"


class EveryLayer(_Described):
    """Pooling undone by its indices, a residual sum whose shortcut is projected, edges of the image that gate features,
    and a concatenation of three."""

    def graph(self) -> Graph:
        mean: Layer = ImageMean() if self.whole else Mark()
        most: Layer = ImageMax() if self.whole else Mark()
        return Graph(
            (
                Node("stem", Convolution(4, 3, padding=1, bias=not self.whole)),  # a norm has its own shift
                Node("stem.norm", norm_or_mark(self.norm)),
                Node("stem.act", Activation()),
                Node("indices", MaxIndices()),
                Node("pool", MaxPool(), ("stem.act",)),
                # A residual block that activates first: in place this would spoil the shortcut.
                Node("pre.act", Activation()),
                Node("body0", Convolution(6, 3, padding=1)),
                Node("body0.act", Activation()),
                Node("body1", Convolution(6, 3, padding=2, dilation=2, bias=False)),
                Node("shortcut", Convolution(6, 1), ("pool",)),
                Node("sum", Add(), ("body1", "shortcut")),
                Node("drop", Dropout(0.2)),
                Node("down", AveragePool(3, 2, 1)),
                Node("deep", Convolution(6, 3, padding=1)),
                Node("up", TransposedConvolution(6)),
                Node("smooth", Upsample("bilinear"), ("deep",)),  # to the size of the sum
                Node("aligned", AlignedUpsample(), ("deep",)),
                Node("mean", mean, ("sum",)),
                Node("most", most, ("sum",)),
                Node("both", Add(), ("mean", "most")),
                Node("context", Convolution(2, 1)),
                Node("three", Concatenate((0, 0, 0, 0, 0)), ("up", "sum", "smooth", "aligned", "context")),
                Node("narrow", Convolution(4, 1)),
                Node("shuffle", PixelShuffle()),
                Node("unpool", MaxUnpool(), ("narrow", "indices")),
                Node("edges", FixedFilters(SOBEL), (INPUT,)),
                Node("edges.narrow", Convolution(1, 3, padding=1)),
                Node("gate", Sigmoid()),
                Node("gated", Multiply(), ("stem.act", "gate")),
                Node("last", Concatenate((0, 0, 0)), ("gated", "unpool", "shuffle")),
                Node("last.act", Activation()),
                Node("head", Convolution(self.classes, 1)),
            )
        )


CHANNELS_LAST = Layout((("B",), ("H",), ("W",), ("C0",)))
ONE_PIXEL = Layout((("B",), ("C0",), (), ()), one_pixel=True)
SHUFFLED = Layout((("B",), ("C1", "C0"), ("H",), ("W",)), (2, 3))  # channels of two groups, one of each in turn


class ForeignLayers(_Described):
    """What traced modules have besides: kernels that are no squares, groups, borders, and functions of single pixels
    in other layouts; with `whole` a gate made of the image's mean."""

    def graph(self) -> Graph:
        x, mean = FormulaSlot(0), ImageMean() if self.whole else Mark()
        most = ImageMax(even=True) if self.whole else Mark()
        products: Layer = ImageProducts(heads=6, out_channels=6) if self.whole and self.products else mean
        none = Border(0, 0)
        gate: Layer = OfOnePixel(6, 42) if self.whole else Convolution(6, 1)
        return Graph(
            (
                Node("flat", Convolution(6, 1, across=5), cols=Convolution(6, 5, padding=2, across=1)),
                Node("gelu", Pixelwise("gelu", (x,), 6)),
                Node("depthwise", Convolution(6, 3, 2, 1, groups=6), cols=Convolution(6, 3, 2, 1, groups=6)),
                Node(
                    "last",
                    Pixelwise(
                        "layer_norm", (x, (6,), FormulaSlot(0, True)), 6, (), (CHANNELS_LAST,), CHANNELS_LAST, ((6,),)
                    ),
                ),
                Node("shuffled", Pixelwise("mul", (x, 0.5), 6, (), (SHUFFLED,))),
                Node("unshuffled", PixelUnshuffle()),
                Node("shuffled again", PixelShuffle()),
                Node("some", Pixelwise("narrow", (x, 1, 2, 4), 4), ("shuffled again",)),
                Node("padded", Border(1, 2), cols=Border(2, 0)),
                Node("valid", Convolution(6, 4, across=3), cols=Convolution(6, 3, across=4)),
                Node("ones", Border(2, 2, 1.0), cols=Border(1, 1, 1.0)),
                Node("cropped", Border(-2, -2), cols=Border(-1, -1)),
                Node("mean", mean),
                Node("most", most, ("cropped",)),
                Node("products", products, ("cropped",) * products.arity),
                Node("fewer", Pixelwise("mul", (x, 0.01), 6)),
                Node("either", Add((0, 0, 0)), ("mean", "most", "fewer")),
                Node("gate", gate),
                Node(
                    "gated",
                    Pixelwise("mul", (x, FormulaSlot(1)), 6, (), (Layout(), ONE_PIXEL if self.whole else Layout())),
                    ("valid", "gate"),
                ),
                Node("thin", MaxPool(1, 1), ("gelu",), cols=MaxPool(2, 1, 0)),
                Node("thick", Border(0, 0), cols=Border(1, 0)),
                Node("up", TransposedConvolution(6, 2, groups=3), ("gated",)),
                Node("sum", Add(), ("up", "thick")),
                Node("reflected", Border(1, 1, 0.0, "reflect"), cols=Border(2, 2, 0.0, "reflect")),
                Node("in", Convolution(6, 3, across=5), cols=Convolution(6, 5, across=3)),
                Node("replicated", Border(2, 0, 0.0, "replicate"), cols=Border(0, 2, 0.0, "replicate")),
                Node("aside", Convolution(6, 3)),
                Node("same", none),
                Node("head", Convolution(self.classes, 1)),
            )
        )
