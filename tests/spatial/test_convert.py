"""What cannot be spread over ranks exactly is refused by name, with the reason; what can is itself on one rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.spatial import drawn
from tests.spatial.drawn import CHANNELS, image, with_weights
from tests.spatial.test_layers import LAYERS
from tests.spatial.twins import forward, undivided
from tiledseg.comm.mesh import serial_axes
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Add, Concatenate
from tiledseg.geometry.layers.pixelwise import Mark
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.models.dropout import ChannelDropout, LeafDepth
from tiledseg.models.layers.convolution import SteadyConvolution
from tiledseg.models.layers.joins import JoinModule
from tiledseg.models.network import build_network
from tiledseg.models.norm import PixelNorm
from tiledseg.spatial.twins import POINTWISE, spatial_layer


class Doubled(nn.Conv2d):
    """A subclass may compute anything."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


REFUSED = {
    "max pool, ceil_mode": (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
    "average pool, ceil_mode": (nn.AvgPool2d(2, ceil_mode=True), "ceil_mode"),
    "linear": (nn.Upsample(scale_factor=2, mode="linear"), "give nearest, bilinear or bicubic"),
    "instances tracked": (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False"),
    "softmax": (nn.Softmax2d(), "is not known"),
    "local response": (nn.LocalResponseNorm(2), "is not known"),
    "a subclass": (Doubled(4, 4, 3), "is not known"),
    "a sequence within": (nn.Sequential(nn.ReLU()), "is not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_layer_and_the_reason(name: str) -> None:
    module, reason = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        spatial_layer("odd one", module)
    message = str(refused.value)
    assert "layer 'odd one'" in message
    assert reason in message
    assert "\n" not in message


def test_a_subclass_of_ours_with_a_forward_of_its_own_is_refused() -> None:
    class Halved(JoinModule):
        def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
            return super().forward(*inputs_BCHW) / 2

    assert spatial_layer("sum", JoinModule(Add()))
    with pytest.raises(ConfigError, match=r"layer 'sum' \(Halved\) is not known to give the same result"):
        spatial_layer("sum", Halved(Add()))


def one_rank(network: nn.Module, x_BCHW: torch.Tensor, fusion: int = 1) -> None:
    """y, dx, gradients and buffers are the unconverted network's to the last bit."""
    expected = undivided(network, x_BCHW)
    rows, cols = (Partition((0, size)) for size in x_BCHW.shape[2:])
    run = forward(network, x_BCHW, serial_axes(), rows, cols, fusion)
    run.backward(expected.y_BCHW.shape)
    found = run.finish(x_BCHW.shape, expected.y_BCHW.shape)
    assert torch.equal(found.y_BCHW, expected.y_BCHW)
    assert torch.equal(found.dx_BCHW, expected.dx_BCHW)
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name
    assert found.buffers.keys() == expected.buffers.keys()
    for name, buffer in expected.buffers.items():
        assert torch.equal(found.buffers[name], buffer), name


OWN = [
    *drawn.norms(),
    nn.Conv2d(CHANNELS, CHANNELS, 5, padding="same", groups=2),
    nn.PReLU(CHANNELS),
    ChannelDropout("dropout", 0.4),
    SteadyConvolution(CHANNELS, 6, (2, 5), (2, 1), (3, 0), (1, 2)),
]
EVERY = [(CHANNELS, module) for module in OWN] + [(2, module) for module in LAYERS.values()]


@pytest.mark.parametrize("number", range(len(EVERY)))
def test_a_layer_on_one_rank_is_the_unconverted_one_to_the_last_bit(number: int) -> None:
    channels, module = EVERY[number]
    network = nn.Sequential(with_weights(copy.deepcopy(module), 3)).float()
    height = 12 if isinstance(module, nn.PixelUnshuffle) else 13
    one_rank(network, image((2, channels, height, 10), 5).float())


@pytest.mark.parametrize("kind", [k for k in POINTWISE if k not in (PixelNorm, ChannelDropout, LeafDepth)])
def test_pointwise_layers_compute_a_block_as_the_image(kind: type[nn.Module]) -> None:
    x_BCHW = image((2, 3, 9, 8), 5)
    one_rank(nn.Sequential(kind()).double(), x_BCHW)
    whole_BCHW = kind().double()(x_BCHW)
    assert torch.allclose(kind().double()(x_BCHW[:, :, 2:5, 3:]), whole_BCHW[:, :, 2:5, 3:], rtol=1e-12, atol=0)


def test_on_one_rank_outputs_that_a_later_layer_drops_are_computed_all_the_same() -> None:
    """A skip then still fits the tensor that it meets."""
    nodes = (
        Node("mark", Mark()),
        Node("conv", Convolution(CHANNELS, 3)),
        Node("join", Concatenate((1, 0)), ("mark", "conv")),
        Node("padded", Convolution(CHANNELS, 3, padding=2)),
        Node("drops", Convolution(CHANNELS, 1, 2)),
    )
    one_rank(with_weights(build_network(Graph(nodes), CHANNELS), 3), image((1, CHANNELS, 12, 10), 5))
