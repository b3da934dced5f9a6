"""Statistics of one pixel are refused beforehand: exactly where torch would refuse them in mid-run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tiledseg.architecture.unet import UNet
from tiledseg.config.parallel import HALO_MODES
from tiledseg.config.words import NORMS
from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.models.network import build_modules
from tiledseg.planning.run.blocks import BlockSettings
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism, check_statistics, measuring, norm_fault
from tiledseg.tracing.trace import trace


def one_tile(unet: UNet, raster: tuple[int, int]) -> Tiling:
    return make_tiling(raster, (1, 1), network_footprint(unet.graph()))


def refused(unet: UNet, raster: tuple[int, int], mode: str, training: bool) -> bool:
    tiling = one_tile(unet, raster)
    try:
        check_statistics(unet.graph(), unet.bands, [tiling], mode, training)
    except ConfigError:
        return True
    return False


def fails(unet: UNet, raster: tuple[int, int], training: bool) -> bool:
    tile = one_tile(unet, raster).tiles[0]
    network = build_modules(unet, seed=0).train(training)
    try:
        network(torch.ones(1, unet.bands, tile.context.height, tile.context.width))
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("training", [True, False], ids=["trained", "mapped"])
@pytest.mark.parametrize("norm", NORMS)
def test_what_torch_would_refuse(norm: str, training: bool) -> None:
    unet = UNet(3, 1, base_channels=8, norm=norm)
    found = [refused(unet, raster, "read", training) for raster in ((4, 4), (4, 5), (5, 5), (9, 3))]
    assert found == [fails(unet, raster, training) for raster in ((4, 4), (4, 5), (5, 5), (9, 3))]
    assert found[0] == (norm == "instance" or (norm == "batch" and training))
    assert not any(found[1:])


def test_in_layer_mode_the_image_counts() -> None:
    """However it is cut."""
    unet = UNet(3, 1, base_channels=8, norm="instance")
    tiling = make_tiling((8, 8), (2, 2), network_footprint(unet.graph()))
    check_statistics(unet.graph(), unet.bands, [tiling], "layer")
    with pytest.raises(ConfigError, match=r"image of 4 x 4 px, halo included, leaves 1 pixel at .*; use larger"):
        check_statistics(unet.graph(), unet.bands, [one_tile(unet, (4, 4))], "layer")


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "mapped"])
@pytest.mark.parametrize("norm", NORMS)
def test_where_a_norm_is_exact(norm: str, trains: bool) -> None:
    layers = UNet(3, 1, base_channels=8, norm=norm).graph()
    anywhere = norm in ("none", "pixel") or (norm == "batch" and not trains)
    assert bool(measuring(layers, trains)) == (not anywhere)
    for mode in HALO_MODES:
        assert (norm_fault(layers, mode, 2, 1, trains) is None) == (anywhere or mode == "layer")
        assert norm_fault(layers, mode, 1, 1, trains) is None


def test_images_of_a_step_go_together_in_blocks() -> None:
    """In mode read whole ones; memory holds what all of a rank leave between segments, and the remedy is named."""
    network = UNet(3, 1, base_channels=8, norm="batch")
    asked = RunQuestion(network, (Extent((256, 256)),) * 4, 2, 1 << 30, images_per_step=4, grid=(1, 1))
    with pytest.raises(ConfigError, match=r"4 images at once .* use one image a step, parallel.halo layer or memory"):
        plan_run(asked)
    four, two, none = (
        plan_run(replace(asked, images_per_step=images, blocks=BlockSettings((4, 4)))) for images in (4, 2, 1)
    )
    assert [plan.spread.together for plan in (four, two, none)] == [True, True, False]
    stored = [plan.blocks.stored for plan in (four, two) if plan.blocks]
    assert stored[0] == pytest.approx(2 * stored[1], rel=0.01)
    assert two.memory == none.memory, "one on each rank"
    tiles = replace(asked, images_per_step=1, tiles_per_step=4, blocks=BlockSettings((4, 4)))
    assert plan_run(tiles).memory == four.memory
    with pytest.raises(ConfigError, match="its statistics would be those of a tile, not of the whole image"):
        plan_run(replace(tiles, grid=(2, 2)))
    parts = plan_run(replace(tiles, grid=(2, 2), parallel=Parallelism(exact=False)))
    assert not parts.spread.together, "what is not exact is tile by tile"
    assert parts.warnings[0].startswith("not exact: ")
    mapped = plan_run(replace(asked, trains=False, images_per_step=1, blocks=BlockSettings((4, 4))))
    assert not mapped.spread.together


@pytest.mark.parametrize(("halo", "stages", "exact"), [("layer", 1, True), ("layer", 2, False), ("read", 1, False)])
def test_statistics_of_a_step_of_several_images_are_exact_or_refused(halo: str, stages: int, exact: bool) -> None:
    """In mode layer all images of a step go through the network together; a pipeline has one after the other."""
    network = UNet(3, 1, base_channels=8, norm="batch")
    extents = (Extent((64, 64)),) * 3
    asked = RunQuestion(network, extents, 4, 1 << 30, Parallelism(halo=halo, stages=stages), images_per_step=3)
    if not exact:
        with pytest.raises(ConfigError, match=r"model\.norm is batch: 3 images at once"):
            plan_run(asked)
        return
    three, one = plan_run(asked), plan_run(replace(asked, images_per_step=1))
    assert (three.spread.together, one.spread.together) == (True, False)
    alone = replace(asked, parallel=replace(asked.parallel, mesh=(2, 2)))
    assert plan_run(alone).memory > 2 * plan_run(replace(alone, images_per_step=1)).memory


def test_statistics_that_stand_still_are_exact_everywhere() -> None:
    layers = UNet(3, 1, base_channels=8, norm="batch").graph().with_still_statistics()
    assert not measuring(layers)
    assert norm_fault(layers, "read", 4, 3) is None
    instance = UNet(3, 1, base_channels=8, norm="instance").graph()
    assert instance.with_still_statistics() == instance, "only a batch norm has statistics to stand still"


def test_a_norm_without_running_statistics_measures_maps_too() -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False))
    layers = trace(module, 2).graph
    assert [node.name for node in measuring(layers, trains=False)] == ["1"]
    fault = norm_fault(layers, "read", 4, 1, trains=False, keyed=False)
    assert fault is not None
    assert fault.startswith("'1' is a norm of kind batch: its statistics would be those of a tile")
    assert fault.endswith("use parallel.halo layer, or tiling.grid 1 (with memory.blocks in little memory)")
    trained = norm_fault(layers, "layer", 4, 3, keyed=False)
    assert trained is not None
    assert "norm none" not in trained
    assert "freeze_norm" not in trained
