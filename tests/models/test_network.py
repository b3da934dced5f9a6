from __future__ import annotations

import pytest
import torch

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.models.dropout import ChannelDropout, DropoutKey, set_dropout_key
from tiledseg.models.network import build_modules, build_network


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (build_modules(UNet(3, base_channels=2), seed) for seed in (7, 7, 8))
    torch.manual_seed(123)
    states = [list(n.state_dict().values()) for n in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(states[0], states[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(states[0], states[2], strict=True))


def test_even_kernels_along_columns_alone_keep_the_size() -> None:
    rows, cols = Convolution(2, 3, padding=1), Convolution(2, 4, padding=1, extra=1)
    graph = Graph((Node("conv", rows, cols=cols),))
    sizes = rows.output_size(6), cols.output_size(7)
    assert sizes == (6, 7)
    assert build_network(graph, 3)(torch.randn(1, 3, 6, 7)).shape[2:] == sizes


def dropped(layer: ChannelDropout, x_BCHW: torch.Tensor, *keys: DropoutKey) -> torch.Tensor:
    set_dropout_key(layer, *keys)
    return layer(x_BCHW)


@pytest.mark.parametrize("probability", [0.25, 0.5])
def test_dropout_drops_the_same_channels_of_every_tile_of_an_image(probability: float) -> None:
    layer, other = (ChannelDropout(name, probability).train() for name in ("dropout0", "dropout1"))
    key, ones_BCHW = DropoutKey(seed=1, step=2, image=3), torch.ones(1, 4000, 1, 1)
    first_BCHW = dropped(layer, ones_BCHW, key)
    tile_BCHW = dropped(layer, torch.ones(1, 4000, 2, 3), key)
    assert torch.equal(tile_BCHW, first_BCHW.expand_as(tile_BCHW))
    assert (first_BCHW != 0).float().mean().item() == pytest.approx(1 - probability, abs=0.04)
    assert first_BCHW.max().item() == pytest.approx(1 / (1 - probability))
    assert not torch.equal(dropped(other, ones_BCHW, key), first_BCHW)
    for another in (DropoutKey(2, 2, 3), DropoutKey(1, 3, 3), DropoutKey(1, 2, 4)):
        alone_BCHW = dropped(layer, ones_BCHW, another)
        assert not torch.equal(alone_BCHW, first_BCHW)
        batch_BCHW = dropped(layer, ones_BCHW.expand(3, -1, -1, -1), key, another, key)
        assert torch.equal(batch_BCHW, torch.cat([first_BCHW, alone_BCHW, first_BCHW])), "each image has its own draw"


def test_dropout_without_keys_is_torchs() -> None:
    layer, x_BCHW = ChannelDropout("dropout0", 0.5).train(), torch.randn(3, 64, 2, 2)
    torch.manual_seed(1)
    found = dropped(layer, x_BCHW)
    assert not torch.equal(found, layer(x_BCHW))
    torch.manual_seed(1)
    assert torch.equal(found, torch.nn.functional.dropout2d(x_BCHW, 0.5))


def test_dropout_is_off_in_evaluation_and_reaches_every_layer() -> None:
    network, x_BCHW = build_modules(UNet(2, base_channels=4, dropout=0.5, bands=1), seed=0), torch.randn(1, 1, 8, 8)
    for training in (True, False):
        network.train(training)
        found = []
        for step in (1, 2):
            set_dropout_key(network, DropoutKey(1, step, 1))
            found.append(network(x_BCHW))
        assert torch.equal(*found) != training
