"""The plan of a run on windows: memory by the largest, norms that see all that they must, a validation by itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.planning.test_run_plan import question
from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import window_tile
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion, WindowSteps
from tiledseg.planning.walk.step_memory import training_memory

RASTERS = (Extent((150, 230)), Extent((90, 60)))


def asked(norm: str = "none", side: int = 32, exact: bool = True, **given: Any) -> RunQuestion:
    per_step = {"tiles_per_step": 3} if exact else {"images_per_step": 3}
    windows = WindowSteps(side, 3, exact)
    return replace(question(norm, **given), rasters=RASTERS, windows=windows, **per_step)


@pytest.mark.parametrize("exact", [True, False])
def test_memory_is_that_of_a_step_on_the_largest_window(exact: bool) -> None:
    plan = plan_run(asked(exact=exact))
    graph = plan.network.graph()
    footprint = network_footprint(graph)
    context = window_tile((150, 230), (56, 96), 32, footprint).context.shape if exact else (32, 32)
    assert plan.memory == training_memory(graph, plan.network.bands, context, 4).total
    assert len(plan.tilings) == (2 if exact else 3)
    assert plan.spread.mode == "read"


def test_small_windows_go_together_through_a_batch_norm_and_take_memory_together() -> None:
    plan = plan_run(asked("batch", exact=False, halo="layer", held_out=RASTERS, ranks=1))
    assert plan.spread.together
    alone = plan_run(replace(asked("batch", exact=False, halo="layer", ranks=1), images_per_step=1))
    assert plan.memory > 2 * alone.memory
    assert (plan.validation.mode, plan.validation.together) == ("read", False)
    assert len(plan.held_out) == 2
    note = next(note for note in plan_run(asked("batch", exact=False, halo="layer", memory=9)).warnings)
    assert "fewer windows per_step" in note


def test_small_windows_that_go_together_run_at_once_the_same_on_any_ranks() -> None:
    """One, unless more are asked for; ranks take whole batches."""
    eight = replace(asked("batch", exact=False, halo="layer"), windows=WindowSteps(32, 8, False), images_per_step=8)
    with pytest.raises(
        ConfigError, match=r"6 of 8 ranks own nothing: .* start 2 ranks, a smaller train.tiles_per_batch"
    ):
        plan_run(replace(eight, ranks=8, tiles_per_batch=4))
    eight = replace(eight, parallel=replace(eight.parallel, idle_ranks=True))
    for ranks, memory in itertools.product((1, 2, 8), (10**6, 10**12)):
        plan = plan_run(replace(eight, ranks=ranks, memory=memory))
        assert (plan.tiles_per_batch, plan.spread.mesh.replicas) == (1, ranks)
        plan = plan_run(replace(eight, ranks=ranks, memory=memory, tiles_per_batch=4))
        assert (plan.tiles_per_batch, plan.spread.mesh.replicas) == (4, min(ranks, 2))
    (note,) = plan_run(replace(eight, ranks=3, tiles_per_batch=4)).warnings
    assert "1 of 3 ranks own nothing" in note
    assert "steps of 8 images in batches of 4; start 2 ranks, a smaller train.tiles_per_batch" in note
    needed = [plan_run(replace(eight, tiles_per_batch=count, ranks=2)) for count in (1, 3, 8, 100)]
    assert [plan.tiles_per_batch for plan in needed] == [1, 3, 8, 8]
    assert [plan.spread.mesh.replicas for plan in needed] == [2, 2, 1, 1]
    assert needed[0].memory < needed[1].memory < needed[2].memory == needed[3].memory, "4, 6 and 8 windows a rank"
    alone = replace(asked(exact=False, halo="layer"), tiles_per_batch=2)
    with pytest.raises(ConfigError, match=r"tiles_per_batch is 2, but in parallel.halo layer a rank has"):
        plan_run(alone)


def test_a_norm_over_the_image_is_exact_on_windows_that_show_all_of_it() -> None:
    with pytest.raises(ConfigError, match=r"a part of the image; use train.windows with halo none, or norm none"):
        plan_run(asked("instance"))
    one = replace(asked("instance", side=60), rasters=(Extent((60, 60)),))
    assert plan_run(one).warnings == ()
    with pytest.raises(ConfigError, match=r"of the image; use train.windows with halo none with parallel.halo"):
        plan_run(asked("batch"))


def test_a_validation_beside_small_windows_is_exact_or_refused() -> None:
    plan_run(asked("instance", exact=False))
    whole = plan_run(asked("instance", exact=False, held_out=RASTERS))
    assert [tiling.grid for tiling in whole.held_out] == [(1, 1), (1, 1)]
    with pytest.raises(ConfigError, match=r"of the validation: model.norm is instance.*tiling.grid 1"):
        plan_run(asked("instance", exact=False, held_out=RASTERS, grid=(2, 2)))
    batch = plan_run(asked("batch", exact=False, halo="layer", held_out=RASTERS, grid=(2, 2)))
    assert [tiling.grid for tiling in batch.held_out] == [(2, 2), (2, 2)]
