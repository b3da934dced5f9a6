"""Interval arithmetic against two oracles: taps counted from the definitions, and the gradients of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.geometry.drawn import law, line
from tests.geometry.test_halo import positive_network, row_support
from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution, TransposedConvolution
from tiledseg.geometry.layers.joins import Add, Concatenate
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Activation, Mark
from tiledseg.geometry.layers.resampling import MaxPool, Upsample
from tiledseg.geometry.shapes import is_legal_size, output_size, required_input, resized, total_stride

small = st.integers(1, 3)
layer_kinds = st.one_of(
    st.builds(Convolution, st.just(1), st.integers(1, 5), small, st.integers(0, 3), small),
    st.builds(MaxPool, st.integers(1, 3)),
    st.builds(TransposedConvolution, st.just(1), st.integers(1, 3)),
    st.builds(Upsample, st.just("nearest"), st.integers(1, 3)),
    st.builds(Upsample, st.just("bilinear"), st.just(2)),
    st.just(Activation()),
)
chains = st.lists(layer_kinds, min_size=1, max_size=6)


@settings(law, max_examples=150)
@given(chains, st.integers(20, 60), st.data())
def test_any_chain_needs_what_its_gradient_reaches(chain: list[Layer], size: int, data: st.DataObject) -> None:
    sizes = list(itertools.accumulate(chain, lambda n, layer: layer.output_size(n), initial=size))
    assume(min(sizes) > 0)
    network, shape = positive_network(line(*chain)), (size, size)
    assert network(torch.ones(1, 1, *shape, dtype=torch.float64)).shape[2:] == (sizes[-1],) * 2
    start = data.draw(st.integers(0, sizes[-1] - 1))
    out = Interval(start, data.draw(st.integers(start + 1, sizes[-1])))
    found = row_support(network, shape, out)
    need = required_input(line(*chain), out)
    assert need.contains(found) or found.size == 0  # nothing else is read
    is_dense = all(not isinstance(layer, Convolution) or layer.dilation == 1 for layer in chain)
    if is_dense and inside(chain, out, sizes):
        assert found == need  # and every end of it is


def inside(chain: list[Layer], need: Interval, sizes: list[int]) -> bool:
    """Whether no layer reads padding, or positions that a pooling drops: there the hull is wider than what is read."""
    for layer, size in zip(reversed(chain), reversed(sizes[:-1]), strict=True):
        need = layer.required_input(need)
        if not Interval(0, size).contains(need):
            return False
    return True


def test_a_skip_widens_the_need_of_the_layers_before_its_stash() -> None:
    stash, pop = Node("s", Mark()), ("s", "b")
    before, after = Node("a", Convolution(1, 3)), Node("b", Convolution(1, 5))
    deep = Graph((before, stash, after, Node("p", Concatenate((2, 0)), pop)))
    assert required_input(deep, Interval(10, 11)) == Interval(10, 17)
    shallow = Graph((stash, Node("u", Upsample()), Node("b", MaxPool()), Node("p", Concatenate((3, 0)), pop)))
    assert required_input(shallow, Interval(4, 5)) == Interval(4, 8)  # position 4 through the layers, 7 by the skip


def test_branches_of_one_tensor_need_the_widest_and_two_outputs_both() -> None:
    nodes = Node("a", Convolution(1, 3)), Node("b", Convolution(1, 7), ("a",)), Node("c", Convolution(1, 1), ("a",))
    assert required_input(Graph((*nodes, Node("d", Add((0, 3)), ("b", "c")))), Interval(4, 6)) == Interval(4, 14)
    assert required_input(Graph(nodes, ("c", "b")), Interval(0, 1)) == Interval(0, 9)


@pytest.mark.parametrize("upsampling", ["transposed", "nearest", "bilinear"])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_the_total_stride_of_a_unet_is_that_of_its_poolings(upsampling: str, padding: str) -> None:
    assert total_stride(line(Convolution(1, 3, stride=3), Convolution(1, 3, stride=2), Upsample("bilinear"))) == 6
    for levels in range(1, 8):
        assert total_stride(UNet(levels=levels, upsampling=upsampling, padding=padding).graph()) == 2 ** (levels - 1)


def test_legal_sizes_of_the_unpadded_unet() -> None:
    layers = UNet(levels=5, padding="valid").graph()
    assert output_size(layers, 572) == 388
    legal = [n for n in range(188, 1500) if is_legal_size(layers, n)]
    assert legal == [n for n in range(188, 1500) if (n - 572) % 16 == 0]
    assert is_legal_size(line(MaxPool(3, 2, 1)), 5)
    assert not is_legal_size(line(MaxPool()), 5), "a remainder"
    with pytest.raises(GeometryError, match="1434 is not legal"):
        output_size(layers, 1434)


def test_a_skip_that_does_not_fit_names_both_sizes() -> None:
    layers = Graph((Node("s", Mark()), Node("c", Convolution(1, 3)), Node("p", Concatenate(), ("s", "c"))))
    with pytest.raises(GeometryError, match=r"input size 10 is not legal: layer 'p': .* of 10 and 8 positions"):
        output_size(layers, 10)


def test_resizing_to_another_tensor_is_a_whole_factor() -> None:
    nodes = [Node("a", Convolution(1, 3, 2, 1)), Node("b", MaxPool()), Node("c", Convolution(1, 1, 3))]
    assert resized(nodes, "up", "b", "a").layer == Upsample("bilinear", 2)
    assert resized(nodes, "up", "c", "input", "nearest") == Node("up", Upsample("nearest", 12), ("c",))
    assert resized(nodes, "up", "b", "b").layer == Mark()
    with pytest.raises(ConfigError, match="would resize 'a' by 1/2 to the size of 'b'"):
        resized(nodes, "up", "a", "b")
