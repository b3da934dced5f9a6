"""The law: tiles and ranks change no output and no gradient. Every network of the range, float64, one thread.

A third of the cases is run, an eighth of the deepest networks (all with TILEDSEG_NIGHTLY); `test_steps.py` has ranks.
Outputs are equal to the last bit wherever this processor's convolutions are steady; in float32 too.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import NIGHTLY
from tests.law.cases import Case, all_cases, difference, one_rank, relative
from tests.law.steps import Steps, by_torch, tiled_logits, train
from tiledseg.architecture.unet import UNet

CASES = all_cases()
OUTPUT_BOUND = 1e-13
GRADIENT_BOUND = 1e-12
# A bias whose gradient all but cancels over the pixels keeps fewer digits in either order of summation.
TENSOR_BOUND = 1e-10
SIDES = (19, 17)
STARTS = (0, 1, 2, 3)
SIZES = (7, 8, 9, 10, 11)
STEADY: dict[Any, bool] = {}


def has_steady_kernels(network: nn.Module) -> bool:
    """Whether every convolution of `network` gives a pixel of a window the bits that it gives it in the whole.

    In float64 a convolution is a matrix product of torch's BLAS. MKL's product for processors that are not Intel's adds
    in an order that depends on where in memory a pixel's values begin, and on how many pixels are left at the end
    (decision 0002): no tiling can be exact to the last bit there. Where the kernels are steady, every tiling must be.
    """
    alike = {  # once for each kernel: which weights it has tells nothing
        (type(m), m.weight.shape, m.stride, m.weight.dtype): m
        for m in network.modules()
        if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)
    }
    STEADY.update({kernel: is_steady(m) for kernel, m in alike.items() if kernel not in STEADY})
    return all(STEADY[kernel] for kernel in alike)


@torch.no_grad()
def is_steady(module: nn.Conv2d | nn.ConvTranspose2d) -> bool:
    """One layer without padding on windows of many starts and sizes, against itself on the whole."""
    draw = torch.Generator().manual_seed(1)
    x_BCHW = torch.randn(1, module.in_channels, *SIDES, generator=draw, dtype=torch.float64).to(module.weight.dtype)
    whole_BCHW = _without_padding(module, x_BCHW)
    for row, col, height, width in itertools.product(STARTS, STARTS, SIZES, SIZES):
        part_BCHW = _without_padding(module, x_BCHW[:, :, row : row + height, col : col + width])
        rows, cols = part_BCHW.shape[2:]
        scales = module.stride if isinstance(module, nn.ConvTranspose2d) else (1, 1)  # of convolutions the stride is 1
        row, col = (start * scale for start, scale in zip((row, col), scales, strict=True))
        if not torch.equal(part_BCHW, whole_BCHW[:, :, row : row + rows, col : col + cols]):
            return False
    return True


def _without_padding(module: nn.Conv2d | nn.ConvTranspose2d, x_BCHW: torch.Tensor) -> torch.Tensor:
    """Compute on memory of its own, channels last, as a tile is read."""
    x_BCHW = x_BCHW.clone(memory_format=torch.channels_last)
    padding, module.padding = module.padding, (0, 0)
    try:
        return module(x_BCHW)
    finally:
        module.padding = padding


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def name(case: Case) -> str:
    u = case.unet
    return f"L{u.levels}-n{u.convs_per_level}-K{u.kernel}-{u.padding}-{u.upsampling}-{case.grid[0]}x{case.grid[1]}"


SERIAL_CASES = [
    case for number, case in enumerate(CASES) if NIGHTLY or number % (3 if case.unet.levels < 5 else 8) == 0
]


@pytest.mark.parametrize("case", SERIAL_CASES, ids=name)
def test_tiles_change_no_output_and_no_gradient(case: Case) -> None:
    """No output differs where a pixel's bits do not depend on where it stands."""
    steps = Steps(case, images=((0,),))
    expected, found = by_torch(steps), train(steps, one_rank())
    assert found.losses == pytest.approx(expected.losses, rel=GRADIENT_BOUND)
    assert difference(found.gradients, expected.gradients) <= GRADIENT_BOUND
    worst = max((relative(found.gradients[key], whole), key) for key, whole in expected.gradients.items())
    assert worst[0] <= TENSOR_BOUND, worst
    bound = 0.0 if has_steady_kernels(case.network()) else OUTPUT_BOUND
    assert (tiled_logits(case) - tiled_logits(case, grid=(1, 1))).abs().max().item() <= bound


# Wide layers and narrow ones, one band and several: below and above what torch gives to its BLAS.
SINGLE = [
    *SERIAL_CASES[::4],
    *(
        Case(UNet(3, 2, 3, channels, padding, upsampling=upsampling, bands=bands, classes=4), (3, 2))
        for channels, bands in ((8, 1), (16, 3), (32, 4))
        for padding, upsampling in (("same", "transposed"), ("valid", "nearest"), ("same", "bilinear"))
    ),
]


@pytest.mark.parametrize("case", SINGLE, ids=name)
def test_outputs_in_float32_are_equal_to_the_last_bit(case: Case) -> None:
    assert has_steady_kernels(case.network(torch.float32))
    assert torch.equal(tiled_logits(case, "fp32"), tiled_logits(case, "fp32", (1, 1)))
