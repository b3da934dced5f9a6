"""No tensor of 2^31 values reaches a kernel: refused with a grid that would do, or cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tiledseg.architecture.unet import UNet
from tiledseg.config.words import UPSAMPLINGS
from tiledseg.errors import GeometryError, InputError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.layer_windows import layer_blocks
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.models.network import build_modules
from tiledseg.planning.run.blocks import BlockSettings
from tiledseg.planning.run.grid import check_tiles, choose_grid
from tiledseg.planning.run.plan import choose_spread, plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.mode_cost import check_blocks
from tiledseg.planning.walk.rank_steps import MOST_VALUES, largest_tensor

LAYERS = UNet().graph()
FOOTPRINT = network_footprint(LAYERS)


def tiled(size: int, grid: int) -> Tiling:
    return make_tiling((size, size), (grid, grid), FOOTPRINT)


def asked(ranks: int, halo: str = "layer") -> RunQuestion:
    return RunQuestion(UNet(), (Extent((4096, 4096)),), ranks, 2**60, Parallelism(halo=halo))


@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
@pytest.mark.parametrize(("norm", "padding"), [("none", "same"), ("instance", "valid")])
def test_the_largest_is_that_of_the_network(norm: str, padding: str, upsampling: str) -> None:
    """Of all outputs, on the meta device."""
    unet = UNet(3, base_channels=8, padding=padding, norm=norm, upsampling=upsampling)
    with torch.device("meta"):
        network = build_modules(unet)
        made: list[int] = []
        for module in network.layers.values():
            module.register_forward_hook(lambda m, args, y: made.append(y.numel()))
        network(torch.empty(1, 4, 92, 100))
    assert largest_tensor(unet.graph(), 4, (92, 100)).values == max(made)


def test_an_automatic_grid_is_cut_whatever_the_memory() -> None:
    grid = choose_grid((4096, 4096), LAYERS, FOOTPRINT, 2**60, 2, 1)
    assert grid != (1, 1)
    check_tiles(make_tiling((4096, 4096), grid, FOOTPRINT), LAYERS, 4)
    assert choose_grid((4080, 4080), LAYERS, FOOTPRINT, 2**60, 2, 1) == (1, 1)


def test_a_network_too_large_for_any_grid_says_so() -> None:
    layers = UNet(4, base_channels=1 << 20).graph()
    with pytest.raises(GeometryError, match="use a smaller network"):
        choose_grid((200, 200), layers, network_footprint(layers), 2**60, 4, 1)


@pytest.mark.parametrize("halo", ["read", "exchange"])
def test_train_and_predict_refuse_tiles(halo: str) -> None:
    with pytest.raises(InputError, match=r"values, but kernels count to 2147483646; use a finer grid than 1 x 1"):
        choose_spread(asked(1, halo), [tiled(4096, 1)])


def test_in_layer_mode_a_ranks_block_counts() -> None:
    """A whole image of 2^31 values is spread over four ranks, not refused; on one it is."""
    assert choose_spread(asked(4), [tiled(4096, 2)]).mesh.ranks == 4
    with pytest.raises(InputError, match="spread the image over more ranks than 1 x 1"):
        choose_spread(asked(1), [tiled(4096, 2)])


def test_the_halo_that_a_block_reads_counts() -> None:
    """Blocks of just less than 2^31 values are more with their neighbours' pixels."""
    assert 128 * 4080 * 4112 <= MOST_VALUES < 128 * 4080 * 4113
    fitting, larger = ((2 * 4080, 2 * width) for width in (4080, 4112))
    for raster in (fitting, larger):
        cut = layer_blocks(make_tiling(raster, (2, 2), FOOTPRINT), LAYERS, (2, 2))
        if raster == fitting:
            check_blocks(LAYERS, cut.rows, cut.cols, 1, 4)
            continue
        with pytest.raises(GeometryError, match="more ranks than 2 x 2"):
            check_blocks(LAYERS, cut.rows, cut.cols, 1, 4)


def test_a_block_of_a_ranks_block_counts_where_it_is_computed_in_blocks() -> None:
    parallel, blocks = Parallelism(halo="layer"), BlockSettings(None)
    question = RunQuestion(UNet(base_channels=2), (Extent((40_000, 40_000)),), 1, 2**40, parallel, grid=(1, 1))
    planned = plan_run(replace(question, blocks=blocks))
    assert planned.blocks is not None
    with pytest.raises(InputError, match="spread the image over more ranks than 1 x 1"):
        plan_run(question)
