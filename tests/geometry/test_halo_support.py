"""The smallest legal halo is the smallest: the support of d(core of the output) / d(input) of real networks in float64.

The networks are those that are trained, with all weights positive, so that no dependence cancels, and with average in
place of max pooling: the gradient of a maximum is zero at three of its four inputs, though it depends on all. One base
channel keeps it quick. The core is one alignment unit, the smallest that a tile can have.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.box import Interval
from tiledseg.geometry.halo import minimum_halo, network_footprint
from tiledseg.geometry.shapes import is_legal_size, output_size
from tiledseg.models.network import build_modules


def positive_network(unet: UNet) -> nn.Module:
    network = build_modules(unet, seed=0).double()
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
    return Interval(int(touched[0]), int(touched[-1]) + 1)


@pytest.mark.parametrize("upsampling", ["transposed", "nearest", "bilinear"])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize(("levels", "convs"), [(2, 1), (2, 3), (3, 2), (5, 1), (5, 2)])
def test_minimum_halo_is_the_support_of_the_gradient(
    levels: int, convs: int, kernel: int, padding: str, upsampling: str
) -> None:
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
    found = row_support(positive_network(unet), (height, width), outputs)

    assert found == core.expand(before, after), "the gradient is zero outside the halo, and not zero at both its ends"
    assert footprint.before >= before
    assert footprint.after >= after
    assert footprint.before - before < unit, "rounded no further than to the next legal width"
    assert footprint.after - after < unit
