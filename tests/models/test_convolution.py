"""The convolution whose bits do not depend on the tile: it is torch's, but for the order of sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.law.kernels import is_steady
from tiledseg.models.layers.convolution import OneDnnTransposed, SteadyConvolution

SHAPES = {
    "one band": (1, 8, 3, 1, 1, 1),
    "three bands": (3, 16, 3, 1, 1, 1),
    "head": (8, 3, 1, 1, 0, 1),
    "deep": (64, 96, 3, 1, 1, 1),
    "stride, dilation": (4, 6, 3, 2, 2, 2),
}


def pair(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[nn.Conv2d, SteadyConvolution]:
    """torch's own and ours, with the same weights."""
    theirs, ours = nn.Conv2d(*shape), SteadyConvolution(*shape)
    ours.load_state_dict(theirs.state_dict())
    layout = torch.channels_last
    return theirs.to(dtype).to(memory_format=layout), ours.to(dtype).to(memory_format=layout)


def image(channels: int, size: int = 17, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    x_BCHW = torch.randn(2, channels, size, size + 3, generator=draw).to(dtype)
    return x_BCHW.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_and_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    results = []
    for module in pair(shape):
        x_BCHW = image(shape[0]).requires_grad_()
        y_BCHW = module(x_BCHW)
        y_BCHW.square().sum().backward()
        results.append((y_BCHW, x_BCHW.grad, module.weight.grad, module.bias.grad))
    for theirs, ours in zip(*results, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * scale)


TRANSPOSED = {
    "doubling": {"kernel_size": 2, "stride": 2},
    "rows that are no sixteenth": {"kernel_size": 2, "stride": 2},
    "kernel beyond the stride": {"kernel_size": 3, "stride": 2, "padding": 1},
    "output padding": {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    "groups, dilation": {"kernel_size": 2, "stride": 2, "groups": 2, "dilation": 2},
    "two steps": {"kernel_size": (2, 4), "stride": (2, 4)},
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_a_transposed_one_is_torchs_and_so_are_its_gradients(name: str) -> None:
    theirs, ours = (kind(6, 4, **TRANSPOSED[name]) for kind in (nn.ConvTranspose2d, OneDnnTransposed))
    ours.load_state_dict(theirs.state_dict())
    results = []
    for module in (theirs, ours):
        x_BCHW = image(6, 32 if name == "doubling" else 17).requires_grad_()
        y_BCHW = module.to(memory_format=torch.channels_last)(x_BCHW)
        y_BCHW.square().sum().backward()
        results.append((y_BCHW, x_BCHW.grad, module.weight.grad, module.bias.grad))
    assert torch.equal(results[0][0], results[1][0]), "the output is torch's to the last bit"
    for their, own in zip(*results, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-5 * their.abs().max().item())


@pytest.mark.parametrize("kind", [SteadyConvolution, OneDnnTransposed])
@pytest.mark.parametrize("wanted", ["weight", "bias", "input"])
def test_a_gradient_is_the_same_whatever_else_is_asked_for(kind: type[nn.Conv2d], wanted: str) -> None:
    module = kind(4, 6, kernel_size=2, stride=2).to(memory_format=torch.channels_last)
    tensors = {"weight": module.weight, "bias": module.bias, "input": image(4, 32)}
    found = []
    for asked in ({wanted}, set(tensors)):
        for name, tensor in tensors.items():
            tensor.grad = None
            tensor.requires_grad_(name in asked)
        module(tensors["input"]).square().sum().backward()
        assert all((tensors[name].grad is not None) == (name in asked) for name in tensors), "only what is asked for"
        found.append(tensors[wanted].grad)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5 * found[0].abs().max().item())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_pixel_has_the_same_bits_in_every_window(shape: tuple[int, ...]) -> None:
    channels, out, kernel = shape[:3]
    assert is_steady(SteadyConvolution(channels, out, kernel))


@pytest.mark.parametrize("size", [9, 90])
def test_the_layout_stays_channels_last(size: int) -> None:
    y_BCHW = pair(SHAPES["three bands"])[1](image(3, size))
    assert y_BCHW.is_contiguous(memory_format=torch.channels_last)


def test_what_the_kernel_does_not_know_goes_to_torch() -> None:
    """float64, groups, padding by name, lower precision: the bits of torch's own."""
    theirs, ours = pair(SHAPES["three bands"], torch.float64)
    assert torch.equal(ours(image(3, dtype=torch.float64)), theirs(image(3, dtype=torch.float64)))
    x_BCHW = image(4)
    grouped = SteadyConvolution(4, 6, 3, padding="same", groups=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(grouped(x_BCHW), functional.conv2d(x_BCHW, grouped.weight, grouped.bias, 1, "same", 1, 2))
        assert ours.float()(image(3)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_compile_sees_one_graph(dtype: torch.dtype) -> None:
    """Nothing cuts it at the convolutions; the kernels are torch.compile's own."""
    network = nn.Sequential(SteadyConvolution(3, 4, 3), nn.LeakyReLU(), SteadyConvolution(4, 2, 1)).to(dtype)
    x_BCHW = image(3, dtype=dtype)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x_BCHW), network(x_BCHW), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 4, 8, 16])
def test_single_pixels_by_steps(channels: int) -> None:
    """Of 8 channels torch's own gradient of the weight ends the process."""
    ours = SteadyConvolution(channels, 2 * channels, 1, 2, bias=False).to(memory_format=torch.channels_last)
    x_BCHW = image(channels, 64).requires_grad_()
    y_BCHW = ours(x_BCHW)
    y_BCHW.square().sum().backward()
    weight, wide_BCHW = ours.weight.detach().double().requires_grad_(), x_BCHW.detach().double().requires_grad_()
    expected_BCHW = functional.conv2d(wide_BCHW, weight, stride=2)
    expected_BCHW.square().sum().backward()
    for found, expected in ((y_BCHW, expected_BCHW), (x_BCHW.grad, wide_BCHW.grad), (ours.weight.grad, weight.grad)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
