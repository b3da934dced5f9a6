"""An image that ranks share, each its part in blocks, against torch on all of it, in one process: y, dx, all gradients
(summed over the ranks) and buffers, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.law.every_layer import EveryLayer, ForeignLayers
from tests.spatial.blocks.thread_ranks import on_ranks
from tests.spatial.drawn import image
from tests.spatial.twins import Result, copied, difference, loss_weights, undivided
from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import Axes
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import settle
from tiledseg.memory.shelf import open_shelf
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.spatial.blocks.block_pass import BlockPass, Image
from tiledseg.spatial.blocks.network import BlockNetwork
from tiledseg.spatial.blocks.program import ImageRanks

SIZE = (40, 56)


def shared(
    network: GraphNetwork,
    x_BCHW: torch.Tensor,
    ranks: tuple[int, int],
    blocks: tuple[int, int],
    store: str = "host",
    scored: int = 1 << 20,
) -> Result:
    """One pass over the ranks; the loss is the weighted sum of `undivided`, of so many rows of the output."""

    def one(axes: Axes) -> tuple[Result, GraphNetwork]:
        torch.set_num_threads(1)
        own = copied(network)
        twin = BlockNetwork(own)
        cuts = [
            settle(g, Partition.even(s, n))
            for g, s, n in zip((twin.graph, twin.along_columns), x_BCHW.shape[2:], ranks, strict=True)
        ]
        assert axes.position is not None
        at = axes.position.row, axes.position.col
        program = twin.program(*twin.partitions((cuts[0], cuts[1]), blocks), None, ImageRanks(*ranks, at))
        box, shelf = program.own_box, open_shelf(store)
        x_own_BCHW = x_BCHW[(slice(None), slice(None), *box.slices)]
        run = BlockPass(twin, [Image(x_own_BCHW, program)], shelf, True, axes=axes)
        run.forward()
        (own_blocks,) = run.images
        result = program.segments[-1].leaving[0]
        full = [cut[result].size for cut in (program.rows, program.cols)]
        y_BCHW = torch.zeros(x_BCHW.shape[0], 3, *full, dtype=x_BCHW.dtype)

        weights_BCHW = loss_weights(y_BCHW.shape)
        weights_BCHW[:, :, scored:] = 0

        def loss(block: int, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
            box = own_blocks.output_box(block)
            place = (slice(None), slice(None), *box.slices)
            y_BCHW[place] = outputs[0].detach()
            return None if box.row.start >= scored else (outputs[0] * weights_BCHW[place]).sum()

        run.backward(loss)
        dx_BCHW = torch.zeros_like(x_BCHW)
        for block in program.own:
            gradient = own_blocks.input_gradient(block)
            if gradient is not None:
                dx_BCHW[(slice(None), slice(None), *program.box(0, block).slices)] = gradient
        run.close()
        shelf.close()
        weights = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in own.named_parameters()}
        return Result(y_BCHW, dx_BCHW, weights, dict(own.named_buffers()))

    found = on_ranks(*ranks, one)
    for other in found[1:]:
        assert all(torch.equal(other.buffers[name], tensor) for name, tensor in found[0].buffers.items())
    weights = {name: sum(each.gradients[name] for each in found) for name in found[0].gradients}
    return Result(sum(e.y_BCHW for e in found), sum(e.dx_BCHW for e in found), weights, found[0].buffers)


def unet(padding: str, norm: str, upsampling: str) -> UNet:
    return UNet(3, 2, 3, 4, padding, norm, upsampling, 0.25, bands=2, classes=3)


CASES = {
    "unet-none": (unet("same", "none", "transposed"), (2, 1), (1, 2)),
    "unet-batch": (unet("same", "batch", "bilinear"), (2, 2), (2, 1)),
    "unet-instance": (unet("same", "instance", "nearest"), (1, 3), (2, 2)),
    "unet-group": (unet("same", "group", "bilinear"), (2, 2), (1, 1)),
    "valid-group": (unet("valid", "group", "nearest"), (2, 1), (1, 2)),
    "every-layer": (EveryLayer(True), (2, 2), (2, 1)),
    "foreign-layers": (ForeignLayers(True), (2, 1), (1, 2)),
}


@pytest.mark.parametrize(("name", "store"), [*((name, "host") for name in CASES), ("unet-batch", "file")])
def test_ranks_give_what_torch_gives_on_the_whole_image(name: str, store: str, tmp_path: Path) -> None:
    kind, ranks, blocks = CASES[name]
    network = build_modules(kind, seed=1).double()
    x_BCHW = image((2, 2, *(SIZE if name != "valid-group" else (68, 76))), 5)
    folder = "host" if store == "host" else str(tmp_path)
    found = shared(network, x_BCHW, ranks, blocks, folder)
    fault = difference(found, undivided(network, x_BCHW))
    assert fault is None, fault


@pytest.mark.parametrize("name", ["unet-instance", "every-layer"])
def test_a_rank_whose_outputs_nobody_scores_takes_part(name: str) -> None:
    """Its zeros are in the sums that the others wait for."""
    network = build_modules(CASES[name][0], seed=1).double()
    x_BCHW = image((1, 2, *SIZE), 5)
    found = shared(network, x_BCHW, (2, 1), (1, 2), scored=16)
    fault = difference(found, shared(network, x_BCHW, (1, 1), (1, 1), scored=16))
    assert fault is None, fault
