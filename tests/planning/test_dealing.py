"""Tiles dealt to ranks: each once, evenly; and what a plan prices for a rank is what the trainer gives it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.architecture.unet import UNet
from tiledseg.execution.halo_modes import ReadMode
from tiledseg.geometry.box import Box
from tiledseg.geometry.tiling import batches, deal
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.cost_model import Machine, Prices, sum_of
from tiledseg.raster.samples.sampling import TileReference

UNET = UNet(2, 1, base_channels=2)
MACHINE = Machine(1e9, memory_bandwidth=1e9, name="drawn", launch=1e-5)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=70), st.integers(1, 80), st.integers(1, 3))
def test_the_ranks_together_have_the_step(sides: list[int], owners: int, batch: int) -> None:
    contexts = [(side, 7) for side in sides]
    shares = deal(contexts, owners, batch)
    assert len(shares) == owners
    assert sorted(number for share in shares for number in share) == list(range(len(sides)))
    pixels = [sum(math.prod(contexts[number]) for number in share) for share in shares]
    most = max([batch * math.prod(context) for context in contexts], default=0)
    assert max(pixels) <= 4 / 3 * max(sum(pixels) / owners, most) + most / 3, "Graham's bound, loosened to integers"
    if batch == 1:
        assert all(list(share) == sorted(share) for share in shares)
    for together in batches(contexts, batch):  # which are those of the step, whatever the number of ranks
        assert len(together) <= batch
        assert sum(set(together) <= set(share) for share in shares) == 1


def test_pixels_count_not_tiles() -> None:
    assert deal([(1, 1), (8, 1), *[(1, 1)] * 7], 2) == [(1,), (0, 2, 3, 4, 5, 6, 7, 8)]


def test_neighbours_go_to_one_rank_where_tiles_keep_crops() -> None:
    assert deal([(4, 4)] * 7, 3, in_runs=True) == [(0, 1), (2, 3, 4), (5, 6)]


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(20, 90), st.integers(20, 90)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_a_rank_is_priced_by_the_tiles_that_the_trainer_deals_to_it(
    shape: tuple[int, int], grid: tuple[int, int], ranks: int, images: int, batch: int
) -> None:
    """For 3 x 3 tiles on 5 ranks: at most two each."""
    parallel = Parallelism(halo="read")
    given_: dict[str, Any] = {"grid": grid, "images_per_step": images, "tiles_per_batch": batch}
    plan = plan_run(RunQuestion(UNET, (Extent(shape),), ranks, 1 << 40, parallel, machine=MACHINE, **given_))
    tilings = plan.tilings * images
    step = [TileReference(image, number) for image, tiling in enumerate(tilings) for number in range(len(tiling))]
    network, mesh = SimpleNamespace(graph=UNET.graph()), SimpleNamespace(size=ranks)
    mode = ReadMode(network, mesh, tilings, "fp32", batch=plan.tiles_per_batch)  # type: ignore[arg-type]
    shares = [[part.tile for part in parts] for parts in mode.dealt(step) if parts]

    cost, raster = plan.cost, Box.of_shape(shape)
    assert cost.ranks == len(shares)
    assert cost.read_max == max(sum(tile.context.clip(raster).area for tile in tiles) for tiles in shares)
    prices = Prices(UNET.graph(), UNET.bands, 4, MACHINE, cost.ranks)
    times = [sum_of([prices.tile(tile.context.shape, tile.core.area) for tile in tiles]) for tiles in shares]
    longest = max(times, key=sum)
    for name in ("forward", "backward", "reading"):
        assert getattr(cost.time, name) == pytest.approx(getattr(longest, name))
    assert plan.seconds == pytest.approx(sum(prices.step(longest, 1, 0.0)))
