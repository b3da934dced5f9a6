"""Counted costs against those of real networks: parameters, shapes and multiply-adds."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.planning.flops import flop_counter
from tiledseg.architecture.unet import UNet
from tiledseg.config.words import NORMS, UPSAMPLINGS
from tiledseg.models.frozen import freeze
from tiledseg.models.network import build_modules
from tiledseg.planning.walk.cost import tile_walk


@pytest.mark.parametrize(("norm", "padding"), [*zip(NORMS, itertools.cycle(("same", "valid")), strict=False)])
def test_parameters_and_shapes_are_those_of_the_network(norm: str, padding: str) -> None:
    unet = UNet(4, 3, 3, 4, padding, norm, bands=5, classes=3)
    context = (64, 80) if padding == "same" else (154, 162)
    network = build_modules(unet, seed=0)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in network.layers.items():
        module.register_forward_hook(
            lambda module, inputs, output, name=name: shapes.__setitem__(name, tuple(output.shape[1:]))
        )
    network(torch.zeros(1, 5, *context))
    costs = tile_walk(unet.graph(), 5, context).costs
    assert [c.shape for c in costs] == list(shapes.values())
    counts = [sum(p.numel() for p in module.parameters()) for module in network.layers.values()]
    assert [c.parameters for c in costs] == counts


@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_multiply_adds_are_half_of_torchs_flops(padding: str, upsampling: str) -> None:
    unet = UNet(3, 2, 3, 4, padding, upsampling=upsampling)
    network = build_modules(unet, seed=0)
    with flop_counter() as counter:  # with gradients: without, an activation goes into its convolution, uncounted
        network(torch.zeros(1, 4, 52, 60))
    costs = tile_walk(unet.graph(), 4, (52, 60)).costs
    assert 2 * sum(c.multiply_adds for c in costs) == counter.get_total_flops()


def test_a_frozen_part_has_no_backward_pass() -> None:
    """Against torch's count, which makes no gradient of the network's input."""
    unet = UNet(3, 2, 3, 4, norm="group")
    for factors in ({"encoder*": 0}, {"encoder*": 0, "decoder*": 0}):
        network = freeze(build_modules(unet, seed=0), factors)
        with flop_counter() as counter:
            network(torch.zeros(1, 4, 64, 64)).sum().backward()
        costs = tile_walk(network.graph, 4, (64, 64)).costs
        work = sum(c.multiply_adds * (1 + c.passes) for c in costs)
        assert 2 * work == counter.get_total_flops()
