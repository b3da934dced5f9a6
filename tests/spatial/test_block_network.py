"""Images in blocks, on one rank and on ranks that share one, against torch on the whole image, in one process: y, dx,
all gradients (summed over the ranks) and buffers, in float64. `test_drawn_networks.py` has networks that are drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.law.every_layer import EveryLayer, ForeignLayers
from tests.spatial import drawn
from tests.spatial.drawn import CHANNELS, image, with_weights
from tests.spatial.thread_ranks import on_ranks
from tests.spatial.twins import Network, Result, as_graph, copied, difference, loss_weights, undivided
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Axes, serial_axes
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import settle
from tiledseg.memory.file_store import open_shelf
from tiledseg.models.network import build_modules
from tiledseg.spatial.block_network import BlockNetwork, ImageRanks
from tiledseg.spatial.block_pass import BlockPass
from tiledseg.spatial.image_pass import Image

EVERYTHING = 1 << 20


def in_blocks(
    network: Network,
    x_BCHW: torch.Tensor,
    cut: Callable[[BlockNetwork], tuple[Partition, Partition]],
    axes: Axes | None = None,
    store: str = "host",
    scored: int = EVERYTHING,
) -> Result:
    """One pass of a copy of the network over this rank's blocks of what `cut` gives. The loss is the weighted sum of
    `undivided`, of `scored` rows of the output."""
    torch.set_num_threads(1)
    axes, own = axes or serial_axes(), copied(network)
    twin, shelf = BlockNetwork(as_graph(own)), open_shelf(store)
    assert axes.position is not None
    ranks = ImageRanks(axes.shape.rows, axes.shape.cols, (axes.position.row, axes.position.col))
    program = twin.program(*cut(twin), None, ranks)
    x_own_BCHW = x_BCHW[(slice(None), slice(None), *program.own_box.slices)]
    run = BlockPass(twin, [Image(x_own_BCHW, program)], shelf, True, axes=axes)
    run.forward()
    (blocks,) = run.images
    full = [dim[program.segments[-1].leaving[0]].size for dim in (program.rows, program.cols)]
    y_BCHW: list[torch.Tensor] = []

    def loss(block: int, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        if not y_BCHW:
            y_BCHW.append(outputs[0].new_zeros(*outputs[0].shape[:2], *full))
        box = program.box(program.segments[-1].leaving[0], block)
        place = (slice(None), slice(None), *box.slices)
        y_BCHW[0][place] = outputs[0].detach()
        weights_BCHW = loss_weights(y_BCHW[0].shape)
        weights_BCHW[:, :, scored:] = 0
        return None if box.row.start >= scored else (outputs[0] * weights_BCHW[place].to(outputs[0])).sum()

    run.backward(loss)
    dx_BCHW = torch.zeros_like(x_BCHW)
    for block in program.own:
        gradient = blocks.input_gradient(block)
        if gradient is not None:
            dx_BCHW[(slice(None), slice(None), *program.box(0, block).slices)] = gradient
    run.close()
    shelf.close()
    weights = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in own.named_parameters()}
    return Result(y_BCHW[0], dx_BCHW, weights, dict(own.named_buffers()))


def unet(padding: str, norm: str, upsampling: str) -> UNet:
    return UNet(3, 2, 3, 4, padding, norm, upsampling, 0.25, bands=2, classes=3)


@pytest.mark.parametrize("number", range(len(drawn.norms())))
def test_norms_on_uneven_blocks(number: int) -> None:
    network = with_weights(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), drawn.norms()[number]), 3)
    x_BCHW, cut = image((2, CHANNELS, 13, 10), 5), (Partition((0, 2, 9, 13)), Partition((0, 7, 10)))
    fault = difference(in_blocks(network, x_BCHW, lambda twin: cut), undivided(network, x_BCHW))
    assert fault is None, fault


SHARED = {
    "unet-none": (unet("same", "none", "transposed"), (2, 1), (1, 2)),
    "unet-batch": (unet("same", "batch", "bilinear"), (2, 2), (2, 1)),
    "unet-instance": (unet("same", "instance", "nearest"), (1, 3), (2, 2)),
    "valid-group": (unet("valid", "group", "nearest"), (2, 1), (1, 2)),
    "every-layer": (EveryLayer(True), (2, 2), (2, 1)),
    "foreign-layers": (ForeignLayers(True, products=False), (2, 1), (1, 2)),
}


@pytest.mark.parametrize(
    ("name", "store", "scored"),
    [
        *((name, "host", EVERYTHING) for name in SHARED),
        ("unet-batch", "file", EVERYTHING),
        ("unet-instance", "host", 16),
        ("every-layer", "host", 16),
    ],
)
def test_ranks_that_share_an_image_in_blocks(name: str, store: str, scored: int, tmp_path: Path) -> None:
    """Also where nobody scores a rank's outputs: its zeros are in the sums that the others wait for."""
    kind, ranks, blocks = SHARED[name]
    network = build_modules(kind, seed=1).double()
    x_BCHW = image((2, 2, *((40, 56) if name != "valid-group" else (68, 76))), 5)

    def cut(twin: BlockNetwork) -> tuple[Partition, Partition]:
        dims = zip((twin.graph, twin.along_columns), x_BCHW.shape[2:], ranks, strict=True)
        rows, cols = (settle(graph, Partition.even(size, count)) for graph, size, count in dims)
        return twin.partitions((rows, cols), blocks)

    folder = store if store == "host" else str(tmp_path)
    found = on_ranks(*ranks, lambda axes: in_blocks(network, x_BCHW, cut, axes, folder, scored))
    for other in found[1:]:
        assert all(torch.equal(other.buffers[name], tensor) for name, tensor in found[0].buffers.items())
    weights = {name: sum(each.gradients[name] for each in found) for name in found[0].gradients}
    whole = Result(sum(e.y_BCHW for e in found), sum(e.dx_BCHW for e in found), weights, found[0].buffers)
    if scored == EVERYTHING:
        expected = undivided(network, x_BCHW)
    else:
        sides = Partition((0, x_BCHW.shape[2])), Partition((0, x_BCHW.shape[3]))
        expected = in_blocks(network, x_BCHW, lambda twin: sides, scored=scored)
    fault = difference(whole, expected)
    assert fault is None, fault
