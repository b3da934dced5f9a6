"""Each layer over the ranks of an image against torch's on the whole image: y, dx, dW, db and buffers. What cannot be
spread over ranks exactly is refused by name, with the reason.

float64, to 1e-12 relative; on one rank in float32, to the last bit. Ranks are threads: what carries the halos is shown
not to matter by the tests of the exchange.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.spatial import drawn
from tests.spatial.drawn import CHANNELS, image, with_weights
from tests.spatial.twins import check_on_ranks
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Add, Concatenate
from tiledseg.geometry.layers.pixelwise import Mark
from tiledseg.geometry.layers.resampling import Border as Around
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.models.dropout import ChannelDropout, LeafDepth
from tiledseg.models.layers.convolution import SteadyConvolution
from tiledseg.models.layers.joins import JoinModule, WholeImageMax
from tiledseg.models.layers.resampling import AlignedUpsampleModule, BorderModule
from tiledseg.models.network import build_network
from tiledseg.models.norm import PixelNorm
from tiledseg.spatial.twins import POINTWISE, spatial_layer

MESHES = [(1, 2), (4, 1), (2, 2), (3, 3)]


def check_everywhere(
    module: nn.Module,
    x_BCHW: torch.Tensor,
    overlap: bool = False,
    dtype: torch.dtype = torch.float64,
    fusion: int = 1,
) -> None:
    """By one rank, by even blocks, which must be computed, and by uneven ones."""
    network = with_weights(module if isinstance(module, nn.Sequential) else nn.Sequential(module), 3)
    height, width = x_BCHW.shape[2:]
    assert check_on_ranks(network.float(), x_BCHW.float(), Partition((0, height)), Partition((0, width)), fusion)
    network.to(dtype)
    for rows, cols in MESHES:
        even = Partition.even(height, rows), Partition.even(width, cols)
        computed = check_on_ranks(network, x_BCHW.to(dtype), *even, fusion, overlap)
        assert computed, f"even blocks of {height} x {width} over {rows} x {cols} ranks were refused"
        check_on_ranks(network, x_BCHW.to(dtype), uneven(height, rows), uneven(width, cols), fusion, overlap)


def uneven(size: int, parts: int) -> Partition:
    """The last block takes half and the others share the rest unevenly."""
    inner = sorted({max(1, round(size * (i / (2 * parts - 1)) ** 1.5)) for i in range(1, parts)})
    return Partition((0, *inner, size)) if len(inner) == parts - 1 else Partition.even(size, parts)


# HW, kernel, padding, stride, dilation
ACCEPTANCE = [
    ((10, 10), 3, 1, 1, 1),
    ((10, 10), 5, 2, 2, 1),
    ((5, 5), 3, 1, 2, 1),
    ((6, 10), 5, 2, 4, 1),
    ((10, 8), 5, 1, 1, 1),
    ((8, 8), 4, 1, 1, 1),
    ((10, 10), 5, 1, 1, 2),
    ((20, 20), 7, 3, 2, 1),
]


@pytest.mark.parametrize(("size", "kernel", "padding", "stride", "dilation"), ACCEPTANCE)
def test_acceptance_cases(size: tuple[int, int], kernel: int, padding: int, stride: int, dilation: int) -> None:
    """Computed on 2 x 2 ranks always, on others where each owns an output; one on 4 x 4 too."""
    network = nn.Sequential(with_weights(nn.Conv2d(2, 3, kernel, stride, padding, dilation), 3))
    for rows, cols in [*MESHES, *([(4, 4)] if (size, kernel, stride) == ((10, 10), 5, 2) else [])]:
        even = Partition.even(size[0], rows), Partition.even(size[1], cols)
        for overlap in (False, True):
            computed = check_on_ranks(network, image((2, 2, *size), 5), *even, overlap=overlap)
            assert computed or (rows, cols) in ((4, 1), (3, 3))


LAYERS = {
    "convolution, even kernel, same": nn.Conv2d(2, 3, 4, padding="same"),
    "convolution, oblong": nn.Conv2d(2, 3, (1, 5), (2, 1), (0, 2)),
    "convolution, dilated groups": nn.Conv2d(2, 4, (3, 2), (1, 3), (2, 1), (2, 1), groups=2),
    "convolution, more padding than kernel": nn.Conv2d(2, 3, 2, stride=2, padding=3),
    "convolution by oneDNN": SteadyConvolution(2, 6, (2, 3), (2, 1), (3, 0), (1, 2)),
    "max pool 3, overlapping, padded": nn.MaxPool2d(3, 2, 1),
    "max pool, dilated": nn.MaxPool2d(2, 1, 1, 2),
    "average pool, padding does not count": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "average pool, padding counts": nn.AvgPool2d((2, 4), (3, 1), (1, 2)),
    "average pool, divisor": nn.AvgPool2d((2, 3), 1, (1, 0), divisor_override=5),
    "transposed 4, stride 2": nn.ConvTranspose2d(2, 3, 4, 2, 1),
    "transposed 1, stride 3: gaps": nn.ConvTranspose2d(2, 3, 1, 3),
    "transposed, dilated groups": nn.ConvTranspose2d(2, 4, (3, 2), (2, 1), (2, 0), (1, 0), 2, dilation=2),
    "nearest 2, 3": nn.Upsample(scale_factor=(2, 3), mode="nearest-exact"),
    "nearest 3": nn.UpsamplingNearest2d(scale_factor=3),
    "bilinear 3": nn.Upsample(scale_factor=3, mode="bilinear", align_corners=False),
    "corners aligned 2, 3": AlignedUpsampleModule((2, 3)),
    "corners aligned 8, 1": AlignedUpsampleModule((8, 1)),
    "bicubic 2, 3": nn.Upsample(scale_factor=(2, 3), mode="bicubic"),
    "pixels to channels": nn.PixelUnshuffle(2),
    "maximum": WholeImageMax(),
    "maximum, shared": WholeImageMax(even=True),
    "reflected": BorderModule(rows=Around(3, 1, mode="reflect"), cols=Around(0, 5, mode="reflect")),
    "replicated": BorderModule(rows=Around(3, 1, mode="replicate"), cols=Around(0, 5, mode="replicate")),
    "dropout": ChannelDropout("dropout", 0.4),
    "slopes of channels": nn.PReLU(2),
    **{kind.__name__: kind() for kind in POINTWISE if kind not in (PixelNorm, ChannelDropout, LeafDepth)},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_every_mesh(name: str) -> None:
    size = (12, 16) if name == "pixels to channels" else (11, 13)
    check_everywhere(LAYERS[name], image((2, 2, *size), 5))
    if isinstance(LAYERS[name], nn.Conv2d):
        check_everywhere(LAYERS[name], image((2, 2, 11, 13), 5), overlap=True)


MAXIMA = ["max pool 3, overlapping, padded", "max pool, dilated", "maximum", "maximum, shared"]


@pytest.mark.parametrize("name", MAXIMA)
@pytest.mark.parametrize("kind", ["ties", "negative"])
def test_max_pooling_takes_the_first_of_equals_and_never_its_padding(name: str, kind: str) -> None:
    check_everywhere(LAYERS[name], image((1, 2, 11, 13), 5, kind))


def unlike_its_blocks(mean: float) -> torch.Tensor:
    x_BCHW = image((2, CHANNELS, 11, 13), 5) + mean  # uneven blocks for 4 ranks a side too
    x_BCHW[:, :, :4, :3] += 3
    return x_BCHW


@pytest.mark.parametrize(
    ("number", "mean", "dtype"),
    [
        *((number, 100.0 if number in (0, 7) else 0.0, torch.float64) for number in range(len(drawn.norms()))),
        *((number, 0.0, torch.float32) for number in (0, 7, 10)),
    ],
)
def test_norms_on_every_mesh(number: int, mean: float, dtype: torch.dtype) -> None:
    """Statistics over the whole image, which are not those of a block; a mean of many deviations costs no digits."""
    check_everywhere(drawn.norms()[number], unlike_its_blocks(mean), dtype=dtype)


CHAIN = nn.Sequential(
    nn.Conv2d(2, 4, 4, 2, 1),
    nn.InstanceNorm2d(4, affine=True),
    nn.MaxPool2d(3, 1, 1),
    nn.ConvTranspose2d(4, 3, 3, 2, 1, 1),
    nn.Conv2d(3, 2, 2, padding="same"),
)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chain_with_exchanges_shared_by_two_layers(overlap: bool) -> None:
    check_everywhere(CHAIN, image((2, 2, 14, 13), 5), overlap, fusion=2)


def test_on_one_rank_outputs_that_a_later_layer_drops_are_computed_all_the_same() -> None:
    """A skip then still fits the tensor that it meets."""
    nodes = (
        Node("mark", Mark()),
        Node("conv", Convolution(CHANNELS, 3)),
        Node("join", Concatenate((1, 0)), ("mark", "conv")),
        Node("padded", Convolution(CHANNELS, 3, padding=2)),
        Node("drops", Convolution(CHANNELS, 1, 2)),
    )
    network = with_weights(build_network(Graph(nodes), CHANNELS), 3)
    assert check_on_ranks(network, image((1, CHANNELS, 12, 10), 5), Partition((0, 12)), Partition((0, 10)))


class Doubled(nn.Conv2d):
    """A subclass may compute anything."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Halved(JoinModule):
    """One of ours too."""

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs_BCHW) / 2


REFUSED = {
    "max pool, ceil_mode": (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
    "average pool, ceil_mode": (nn.AvgPool2d(2, ceil_mode=True), "ceil_mode"),
    "linear": (nn.Upsample(scale_factor=2, mode="linear"), "give nearest, bilinear or bicubic"),
    "instances tracked": (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False"),
    "softmax": (nn.Softmax2d(), r"\(Softmax2d\) is not known to give the same result"),
    "local response": (nn.LocalResponseNorm(2), "is not known"),
    "a subclass": (Doubled(4, 4, 3), "is not known"),
    "a subclass of ours": (Halved(Add()), "is not known"),
    "a sequence within": (nn.Sequential(nn.ReLU()), "is not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_layer_and_the_reason(name: str) -> None:
    module, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=f"^layer 'odd one' [^\n]*{reason}[^\n]*\\Z"):
        spatial_layer("odd one", module)
