"""A pipeline's chunk on each device that is there: the code that a GPU runs is the code that the CPU runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiledseg
from tests.pipeline.undivided import Drawn, network_of
from tiledseg.architecture.unet import UNet
from tiledseg.execution.carrying import autocast
from tiledseg.pipeline.chunk import Chunk
from tiledseg.pipeline.partition import tensor_dtypes
from tiledseg.pipeline.schedule import cut_network

UNET = UNet(3, 1, 3, 4, "same", "pixel", "nearest", 0.2, bands=2, classes=3)
SIZES = ((16, 24), (24, 16), (16, 16))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    return torch.device(request.param)


def test_dtypes_at_the_cuts_are_those_of_the_layers(device: torch.device) -> None:
    """With autocast; running statistics and the mode are as before."""
    unet = UNet(3, 1, 3, 4, "same", "batch", "bilinear", 0.2, bands=2, classes=3)
    network = network_of(unet).float()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    cast = autocast("bf16", device)
    dtypes = tensor_dtypes(network, cast, device)
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    network.to(device)
    seen: list[torch.dtype] = []
    for module in network.layers.values():
        module.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.no_grad(), autocast("bf16", device):
        network(torch.zeros(1, 2, 16, 16, device=device).contiguous(memory_format=torch.channels_last))
    assert list(dtypes[1:]) == seen
    assert torch.bfloat16 in seen


class Masked(nn.Module):
    """A mask and numbers of channels, as some authors take them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.head(torch.where(y > 0, y, 0.1 * y)) + 0 * self.head(y * y.argmax(1, True))


def test_dtypes_of_masks_and_numbers_are_their_own() -> None:
    network = tiledseg.trace(Masked(), 2)
    tensors = {0: torch.randn(1, 2, 16, 16)}
    wanted = [torch.float32]
    for end in range(1, len(network.graph) + 1):
        kept = dict(tensors)
        network.run_nodes(kept, 0, end)
        wanted.append(kept[end].dtype)
    assert list(tensor_dtypes(network, None, torch.device("cpu"))) == wanted
    assert {torch.bool, torch.int64, torch.float32} == set(wanted)


def test_received_skips_keep_their_layout() -> None:
    """What is concatenated with one of another layout loses its own, and convolutions copy it back and forth."""
    network = network_of(UNet(3, 2, 3, 4, bands=2, classes=3))
    layers = len(network.graph)
    cut = cut_network(network.graph, (layers // 2, layers - layers // 2), (0, 1))
    drawn, sent = Drawn(network, 0, (16, 24)), dict[int, torch.Tensor]()
    strides: dict[str, list[tuple[int, ...]]] = {}
    for name, module in network.layers.items():
        module.register_forward_hook(lambda _, given, out, name=name: strides.setdefault(name, []).append(out.stride()))
    network(drawn.source())
    for index in (0, 1):
        inputs = {name: tensor.clone(memory_format=torch.channels_last) for name, tensor in sent.items()}
        _, sent = Chunk(network, cut, index).forward(drawn, inputs or {0: drawn.source()}, False)
    assert all(undivided == cut for undivided, cut in strides.values())
