"""Interval arithmetic against two oracles: taps counted from the definitions, and the gradients of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from tiledseg.architecture.unet import UNet
from tiledseg.errors import GeometryError
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer import (
    Activation,
    Convolution,
    Layer,
    MaxPool,
    PopConcatenate,
    Stash,
    TransposedConvolution,
    Upsample,
)
from tiledseg.geometry.receptive_field import is_legal_size, output_size, required_input, total_stride

law = settings(derandomize=True, max_examples=150, deadline=None)

convolutions = st.builds(
    Convolution,
    st.just("conv"),
    st.just(1),
    st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
)
layer_kinds = st.one_of(
    convolutions,
    st.builds(MaxPool, st.just("pool"), st.integers(1, 3)),
    st.builds(TransposedConvolution, st.just("up"), st.just(1), st.integers(1, 3)),
    st.builds(Upsample, st.just("near"), st.just("nearest"), st.integers(1, 3)),
    st.builds(Upsample, st.just("bil"), st.just("bilinear"), st.just(2)),
    st.just(Activation("act")),
)
chains = st.lists(layer_kinds, min_size=1, max_size=6)


def twin(layer: Layer) -> nn.Module:
    """The layer in one dim, with positive weights, so that no dependence cancels; pooling averages, for the same reason
    (the gradient of a maximum is zero at all inputs but one)."""
    match layer:
        case Convolution():
            module: nn.Module = nn.Conv1d(
                1, 1, layer.kernel, stride=layer.stride, padding=layer.padding, dilation=layer.dilation, bias=False
            )
        case TransposedConvolution():
            module = nn.ConvTranspose1d(1, 1, layer.kernel, stride=layer.kernel, bias=False)
        case MaxPool():
            module = nn.AvgPool1d(layer.kernel)
        case Upsample():
            mode = "linear" if layer.mode == "bilinear" else "nearest"
            align = False if layer.mode == "bilinear" else None
            module = nn.Upsample(scale_factor=layer.factor, mode=mode, align_corners=align)
        case _:
            module = nn.Identity()
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)
    return module.double()


def support(network: nn.Module, size: int, out: Interval) -> Interval:
    """First and last input that the outputs `out` depend on, by their gradient."""
    x = torch.ones(1, 1, size, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(network(x)[..., out.slice].sum(), x)
    touched = gradient[0, 0].nonzero()[:, 0]
    return Interval(int(touched[0]), int(touched[-1]) + 1) if len(touched) else Interval(0, 0)


@law
@given(chains, st.integers(20, 60), st.data())
def test_any_chain_needs_what_its_gradient_reaches(chain: list[Layer], size: int, data: st.DataObject) -> None:
    outputs = size
    for layer in chain:
        outputs = layer.output_size(outputs)
        assume(outputs > 0)
    start = data.draw(st.integers(0, outputs - 1))
    out = Interval(start, data.draw(st.integers(start + 1, outputs)))
    network = nn.Sequential(*map(twin, chain))
    found = support(network, size, out)
    need = required_input(chain, out)
    assert need.contains(found) or found.size == 0  # nothing else is read
    if Interval(0, size).contains(need) and no_position_is_skipped(chain) and inside(chain, out, size):
        assert found == need  # and every end of it is


def no_position_is_skipped(chain: list[Layer]) -> bool:
    """Ends of the hull are really read: not where a dilation or a stride jumps over positions between them."""
    return all(not isinstance(layer, Convolution) or layer.dilation == 1 for layer in chain)


def inside(chain: list[Layer], out: Interval, size: int) -> bool:
    """Whether no layer reads padding, or positions that a pooling drops: there the hull is wider than what is read."""
    sizes = list(itertools.accumulate(chain, lambda n, layer: layer.output_size(n), initial=size))
    need = out
    for layer, given_size in zip(reversed(chain), reversed(sizes[:-1]), strict=True):
        need = layer.required_input(need)
        if not Interval(0, given_size).contains(need):
            return False
    return True


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_one_convolution_reads_its_taps_exactly(kernel: int, stride: int, dilation: int, padding: int) -> None:
    layer = Convolution("conv", 1, kernel, stride=stride, padding=padding, dilation=dilation)
    size = 40
    outputs = layer.output_size(size)
    assert outputs == twin(layer)(torch.zeros(1, 1, size, dtype=torch.float64)).shape[-1]
    for position in range(outputs):
        taps = {position * stride - padding + tap * dilation for tap in range(kernel)}
        need = layer.required_input(Interval(position, position + 1))
        assert (need.start, need.stop - 1) == (min(taps), max(taps))


def test_a_skip_widens_the_need_of_the_layers_before_its_stash() -> None:
    deep = [Convolution("a", 1, 3), Stash("s", "skip"), Convolution("b", 1, 5), PopConcatenate("p", "skip", 1, crop=2)]
    assert required_input(deep, Interval(10, 11)) == Interval(10, 17)
    shallow = [Stash("s", "skip"), Upsample("u", "nearest"), MaxPool("m"), PopConcatenate("p", "skip", 1, crop=3)]
    assert required_input(shallow, Interval(4, 5)) == Interval(4, 8)  # position 4 through the layers, 7 by the skip


@pytest.mark.parametrize("upsampling", ["transposed", "nearest", "bilinear"])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_the_total_stride_of_a_unet_is_that_of_its_poolings(upsampling: str, padding: str) -> None:
    for levels in range(1, 8):
        assert total_stride(UNet(levels=levels, upsampling=upsampling, padding=padding).layers()) == 2 ** (levels - 1)


def test_total_stride_counts_strided_convolutions() -> None:
    assert (
        total_stride([Convolution("a", 1, 3, stride=3), Convolution("b", 1, 3, stride=2), Upsample("u", "bilinear")])
        == 6
    )


def test_legal_sizes_of_the_unpadded_unet() -> None:
    layers = UNet(levels=5, padding="valid").layers()
    assert output_size(layers, 572) == 388
    legal = [n for n in range(188, 1500) if is_legal_size(layers, n)]
    assert legal == [n for n in range(188, 1500) if (n - 572) % 16 == 0]
    assert all(output_size(layers, n) == n - 184 for n in legal)
    assert output_size(layers, 1436) == 1252
    with pytest.raises(GeometryError, match="1434 is not legal"):
        output_size(layers, 1434)


def test_legal_sizes_of_the_padded_unet_are_the_multiples_of_the_alignment() -> None:
    layers = UNet(levels=5).layers()
    assert [n for n in range(1, 200) if is_legal_size(layers, n)] == list(range(16, 200, 16))
    assert not is_legal_size(layers, 1434)
    assert output_size(layers, 1440) == 1440


def test_a_skip_that_does_not_fit_names_both_sizes() -> None:
    layers = [Stash("s", "skip"), Convolution("c", 1, 3), PopConcatenate("p", "skip", 1)]
    with pytest.raises(GeometryError, match=r"10 pixels.*against 8"):
        output_size(layers, 10)
