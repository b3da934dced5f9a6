from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Concatenate
from tiledseg.geometry.layers.pixelwise import Activation, Mark
from tiledseg.geometry.shapes import is_legal_size, output_size, tensor_channels
from tiledseg.models.dropout import ChannelDropout, DropoutKey, set_dropout_key
from tiledseg.models.network import build_modules, build_network

networks = st.builds(
    UNet,
    levels=st.integers(1, 4),
    convs_per_level=st.integers(1, 2),
    kernel=st.sampled_from([3, 5]),
    base_channels=st.sampled_from([1, 2, 4]),  # they double into groups
    padding=st.sampled_from(["same", "valid"]),
    norm=st.sampled_from(["none", "pixel", "instance", "group", "batch"]),
    upsampling=st.sampled_from(["transposed", "nearest", "bilinear"]),
    bands=st.integers(1, 5),
    classes=st.integers(2, 5),
)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(networks)
def test_the_module_has_the_shape_and_the_weights_that_the_description_says(unet: UNet) -> None:
    layers = unet.graph()
    size = next(n for n in range(60, 400) if is_legal_size(layers, n))
    network = build_modules(unet, seed=0).eval()
    output = network(torch.randn(1, unet.bands, size, size))
    assert output.shape == (1, unet.classes, *[output_size(layers, size)] * 2)
    channels = tensor_channels(layers, unet.bands)
    inputs = [channels[sources[0]] for sources in layers.sources]
    parameters = sum(layer.parameters(given) for layer, given in zip(layers.layers, inputs, strict=True))
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert len(network.layers) == len(layers)


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (build_modules(UNet(3, base_channels=2), seed) for seed in (7, 7, 8))
    torch.manual_seed(123)
    states = [list(n.state_dict().values()) for n in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(states[0], states[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(states[0], states[2], strict=True))


def test_a_skip_popped_twice_is_kept_until_its_last_pop() -> None:
    graph = Graph(
        (
            Node("a.stash", Mark()),
            Node("a.conv", Convolution(2, 1)),
            Node("b.pop", Concatenate(), ("a.stash", "a.conv")),
            Node("b.act", Activation()),
            Node("c.pop", Concatenate(), ("a.stash", "b.act")),
        )
    )
    x_BCHW = torch.randn(1, 3, 4, 4)
    kept = x_BCHW.clone()
    output = build_network(graph, 3)(x_BCHW)
    assert output.shape[1] == 2 + 3 + 3
    assert torch.equal(output[:, :3], kept)


@pytest.mark.parametrize("probability", [0.25, 0.5])
def test_dropout_drops_the_same_channels_of_every_tile_of_an_image(probability: float) -> None:
    layer = ChannelDropout("encoder0.dropout0", probability).train()
    set_dropout_key(layer, DropoutKey(seed=1, step=2, image=3))
    tiles = [layer(torch.ones(1, 4000, *shape)) for shape in ((1, 1), (2, 3))]
    kept = [(t[0, :, 0, 0] != 0) for t in tiles]
    assert torch.equal(kept[0], kept[1])
    assert kept[0].float().mean().item() == pytest.approx(1 - probability, abs=0.04)
    assert tiles[0].max().item() == pytest.approx(1 / (1 - probability))
    for key in (DropoutKey(2, 2, 3), DropoutKey(1, 3, 3), DropoutKey(1, 2, 4)):
        set_dropout_key(layer, key)
        assert not torch.equal(layer(torch.ones(1, 4000, 1, 1))[0, :, 0, 0] != 0, kept[0])
    other = ChannelDropout("encoder0.dropout1", probability).train()
    set_dropout_key(other, DropoutKey(1, 2, 3))
    assert not torch.equal(other(torch.ones(1, 4000, 1, 1))[0, :, 0, 0] != 0, kept[0])


def test_each_image_of_a_batch_has_its_own_draw() -> None:
    layer = ChannelDropout("encoder0.dropout0", 0.5).train()
    keys = [DropoutKey(1, 2, image) for image in (3, 5, 3)]
    ones_BCHW = torch.ones(3, 64, 1, 1)
    set_dropout_key(layer, *keys)
    together = layer(ones_BCHW)
    for at, key in enumerate(keys):
        set_dropout_key(layer, key)
        assert torch.equal(together[at : at + 1], layer(ones_BCHW[at : at + 1]))
    assert torch.equal(together[0], together[2])
    assert not torch.equal(together[0], together[1])


def test_dropout_without_keys_is_torchs() -> None:
    layer, x_BCHW = ChannelDropout("encoder0.dropout0", 0.5).train(), torch.randn(3, 64, 2, 2)
    set_dropout_key(layer)
    torch.manual_seed(1)
    found = layer(x_BCHW)
    assert not torch.equal(found, layer(x_BCHW))
    torch.manual_seed(1)
    assert torch.equal(found, torch.nn.functional.dropout2d(x_BCHW, 0.5))


def test_dropout_is_off_in_evaluation_and_reaches_every_layer() -> None:
    network = build_modules(UNet(2, base_channels=4, dropout=0.5, bands=1), seed=0)
    x_BCHW = torch.randn(1, 1, 8, 8)
    set_dropout_key(network, DropoutKey(1, 1, 1))
    first = network.train()(x_BCHW)
    set_dropout_key(network, DropoutKey(1, 2, 1))
    assert not torch.equal(first, network(x_BCHW))
    network.eval()
    assert torch.equal(network(x_BCHW), network(x_BCHW))
