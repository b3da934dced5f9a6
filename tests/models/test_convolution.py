"""oneDNN's convolutions: a pixel has the same bits in any window, and gradients are torch's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tiledseg.models.layers.convolution import SteadyConvolution, convolve, convolve_transposed


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def image(*shape: int, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("count", [1, 2])
def test_a_convolution_gives_a_pixel_the_same_bits_in_any_window(count: int) -> None:
    draw = random.Random(3)
    with threads(count), torch.no_grad():
        for seed in range(40):
            inputs, outputs, kernel = draw.choice((1, 2, 3, 4, 8, 16, 32)), draw.randint(1, 24), draw.choice((1, 3, 5))
            weight = image(outputs, inputs, kernel, kernel, seed=seed + 1)
            bias = image(1, outputs, 1, 1).flatten() if draw.random() < 0.5 else None
            how = (1, 1), (0, 0), (1, 1), 1
            x_BCHW = image(1, inputs, 90, 80, seed=seed)
            whole_BCHW = convolve(x_BCHW, weight, bias, *how)
            height, width = draw.randint(kernel, 40), draw.randint(kernel, 40)
            row, col = draw.randint(0, 90 - height), draw.randint(0, 80 - width)
            part_BCHW = x_BCHW[:, :, row : row + height, col : col + width].contiguous(
                memory_format=torch.channels_last
            )
            made_BCHW = convolve(part_BCHW, weight, bias, *how)
            assert kernel == inputs == 1 or made_BCHW.is_contiguous(memory_format=torch.channels_last)
            rows, cols = made_BCHW.shape[2:]
            assert torch.equal(made_BCHW, whole_BCHW[:, :, row : row + rows, col : col + cols]), (
                inputs,
                outputs,
                kernel,
            )


CASES: dict[str, tuple[int, int, tuple[int, int], dict[str, Any]]] = {
    "same": (4, 8, (3, 3), {"padding": (1, 1)}),
    "valid": (8, 8, (3, 3), {}),
    "padded in rows alone": (8, 5, (3, 3), {"padding": (1, 0)}),
    "strides, dilation": (6, 8, (3, 3), {"stride": (2, 2), "padding": (2, 2), "dilation": (2, 2)}),
    "strides that leave rows": (3, 8, (2, 2), {"stride": (3, 3)}),
    "pixels": (8, 5, (1, 1), {}),
    "transposed": (16, 8, (2, 2), {"stride": (2, 2), "transposed": True}),
    "transposed, wide": (6, 5, (2, 3), {"stride": (2, 3), "transposed": True}),
    "transposed, padded": (6, 8, (4, 4), {"stride": (2, 2), "padding": (1, 1), "transposed": True}),
    "transposed, dense": (6, 8, (3, 3), {"padding": (1, 1), "transposed": True}),
}


def convolved(
    x_BCHW: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    transposed: bool = False,
) -> torch.Tensor:
    if transposed:
        return convolve_transposed(x_BCHW, weight, bias, stride, padding, (0, 0), 1, dilation)
    return convolve(x_BCHW, weight, bias, stride, padding, dilation, 1)


@pytest.mark.parametrize("height", [5, 37])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str, height: int) -> None:
    inputs, outputs, size, options = CASES[name]
    transposed = options.get("transposed", False)
    tensors = image(1, inputs, height, 46), image(*((inputs, outputs) if transposed else (outputs, inputs)), *size)
    ours = [each.requires_grad_() for each in (*tensors, torch.ones(outputs))]
    theirs = [each.detach().double().requires_grad_() for each in ours]
    kind = functional.conv_transpose2d if transposed else functional.conv2d
    keywords = {key: value for key, value in options.items() if key != "transposed"}
    expected = kind(*theirs, **keywords)  # type: ignore[arg-type]
    g_BCHW = image(*expected.shape, seed=3)
    wanted = torch.autograd.grad(expected, theirs, g_BCHW.double())
    made = torch.autograd.grad(convolved(*ours, **options), ours, g_BCHW)
    for their, own in zip(wanted, made, strict=True):
        assert own.shape == their.shape
        torch.testing.assert_close(own.double(), their, rtol=0, atol=2e-5 * their.abs().max().item())


@pytest.mark.parametrize("count", [1, 2])
def test_a_transposed_convolution_gives_a_pixel_the_same_bits_in_any_window(count: int) -> None:
    """The bits of torch where it takes oneDNN too, for tensors of more than 20480 values (decision 0002)."""
    draw = random.Random(7)
    with threads(count), torch.no_grad():
        for seed in range(40):
            inputs, outputs, step = draw.choice((2, 3, 8, 10, 16, 24, 64)), draw.randint(1, 24), draw.choice((2, 3, 4))
            kernel, height, width = draw.choice((step, step, step + 1)), draw.randint(1, 20), draw.randint(1, 20)
            weight = image(inputs, outputs, kernel, kernel, seed=seed + 1)
            bias = image(1, outputs, 1, 1, seed=seed).flatten() if draw.random() < 0.7 else None
            how = (step, step), (0, 0), (0, 0), 1, (1, 1)
            x_BCHW = image(1, inputs, 110, 110, seed=seed)
            whole = convolve_transposed(x_BCHW, weight, bias, *how)
            assert torch.equal(whole, functional.conv_transpose2d(x_BCHW, weight, bias, step))
            row, col = draw.randint(0, 110 - height), draw.randint(0, 110 - width)
            part = x_BCHW[:, :, row : row + height, col : col + width].contiguous(memory_format=torch.channels_last)
            own = convolve_transposed(part, weight, bias, *how)
            assert own.is_contiguous(memory_format=torch.channels_last)
            over = kernel - step  # columns that a neighbour adds to
            inner = own[:, :, over : height * step, over : width * step]
            rows = slice(row * step + over, (row + height) * step)
            cols = slice(col * step + over, (col + width) * step)
            assert torch.equal(inner, whole[:, :, rows, cols]), (inputs, outputs, step, kernel, height, width)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("frozen", [(1,), (2,), (1, 2), (0, 1)], ids=str)
def test_what_is_frozen_hands_gradients_on(frozen: tuple[int, ...], transposed: bool) -> None:
    """Input, weight and bias, some of which want no gradient."""
    tensors = image(1, 8, 64, 64), image(8, 8, 3, 3, seed=2), image(1, 8, 1, 1).flatten()
    for k, each in enumerate(tensors):
        each.requires_grad_(k not in frozen)
    wanted = [each for each in tensors if each.requires_grad]
    kind = functional.conv_transpose2d if transposed else functional.conv2d
    made = convolved(*tensors, padding=(1, 1), transposed=transposed), kind(*tensors, 1, 1)
    ours, theirs = (torch.autograd.grad(each.sin().sum(), wanted) for each in made)
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-4, atol=1e-4)


def test_what_the_kernel_does_not_know_goes_to_torch() -> None:
    """float64, groups, padding by name, lower precision: the bits of torch's own."""
    ours, x_BCHW = SteadyConvolution(3, 16, 3, padding=1).double(), image(2, 3, 17, 20).double()
    assert torch.equal(ours(x_BCHW), functional.conv2d(x_BCHW, ours.weight, ours.bias, 1, 1))
    x_BCHW = image(2, 4, 17, 20)
    grouped = SteadyConvolution(4, 6, 3, padding="same", groups=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(grouped(x_BCHW), functional.conv2d(x_BCHW, grouped.weight, grouped.bias, 1, "same", 1, 2))
        assert ours.float()(image(2, 3, 17, 20)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_compile_sees_one_graph(dtype: torch.dtype) -> None:
    """Nothing cuts it at the convolutions; the kernels are torch.compile's own."""
    network = nn.Sequential(SteadyConvolution(3, 4, 3), nn.LeakyReLU(), SteadyConvolution(4, 2, 1)).to(dtype)
    x_BCHW = image(2, 3, 17, 20).to(dtype)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x_BCHW), network(x_BCHW), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 4, 8, 16])
def test_single_pixels_by_steps(channels: int) -> None:
    """Of 8 channels torch's own gradient of the weight ends the process."""
    ours = SteadyConvolution(channels, 2 * channels, 1, 2, bias=False).to(memory_format=torch.channels_last)
    x_BCHW = image(2, channels, 64, 67).requires_grad_()
    y_BCHW = ours(x_BCHW)
    y_BCHW.square().sum().backward()
    weight, wide_BCHW = ours.weight.detach().double().requires_grad_(), x_BCHW.detach().double().requires_grad_()
    expected_BCHW = functional.conv2d(wide_BCHW, weight, stride=2)
    expected_BCHW.square().sum().backward()
    for found, expected in ((y_BCHW, expected_BCHW), (x_BCHW.grad, wide_BCHW.grad), (ours.weight.grad, weight.grad)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
