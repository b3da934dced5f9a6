from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given

from tests.geometry.drawn import law, unets
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.architecture.unet import UNet
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
