"""Golden values of the paper and of the exact halos, the support of real gradients, and impossible halos."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.geometry.drawn import line
from tiledseg.architecture.unet import UNet
from tiledseg.config.words import PADDINGS, UPSAMPLINGS
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import (
    Footprint,
    is_padded,
    minimum_halo,
    network_footprint,
    paper_efficiency,
    paper_efficiency_linear,
    paper_halo,
    paper_shrink,
    round_up,
)
from tiledseg.geometry.layers.convolutions import Convolution, TransposedConvolution
from tiledseg.geometry.layers.resampling import MaxPool
from tiledseg.geometry.shapes import is_legal_size, output_size
from tiledseg.geometry.tiling import make_tiling, tiling_efficiency
from tiledseg.models.network import build_network


@pytest.mark.parametrize(
    ("levels", "formula", "exact", "bilinear"),
    [(2, 8, 8, 10), (3, 20, 22, 26), (4, 44, 46, 54), (5, 92, 94, 110), (6, 188, 190, 222)],
)
def test_table_of_exact_halos(levels: int, formula: int, exact: int, bilinear: int) -> None:
    assert paper_shrink(kernel=3, stride=2, padding=1, size=10) == (10 + 1) / 2 - 1
    assert paper_halo(levels, 2, paper_shrink(3)) == formula
    valid = network_footprint(UNet(levels=levels, padding="valid").graph())
    assert (valid.mirror, valid.offset) == (True, formula)
    unit = 2 ** (levels - 1)
    for upsampling, halo in (("transposed", exact), ("nearest", exact), ("bilinear", bilinear)):
        layers = UNet(levels=levels, upsampling=upsampling).graph()
        assert minimum_halo(layers) == (halo, halo)
        assert network_footprint(layers) == Footprint(unit, round_up(halo, unit), round_up(halo, unit))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
def test_a_wider_halo_is_taken_and_still_legal(padding: str, upsampling: str) -> None:
    layers = UNet(levels=4, padding=padding, upsampling=upsampling).graph()
    minimum = max(minimum_halo(layers))
    for halo in range(minimum, minimum + 20):
        footprint = network_footprint(layers, halo)
        assert min(footprint.before, footprint.after) >= halo
        size = footprint.before + 10 * footprint.alignment + footprint.after
        assert is_legal_size(layers, size)
        assert is_padded(layers) == (not footprint.mirror)


def test_impossible_halos_name_both_values() -> None:
    layers = UNet(levels=5).graph()
    with pytest.raises(GeometryError, match=r"halo 92 is less than the 94 pixels"):
        network_footprint(layers, 92)
    assert network_footprint(layers, 92, exact=False).before == 96
    with pytest.raises(GeometryError, match="halo -3 is negative"):
        network_footprint(layers, -3)
    with pytest.raises(GeometryError, match="turns 2 pixels of input into 1; resize its output"):
        network_footprint(line(Convolution(2, 3, padding=1), MaxPool()))
    for padding in (0, 1):  # 2 n + 1 and 2 n - 1 outputs: of another size than the image's, whatever its borders
        odd = TransposedConvolution(1, 3, True, 2, padding)
        with pytest.raises(GeometryError, match="turns 2 pixels of input into 1; resize its output"):
            network_footprint(line(Convolution(1, 3, 2, 1), odd))


@pytest.mark.parametrize(("grid", "halo"), [(8, 92), (1, 0), (40, 200)])
def test_efficiency_and_its_first_order(grid: int, halo: int) -> None:
    """The paper's optimum: 1.3161, and 1.2944 by the linear form."""
    how = (10000, 10000), (grid, grid), halo
    exact, linear = paper_efficiency(*how), paper_efficiency_linear(*how)
    assert exact == pytest.approx(linear + (2 * halo * grid / 10000) ** 2)
    if grid == 8:
        assert (exact, round(linear, 4)) == ((1434 / 1250) ** 2, 1.2944)
    tiling = make_tiling((300, 200), (3, 2), Footprint(1, halo, halo))
    assert tiling_efficiency(tiling) == sum(t.context.area for t in tiling.tiles) / 60000


def positive_network(graph: Graph) -> nn.Module:
    """The network of one band with positive weights, so that no dependence cancels, and with average in place of max
    pooling: the gradient of a maximum is zero at all inputs but one, though it depends on all."""
    network = build_network(graph, 1, seed=0).double()
    for name, module in list(network.layers.items()):
        if isinstance(module, nn.MaxPool2d):
            network.layers[name] = nn.AvgPool2d(module.kernel_size)
    with torch.no_grad():
        for parameter in network.parameters():
            # Weights that average keep the far ends of the support within the range of a float64.
            parameter.fill_(1 / parameter[0].numel() if parameter.dim() > 1 else 0.0)
    return network


def row_support(network: nn.Module, shape: tuple[int, int], out: Interval) -> Interval:
    """First and last input row that the rows `out` of the output depend on."""
    x_BCHW = torch.ones(1, 1, *shape, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(network(x_BCHW)[:, :, out.slice].sum(), x_BCHW)
    touched = gradient[0, 0].amax(dim=1).nonzero()[:, 0]
    return Interval(int(touched[0]), int(touched[-1]) + 1) if len(touched) else Interval(0, 0)


@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("levels", "convs", "kernel"), [(2, 1, 5), (2, 3, 3), (3, 2, 5), (5, 1, 5), (5, 2, 3)])
def test_minimum_halo_is_the_support_of_the_gradient(
    levels: int, convs: int, kernel: int, padding: str, upsampling: str
) -> None:
    """The support of d(core of the output) / d(input) of real networks in float64. The core is one alignment unit, the
    smallest that a tile can have."""
    unet = UNet(levels, convs, kernel, 1, padding, upsampling=upsampling, bands=1, classes=2)
    layers = unet.graph()
    before, after = minimum_halo(layers)
    footprint = network_footprint(layers)
    unit = footprint.alignment
    core = Interval(footprint.before, footprint.before + unit)
    height = core.stop + footprint.after
    width = next(n for n in range(1, height + 1) if is_legal_size(layers, n))
    outputs = core.shift(-footprint.offset)
    assert output_size(layers, height) >= outputs.stop
    found = row_support(positive_network(layers), (height, width), outputs)
    assert found == core.expand(before, after), "the gradient is zero outside the halo, and not zero at both its ends"
    assert footprint.before >= before
    assert footprint.after >= after
    assert footprint.before - before < unit, "rounded no further than to the next legal width"
    assert footprint.after - after < unit
