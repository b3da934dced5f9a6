"""A network in blocks on one rank against torch's on the whole image: y, dx, all gradients and buffers, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.spatial import drawn
from tests.spatial.drawn import CHANNELS, Case, image, with_weights
from tests.spatial.twins import Network, Result, copied, difference, loss_weights, undivided
from tiledseg.architecture.unet import UNet
from tiledseg.errors import GeometryError
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.models.layers.pooling import MaxIndicesModule
from tiledseg.models.network import build_modules
from tiledseg.spatial.blocks.block_pass import BlockPass, Image
from tiledseg.spatial.blocks.network import BlockNetwork


def in_blocks(network: Network, x_BCHW: torch.Tensor, rows: Partition, cols: Partition) -> Result:
    """One pass of a copy of the network, block by block; the loss is the weighted sum of `undivided`."""
    network = copied(network)
    twin = BlockNetwork(network)
    program = twin.program(rows, cols)
    run = BlockPass(twin, [Image(x_BCHW, program)], input_gradient=True)
    run.forward()
    (one,) = run.images
    rows_out, cols_out = (cut[program.segments[-1].leaving[0]] for cut in (program.rows, program.cols))
    y_BCHW: list[torch.Tensor] = []

    def loss(block: int, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if not y_BCHW:
            y_BCHW.append(outputs[0].new_zeros(*outputs[0].shape[:2], rows_out.size, cols_out.size))
        at = (slice(None), slice(None), *one.output_box(block).slices)
        y_BCHW[0][at] = outputs[0].detach()
        return (outputs[0] * loss_weights(y_BCHW[0].shape)[at].to(outputs[0])).sum()

    run.backward(loss)
    dx_BCHW = torch.zeros_like(x_BCHW)
    for block in range(program.blocks):
        gradient = one.input_gradient(block)
        if gradient is not None:
            dx_BCHW[(slice(None), slice(None), *program.box(0, block).slices)] = gradient
    weights = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}
    return Result(y_BCHW[0], dx_BCHW, weights, dict(network.named_buffers()))


def check(case: Case) -> bool:
    """The law; False where the image cannot be so cut. What torch refuses on the whole image is refused."""
    expected = None
    try:
        expected = undivided(case.network, case.x_BCHW)
    except (RuntimeError, ValueError):
        if case.rows.parts * case.cols.parts == 1:
            return False
    try:
        found = in_blocks(case.network, case.x_BCHW, case.rows, case.cols)
    except GeometryError:
        return False
    assert expected is not None, "torch refuses this, the blocks do not"
    fault = difference(found, expected, case.floor)
    assert fault is None, fault
    return True


NORMS = ["none", "pixel", "instance", "group", "batch"]
CUTS = [("same", (24, 32), norm, blocks) for norm in NORMS for blocks in [(1, 1), (2, 3)]]
CUTS += [("same", (24, 32), "batch", blocks) for blocks in [(2, 1), (1, 3), (4, 4)]]
CUTS += [("valid", (68, 76), norm, (2, 3)) for norm in ("none", "instance", "batch")]


@pytest.mark.parametrize(("padding", "size", "norm", "blocks"), CUTS)
def test_a_unet_of_two_images(padding: str, size: tuple[int, int], norm: str, blocks: tuple[int, int]) -> None:
    network = build_modules(UNet(3, 2, 3, 4, padding, norm, "bilinear", 0.25, bands=2, classes=3), seed=1).double()
    rows, cols = BlockNetwork(network).partitions((Partition((0, size[0])), Partition((0, size[1]))), blocks)
    assert check(Case(network, image((2, 2, *size), 5), rows, cols))


@pytest.mark.parametrize("number", range(len(drawn.norms())))
def test_norms_on_uneven_blocks(number: int) -> None:
    network = with_weights(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), drawn.norms()[number]), 3)
    assert check(Case(network, image((2, CHANNELS, 13, 10), 5), Partition((0, 2, 9, 13)), Partition((0, 7, 10))))


@pytest.mark.parametrize("kind", ["chains", "networks"])
def test_drawn_networks(kind: str) -> None:
    computed = []

    @settings(derandomize=True, database=None, deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([(1, 1), (2, 2), (3, 2)]).flatmap(getattr(drawn, kind)))
    def law(case: Case) -> None:
        assume(not _may_tie(case.network))
        computed.append(check(case))

    law()
    assert sum(computed) > 10, "most of what is drawn can be cut"


def _may_tie(network: Network) -> bool:
    """Whether the place of a maximum is asked among pixels that upsampling has made equal: a rounding then decides."""
    modules = list(network.modules())
    copies = any(isinstance(m, nn.Upsample) and m.mode == "nearest" for m in modules)
    return copies and any(isinstance(m, MaxIndicesModule) for m in modules)
