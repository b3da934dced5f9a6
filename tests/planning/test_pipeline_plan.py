"""The pipeline of a run: what is chosen, what is refused, and what the user is told."""

from __future__ import annotations

import pytest

from tiledseg.architecture.presets import PRESETS
from tiledseg.architecture.unet import UNet
from tiledseg.config.run import ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.planning.run.pipeline import LayerTimes, PipelinePlan, plan_pipeline
from tiledseg.planning.run.plan import choose_spread
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import (
    MicroBatchSize,
    micro_batch_size,
    parallelism,
)
from tiledseg.planning.walk.cost import tile_walk

UNET = UNet(3, base_channels=8, classes=3)
LAYERS = UNET.graph()
TILES = MicroBatchSize((128, 96), 8, 4)


def plan(memory: int | None = None, measured: LayerTimes | None = None, **parallel: object) -> PipelinePlan:
    asked = parallelism(ParallelConfig(**parallel))  # type: ignore[arg-type]
    return plan_pipeline(asked, LAYERS, UNET.bands, TILES, memory, measured)


def test_measured_times_decide_an_automatic_balance() -> None:
    """All time in the last layers: the first stage gets all others."""
    layers = len(LAYERS)
    forward, backward = ([0.0] * (layers - 2) + [last] * 2 for last in (1.0, 2.0))
    assert plan(measured=LayerTimes(forward, backward, lambda size: 0.0), stages=2).balance == (layers - 1, 1)
    assert plan(stages=2).balance != (layers - 1, 1), "by an assumed machine it is another"


def test_measured_messages_decide_too() -> None:
    """Each layer as long as the others, so that a quick link leaves the cut in the middle; a slow one moves it to where
    fewer bytes go through."""
    forward, backward = [1e-3] * len(LAYERS), [2e-3] * len(LAYERS)
    links = (lambda size: 1e-12 * size), (lambda size: 1e-6 * size)
    quick, slow = (plan(measured=LayerTimes(forward, backward, link), stages=2) for link in links)
    assert abs(quick.balance[0] - quick.balance[1]) <= 1
    walk = tile_walk(LAYERS, UNET.bands, TILES.pixels, TILES.value_bytes)
    assert walk.received(slow.balance[0], len(LAYERS)) < walk.received(quick.balance[0], len(LAYERS))
    assert quick.times.sending == pytest.approx([1e-12 * walk.tensor_bytes(quick.balance[0])])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_papers_balances_are_taken_as_they_are(preset: str) -> None:
    named = PRESETS[preset]
    layers = UNet(named.levels, norm=named.norm, base_channels=1).graph()
    parallel = ParallelConfig(stages=6, balance=list(named.balance))
    parallel.check()
    found = plan_pipeline(parallelism(parallel), layers, 4, MicroBatchSize((256, 256), 24, 4), None)
    assert found is not None
    assert found.balance == named.balance


def test_memory_moves_the_cuts_and_then_refuses() -> None:
    free = plan(stages=3, balance="modelled")
    tight = next(
        memory for memory in range(1 << 20, 64 << 20, 1 << 18) if not refused(memory, stages=3, balance="modelled")
    )
    assert plan(tight, stages=3, balance="modelled").balance != free.balance
    with pytest.raises(ConfigError, match=r"stage \d needs at least [\d.]+ \w+, but the memory of a stage is"):
        plan(tight // 4, stages=3, balance="modelled")
    with pytest.raises(ConfigError, match=r"stage \d of parallel.balance .* needs about .* GiB, but .* are free"):
        plan(tight // 4, stages=3, balance=list(free.balance))


def refused(memory: int, **parallel: object) -> bool:
    try:
        plan(memory, **parallel)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_recomputation_and_shorter_rounds_need_less_memory(schedule: str) -> None:
    """The least memory that is accepted falls with both."""

    def least(**more: object) -> int:
        every = range(1 << 18, 256 << 20, 1 << 18)
        return next(memory for memory in every if not refused(memory, stages=3, schedule=schedule, **more))

    assert least(recompute="always") < least()
    if schedule == "gpipe":
        assert least(micro_batches=2) < least()


def test_a_given_balance_is_checked() -> None:
    with pytest.raises(ConfigError, match="sums to 6 layers"):
        plan(stages=3, balance=[2, 2, 2])
    with pytest.raises(ConfigError, match=r"encoder0\.stash from stage 0 to 1"):
        plan(stages=2, schedule="folded", balance=[9, len(LAYERS) - 10, 1])


@pytest.mark.parametrize("halo", ["read", "exchange", "layer"])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_the_largest_micro_batch_is_one_that_the_network_takes(halo: str, padding: str) -> None:
    """In layer mode a block of an unpadded network may be no legal input by itself: it is priced as the next one."""
    unet = UNet(3, base_channels=4, padding=padding)
    tiling = make_tiling((150, 131), (4, 4), network_footprint(unet.graph()))
    parallel = ParallelConfig(halo=halo, stages=2, mesh="auto" if halo == "read" else [2, 1])
    asked = RunQuestion(unet, (Extent(tiling.raster),), 4, 2**60, parallelism(parallel))
    plans = choose_spread(asked, [tiling])
    assert (plans.mesh.ranks, plans.mesh.stages) == (4, 2)
    largest = micro_batch_size(plans, unet.graph(), [tiling], tiling.contexts, 1, 4)
    assert largest.count == {"read": 8, "exchange": 8, "layer": 1}[halo]
    plan_pipeline(parallelism(parallel), unet.graph(), 4, largest, None)
