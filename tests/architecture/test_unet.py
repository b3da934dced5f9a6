"""Networks by their options: counts of layers, the paper's three with their balance lists, and what cannot be."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given

from tests.geometry.drawn import law, unets
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.architecture.unet import UNet
from tiledseg.config.run import ModelConfig
from tiledseg.errors import ConfigError
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.shapes import is_legal_size, output_size, tensor_channels, total_stride


def test_a_norm_takes_the_place_of_the_bias() -> None:
    def biases(norm: str) -> list[bool]:
        return [layer.bias for layer in UNet(norm=norm).graph().layers if isinstance(layer, Convolution)]

    assert all(biases("none"))
    assert not any(biases("instance")[:-1])
    assert biases("instance")[-1], "the head has no norm after it"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: UNet(0), "model.levels is 0"),
        (lambda: UNet(kernel=4), "model.kernel is 4"),
        (lambda: UNet(padding="reflect"), "model.padding is 'reflect'; give one of same, valid"),
        (lambda: UNet(dropout=1.0), "model.dropout is 1.0"),
        (lambda: UNet(classes=1), "data.classes is 1"),
        (lambda: UNet(norm="group", base_channels=6), "level 1 has 12 channels, which do not divide into 8 groups"),
        (lambda: SegNet(6), "model.levels is 6; give 1 to 5"),
        (lambda: ResidualUNet("wide38"), "model.encoder is 'wide38'; give one of resnet18, resnet34, resnet50"),
        (lambda: ResidualUNet(base_channels=12, norm="group"), "12 channels"),
        (lambda: GatedSCNN(base_channels=12), "model.base_channels is 12; give a multiple of 8 for gated_scnn"),
        (lambda: GatedSCNN(bands=1, edge_band=True), "model.arguments: edge_band is true, but the image has 1 band"),
    ],
)
def test_impossible_options_name_the_key_and_the_value(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@law
@given(unets)
def test_a_unet_has_the_papers_count_of_layers_and_fits_at_every_legal_size(unet: UNet) -> None:
    graph, step = unet.graph(), 2 ** (unet.levels - 1)
    n, poolings = unet.convs_per_level, unet.levels - 1
    assert len(graph) == 4 * n * (2 * poolings + 1) + 4 * poolings + 1
    assert total_stride(graph) == step
    channels = tensor_channels(graph, unet.bands)
    assert channels[-1] == unet.classes
    joined = [channels[tensor] for tensor, _ in graph.skips]
    assert joined == [unet.channels(level) for level in reversed(range(unet.levels - 1))]
    legal = [n for n in range(1, 700) if is_legal_size(graph, n)][:4]
    assert [b - a for a, b in itertools.pairwise(legal)] == [step] * 3
    lost = {n - output_size(graph, n) for n in legal}
    assert len(lost) == 1
    if unet.padding == "same":
        assert legal == [step, 2 * step, 3 * step, 4 * step]
        assert lost == {0}


@pytest.mark.parametrize(("name", "layers"), [("small", 109), ("medium-2", 129), ("large", 149)])
def test_layer_counts_and_balance_sums(name: str, layers: int) -> None:
    assert len(build_network(ModelConfig(name=name), bands=4, classes=2).graph()) == layers
    assert sum(PRESETS[name].balance) == layers
    assert len(PRESETS[name].balance) == 6


def test_a_network_by_its_options() -> None:
    options = {"levels": 3, "convs_per_level": 1, "kernel": 5, "base_channels": 16, "padding": "valid"}
    more = {"norm": "group", "upsampling": "bilinear", "dropout": 0.1}
    assert build_network(ModelConfig(**options, **more), 3, 5) == UNet(**options, **more, bands=3, classes=5)


def test_free_options_of_a_preset_are_kept() -> None:
    unet = build_network(ModelConfig(name="small", base_channels=8, upsampling="nearest", dropout=0.2), 5, 3)
    assert (unet.levels, unet.base_channels, unet.upsampling, unet.dropout) == (6, 8, "nearest", 0.2)
    assert (unet.bands, unet.classes, unet.norm) == (5, 3, "instance")


def test_unknown_names_and_contradictions_name_both_values() -> None:
    with pytest.raises(ConfigError, match=r"'medium'; give unet, segnet, residual_unet, .*small, medium-2, large"):
        build_network(ModelConfig(name="medium"), 4, 2)
    with pytest.raises(ConfigError, match=r"model.levels is 4, but the preset small has 6"):
        build_network(ModelConfig(name="small", levels=4), 4, 2)
    with pytest.raises(ConfigError, match=r"model.norm is batch, but the preset large has instance"):
        build_network(ModelConfig(name="large", norm="batch"), 4, 2)
