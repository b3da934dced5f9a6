"""The law: tiles and ranks change no output and no gradient. Every network of the range, float64, one thread.

Serially a third of the cases is run, an eighth of the deepest networks (all with TILEDSEG_NIGHTLY); over ranks some.
Outputs are equal to the last bit wherever this processor's convolutions are steady (`kernels.py`); in float32 too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.conftest import NIGHTLY
from tests.law.cases import Case, all_cases, one_rank, relative, step_gradients, tiled_logits, undivided
from tests.law.kernels import has_steady_kernels
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Mesh
from tiledseg.geometry.halo import Footprint

CASES = all_cases()
OUTPUT_BOUND = 1e-13
GRADIENT_BOUND = 1e-12
# A bias whose gradient all but cancels over the pixels keeps fewer digits in either order of summation.
TENSOR_BOUND = 1e-10


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def name(case: Case) -> str:
    u = case.unet
    return f"L{u.levels}-n{u.convs_per_level}-K{u.kernel}-{u.padding}-{u.upsampling}-{case.grid[0]}x{case.grid[1]}"


def check(case: Case, mesh: Mesh) -> float:
    """Loss and gradients equal the undivided network's; returns the largest difference of an output."""
    expected = undivided(case)
    logits_KHW = tiled_logits(case, mesh.rank, mesh.size)
    mesh.communicator.all_reduce_sum(logits_KHW).wait()
    loss, found = step_gradients(case, mesh)
    assert loss == pytest.approx(expected.loss, rel=GRADIENT_BOUND)
    assert found.keys() == expected.gradients.keys()
    whole = torch.cat([g.reshape(-1) for g in expected.gradients.values()])
    assert relative(torch.cat([found[key].reshape(-1) for key in expected.gradients]), whole) <= GRADIENT_BOUND
    worst = max((relative(found[key], expected.gradients[key]), key) for key in found)
    assert worst[0] <= TENSOR_BOUND, worst
    return (logits_KHW - expected.logits_KHW).abs().max().item()


exact: list[bool] = []
SERIAL_CASES = [
    case for number, case in enumerate(CASES) if NIGHTLY or number % (3 if case.unet.levels < 5 else 8) == 0
]


@pytest.mark.parametrize("case", SERIAL_CASES, ids=name)
def test_tiles_change_no_output_and_no_gradient(case: Case) -> None:
    difference = check(case, one_rank())
    exact.append(difference == 0.0)
    assert difference <= bound(case)


def bound(case: Case) -> float:
    """What the outputs of tiles may differ by: nothing, where a pixel's bits do not depend on where it stands."""
    return 0.0 if has_steady_kernels(case.network()) else OUTPUT_BOUND


def test_most_outputs_are_equal_to_the_last_bit(capsys: pytest.CaptureFixture[str]) -> None:
    if not exact:
        pytest.skip("counts the cases of the test before it; run the whole file")
    with capsys.disabled():
        print(f"\nthe law: {sum(exact)} of {len(exact)} tiled networks give the whole raster's outputs exactly (0.0)")
    assert sum(exact) >= 0.9 * len(exact)


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
    whole_KHW = tiled_logits(case, dtype=torch.float32, grid=(1, 1))
    assert has_steady_kernels(case.network(torch.float32))
    assert torch.equal(tiled_logits(case, dtype=torch.float32), whole_KHW)


def test_a_halo_that_is_one_alignment_too_small_is_seen() -> None:
    """The test can fail: with less halo than the minimum, outputs differ."""
    grid = (4, 4)

    class TooSmall(Case):
        @property
        def footprint(self) -> Footprint:
            whole = super().footprint
            return replace(whole, before=whole.before - whole.alignment, after=whole.after - whole.alignment)

    unet = UNet(3, 2, 3, 2, bands=2, classes=3)
    expected = undivided(Case(unet, grid))
    found_KHW = tiled_logits(TooSmall(unet, grid))
    shape = Case(unet, grid).raster
    small = tuple(min(a, b) for a, b in zip(shape, found_KHW.shape[1:], strict=True))
    cut = (slice(None), slice(0, small[0]), slice(0, small[1]))
    assert (found_KHW[cut] - expected.logits_KHW[cut]).abs().max() > 1e-9


SHARED = [
    pytest.param(case, id=name(case), marks=pytest.mark.ranks(2 + number % 3))
    for number, case in enumerate(CASES[4::13])
]


@pytest.mark.mpi
@pytest.mark.parametrize("case", SHARED)
def test_ranks_change_no_output_and_no_gradient(case: Case, mesh: Mesh) -> None:
    assert check(case, mesh) <= OUTPUT_BOUND
