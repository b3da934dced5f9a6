"""oneDNN's convolutions: a pixel has the same bits in any window, and gradients are torch's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tiledseg.models.layers.convolution import SteadyConvolution, convolve, convolve_transposed


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def image(*shape: int, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).contiguous(memory_format=torch.channels_last)


def convolved(
    x_BCHW: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool = False, **options: Any
) -> torch.Tensor:
    stride, padding, dilation = (
        options.get(key, (n, n)) for key, n in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    if transposed:
        return convolve_transposed(x_BCHW, weight, bias, stride, padding, (0, 0), 1, dilation)
    return convolve(x_BCHW, weight, bias, stride, padding, dilation, 1)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("transposed", [False, True])
@torch.no_grad()
def test_a_pixel_has_the_same_bits_in_any_window(transposed: bool) -> None:
    """Transposed, also the bits of torch where it takes oneDNN too, for more than 20480 values (decision 0002)."""
    draw = random.Random(3)
    for seed in range(40):
        inputs, outputs = draw.choice((1, 2, 3, 4, 8, 16, 32, 64)), draw.randint(1, 24)
        step, kernel = 1, draw.choice((1, 3, 5))
        if transposed:
            inputs, step = max(2, inputs), draw.choice((2, 3, 4))
            kernel = draw.choice((step, step, step + 1))
        sides = (inputs, outputs) if transposed else (outputs, inputs)
        weight = image(*sides, kernel, kernel, seed=seed + 1)
        bias = image(1, outputs, 1, 1).flatten() if draw.random() < 0.6 else None
        x_BCHW, how = image(1, inputs, 110, 110, seed=seed), {"stride": (step, step), "transposed": transposed}
        whole_BCHW = convolved(x_BCHW, weight, bias, **how)
        if transposed:
            assert torch.equal(whole_BCHW, functional.conv_transpose2d(x_BCHW, weight, bias, step))
        height, width = draw.randint(kernel, 40), draw.randint(kernel, 40)
        row, col = draw.randint(0, 110 - height), draw.randint(0, 110 - width)
        part_BCHW = x_BCHW[:, :, row : row + height, col : col + width].contiguous(memory_format=torch.channels_last)
        made_BCHW = convolved(part_BCHW, weight, bias, **how)
        assert kernel == inputs == 1 or made_BCHW.is_contiguous(memory_format=torch.channels_last)
        over = kernel - step if transposed else 0  # positions that a neighbour adds to
        rows, cols = (side - over for side in made_BCHW.shape[2:])
        inner = whole_BCHW[:, :, row * step :, col * step :][:, :, over:rows, over:cols]
        assert torch.equal(made_BCHW[:, :, over:rows, over:cols], inner), (inputs, outputs, step, kernel, height, width)


CASES: dict[str, tuple[int, int, tuple[int, int], dict[str, Any]]] = {
    "same": (4, 8, (3, 3), {"padding": (1, 1)}),
    "valid": (8, 8, (3, 3), {}),
    "padded in rows alone": (8, 5, (3, 3), {"padding": (1, 0)}),
    "strides, dilation": (6, 8, (3, 3), {"stride": (2, 2), "padding": (2, 2), "dilation": (2, 2)}),
    "strides that leave rows": (3, 8, (2, 2), {"stride": (3, 3)}),
    "pixels": (8, 5, (1, 1), {}),
    "pixels by steps": (8, 16, (1, 1), {"stride": (2, 2)}),  # torch's own gradient of the weight ends the process
    "one channel by steps": (1, 2, (1, 1), {"stride": (2, 2)}),
    "transposed": (16, 8, (2, 2), {"stride": (2, 2), "transposed": True}),
    "transposed, wide": (6, 5, (2, 3), {"stride": (2, 3), "transposed": True}),
    "transposed, padded": (6, 8, (4, 4), {"stride": (2, 2), "padding": (1, 1), "transposed": True}),
    "transposed, dense": (6, 8, (3, 3), {"padding": (1, 1), "transposed": True}),
}


@pytest.mark.parametrize("height", [5, 37])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_torch(name: str, height: int) -> None:
    """Also where input, weight or bias want no gradient."""
    inputs, outputs, size, options = CASES[name]
    transposed = options.get("transposed", False)
    tensors = image(1, inputs, height, 46), image(*((inputs, outputs) if transposed else (outputs, inputs)), *size)
    kind: Any = functional.conv_transpose2d if transposed else functional.conv2d
    for frozen in ((), (1,), (2,), (0, 1)):
        every = (*tensors, torch.ones(outputs))
        ours = [each.clone().requires_grad_(k not in frozen) for k, each in enumerate(every)]
        theirs = [each.double().requires_grad_(k not in frozen) for k, each in enumerate(every)]
        expected = kind(*theirs, **{key: value for key, value in options.items() if key != "transposed"})
        found, g_BCHW = convolved(*ours, **options), image(*expected.shape, seed=3)
        found.backward(g_BCHW)
        expected.backward(g_BCHW.double())
        pairs = [(own.grad, their.grad) for own, their in zip(ours, theirs, strict=True) if their.requires_grad]
        for own, their in [(found, expected), *pairs]:
            torch.testing.assert_close(own.double(), their, rtol=0, atol=2e-5 * their.abs().max().item())


def test_what_the_kernel_does_not_know_goes_to_torch() -> None:
    """float64, groups, padding by name, lower precision: the bits of torch's own."""
    ours, x_BCHW = SteadyConvolution(3, 16, 3, padding=1).double(), image(2, 3, 17, 20).double()
    assert torch.equal(ours(x_BCHW), functional.conv2d(x_BCHW, ours.weight, ours.bias, 1, 1))
    x_BCHW = image(2, 4, 17, 20)
    grouped = SteadyConvolution(4, 6, 3, padding="same", groups=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(grouped(x_BCHW), functional.conv2d(x_BCHW, grouped.weight, grouped.bias, 1, "same", 1, 2))
        assert ours.float()(image(2, 3, 17, 20)).dtype == torch.bfloat16


def test_torch_compile_sees_one_graph() -> None:
    """Nothing cuts it at the convolutions; the kernels are torch.compile's own."""
    network = nn.Sequential(SteadyConvolution(3, 4, 3), nn.LeakyReLU(), SteadyConvolution(4, 2, 1))
    x_BCHW = image(2, 3, 17, 20)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x_BCHW), network(x_BCHW), rtol=1e-5, atol=1e-5)
