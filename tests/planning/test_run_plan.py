"""One plan of a run: train, validation, prediction and `plan` ask one function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.geometry.drawn import line
from tests.planning.asked import asked_of
from tiledseg.architecture.unet import UNet
from tiledseg.config.run import ParallelConfig
from tiledseg.errors import BudgetError, ConfigError
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.resampling import AlignedUpsample, MaxPool
from tiledseg.geometry.shapes import count_parameters
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.planning.answer.report import plan
from tiledseg.planning.run.memory import why_alone
from tiledseg.planning.run.pipeline import LayerTimes, plan_pipeline
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism, Spread, parallelism
from tiledseg.planning.walk.cost_model import Machine
from tiledseg.planning.walk.mode_cost import fusion_word
from tiledseg.planning.walk.step_memory import fixed_memory

MEMORY = 5 << 20


def question(norm: str = "none", **given: Any) -> RunQuestion:
    parallel = {key: given.pop(key) for key in ("halo", "stages", "balance", "exact") if key in given}
    network = UNet(3, 1, base_channels=8, norm=norm)
    asked = RunQuestion(network, (Extent((150, 230)),), 2, MEMORY, parallelism(ParallelConfig(**parallel)))
    return replace(asked, **given)


@pytest.mark.parametrize("norm", ["none", "pixel", "batch"])
def test_a_map_is_cut_as_its_training_was(norm: str) -> None:
    """But for a batch norm, which is a constant by then."""
    trained, mapped = (plan_run(question(norm, trains=trains)) for trains in (True, False))
    assert len(mapped.tilings[0]) > 1
    assert (trained.tilings == mapped.tilings) == (norm != "batch")
    assert trained.spread == mapped.spread


def test_auto_leaves_an_image_whole_only_where_a_norm_must_see_it() -> None:
    assert plan_run(question("instance")).tilings[0].grid == (1, 1)
    cut = plan_run(question("instance", halo="layer"))
    assert len(cut.tilings[0]) > 1
    assert cut.spread.mesh.ranks == 2
    accepted = plan_run(question("instance", exact=False))
    assert len(accepted.tilings[0]) > 1
    assert any(note.startswith("not exact: model.norm is instance") for note in accepted.warnings)


def test_a_halo_that_is_too_small_is_accepted_with_a_warning() -> None:
    """Not in mode `layer`, whose halos travel layer by layer; nor where there is one tile."""
    note = "not exact: the halo is 0 pixels, and the network needs"
    warned = [
        any(each.startswith(note) for each in plan_run(replace(question(exact=False, **how), halo=0)).warnings)
        for how in ({"grid": (2, 2)}, {"grid": (2, 2), "halo": "layer"}, {"grid": (1, 1)})
    ]
    assert warned == [True, False, False]


@pytest.mark.parametrize("trains", [True, False])
def test_a_cut_image_is_refused_for_a_norm_that_must_see_it(trains: bool) -> None:
    with pytest.raises(ConfigError, match=r"model.norm is group.*parallel.halo layer.*accept it with parallel.exact"):
        plan_run(question("group", grid=(2, 2), trains=trains))


def test_a_store_has_its_own_grid() -> None:
    asked = question(rasters=(Extent((150, 230), (3, 2)),), held_out=(Extent((90, 60), (1, 2)),))
    plan = plan_run(asked)
    assert [tiling.grid for tiling in (*plan.tilings, *plan.held_out)] == [(3, 2), (1, 2)]


def test_a_step_that_needs_more_than_there_is_is_told() -> None:
    """Of a training run; a map keeps nothing for a backward pass."""
    plan = plan_run(question(grid=(1, 1)))
    assert plan.memory > MEMORY
    assert any("a training step on the largest tile needs about" in note for note in plan.warnings)
    assert plan_run(question(grid=(1, 1), trains=False)).warnings == ()
    assert plan_run(question(grid=(1, 1), memory=plan.memory)).warnings == ()


@pytest.mark.parametrize("balance", ["auto", "modelled"])
def test_the_plan_has_the_balance(balance: str) -> None:
    asked = question(stages=2, balance=balance, memory=1 << 30, grid=(2, 2))
    plan = plan_run(asked)
    assert plan.pipeline is not None
    assert sum(plan.pipeline.balance) == len(asked.network.graph())
    assert plan.memory == plan.pipeline.memory, "of the stage that needs most, micro-batches in flight included"


def test_the_time_of_a_step_in_stages_is_that_of_its_replay() -> None:
    """Two stages of a second a pass, four micro-batches: five forward, five backward; with two at a time, two flushes
    of three and three."""
    network = UNet(levels=2, base_channels=2)
    length = len(network.graph())
    ends = [1.0 if k in (0, length - 1) else 0.0 for k in range(length)]
    for micro_batches, seconds in ((None, 10.0), (2, 12.0)):
        parallel = parallelism(ParallelConfig(stages=2, schedule="gpipe", micro_batches=micro_batches))
        asked = RunQuestion(network, (Extent((64, 64)),), 2, 10**9, parallel, grid=(2, 2))
        plan = plan_run(asked)
        assert plan.seconds is None
        assert plan.micro_batch is not None
        times = LayerTimes(ends, ends, lambda size: 0.0)
        found = plan_pipeline(parallel, asked.graph, network.bands, plan.micro_batch, None, times)
        assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("mesh", [(2, 2), (1, 2)])
@pytest.mark.parametrize("machine", [Machine(latency=1e-3), Machine(latency=0, bandwidth=1e15)])
def test_plan_prints_what_the_run_would_be_planned_with(mesh: tuple[int, int], machine: Machine) -> None:
    """Time, memory and fusion of each mode: of the same function, asked as `train` asks it."""
    asked = question(grid=(2, 3), ranks=mesh[0] * mesh[1], machine=machine, memory=1 << 40)
    sizes = asked_of((150, 230), asked.network, (2, 3), mesh=mesh, machine=machine)
    rows = plan(sizes).values["modes"]["costs"]
    assert [row["mode"] for row in rows] == ["read", "exchange", "layer"]
    assert (rows[-1]["fusion"] != 1) == (machine.latency > 0)
    for row in rows:
        fusion = WHOLE if row["fusion"] == "whole" else row["fusion"] or 1
        run = plan_run(replace(asked, parallel=Parallelism(halo=row["mode"], mesh=mesh, fusion=fusion)))
        assert run.seconds is not None
        assert row["milliseconds"] == round(1000 * run.seconds, 4)
        assert row["memory_rank"] == run.memory
    best = plan_run(replace(asked, parallel=Parallelism(halo="layer", mesh=mesh, fusion=None)))
    assert fusion_word(best.spread.fusion) == rows[-1]["fusion"]


def test_the_time_of_a_step_is_of_all_its_images() -> None:
    """On one rank one after the other; replicas take them at the same time, and sum gradients besides."""
    machine = Machine()
    alone = question(grid=(1, 1), machine=machine, ranks=1, memory=1 << 40)
    one, three = (plan_run(replace(alone, images_per_step=images)).seconds for images in (1, 3))
    assert one is not None
    assert three == 3 * one
    sums = machine.all_reduce_seconds(1, 8 * count_parameters(alone.network.graph(), alone.network.bands), 3)
    assert plan_run(replace(alone, images_per_step=3, ranks=3)).seconds == one + sums
    held = replace(alone, held_out=(Extent((400, 500)),))
    assert plan_run(held).seconds == one
    assert plan_run(held).memory > plan_run(alone).memory


@pytest.mark.parametrize(
    "given", [{"machine": None}, {"stages": 2}, {"tiles_per_step": 2}, {"trains": False}], ids=lambda given: str(given)
)
def test_no_time_is_said_where_none_is_known(given: dict[str, Any]) -> None:
    assert plan_run(question(**({"machine": Machine(), "memory": 1 << 30, "grid": (2, 2)} | given))).seconds is None


def test_a_run_in_mode_exchange_counts_the_window_that_its_contexts_are_cut_from() -> None:
    read, exchange = (plan_run(question(grid=(2, 4), halo=halo, ranks=2)) for halo in ("read", "exchange"))
    assert exchange.memory > read.memory


def test_tiles_run_at_once_where_the_user_sets_it() -> None:
    asked = replace(question(ranks=1, memory=1 << 30), grid=(4, 4))
    one = plan_run(asked)
    assert {plan_run(replace(asked, tiles_per_batch=5, ranks=n)).tiles_per_batch for n in (1, 8, 16)} == {5}
    assert plan_run(replace(asked, tiles_per_batch=99)).tiles_per_batch == 16, "of a step"
    warned = plan_run(replace(asked, tiles_per_batch=5, memory=one.memory)).warnings
    assert any("a training step on the largest tile needs" in note for note in warned)
    assert (one.tiles_per_batch, plan_run(replace(asked, trains=False, tiles_per_batch=5)).tiles_per_batch) == (1, 1)


def test_of_tiles_that_run_at_once_is_counted_what_they_keep() -> None:
    """Rebuilt of each, or away; weights count once."""
    asked = replace(question(ranks=1, memory=1 << 40), grid=(2, 2), budgeted=True)
    fixed = fixed_memory(asked.graph, 1, 4)
    one, four = plan_run(asked).memory - fixed, plan_run(replace(asked, tiles_per_batch=4)).memory - fixed
    assert four == pytest.approx(4 * one, rel=0.01)
    tight = plan_run(replace(asked, tiles_per_batch=4, memory=fixed + int(0.7 * four)))
    assert tight.rebuilt is not None
    assert tight.tiles_per_batch == 4
    alone = plan_run(replace(asked, memory=fixed + int(0.7 * one)))
    assert alone.rebuilt is not None
    assert alone.rebuilt.policy == tight.rebuilt.policy
    assert tight.memory - fixed == pytest.approx(4 * (alone.memory - fixed), rel=0.01)
    assert tight.memory - fixed <= int(0.7 * four)
    with pytest.raises(BudgetError, match=r"use a smaller train.tiles_per_batch"):
        plan_run(replace(asked, tiles_per_batch=4, memory=fixed + one // 2))
    away = [plan_run(replace(asked, tiles_per_batch=count, offload=True)).memory - fixed for count in (1, 4)]
    assert away[1] == pytest.approx(4 * away[0], rel=0.01)
    named = replace(asked, recompute="all")
    less = [plan_run(replace(named, tiles_per_batch=count)).memory - fixed for count in (1, 4)]
    assert less[1] == pytest.approx(4 * less[0], rel=0.01)
    assert less[1] < four
    with pytest.raises(BudgetError, match=r"with memory.recompute all a step needs"):
        plan_run(replace(named, tiles_per_batch=4, memory=fixed + one))


def test_a_budget_that_is_too_small_says_what_is_needed() -> None:
    whole = replace(question(ranks=1), grid=(1, 1), budgeted=True)
    budget = plan_run(replace(whole, memory=1 << 40)).memory // 3
    with pytest.raises(BudgetError, match=r"needs \d+, and \d+ with all .* use a finer tiling.grid") as refused:
        plan_run(replace(whole, memory=budget))
    assert refused.value.least is not None
    assert plan_run(replace(whole, memory=refused.value.least)).rebuilt is not None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stages": 2, "balance": "modelled"}, "in stages each tile is a micro-batch by itself; use parallel.stages 1"),
        ({"halo": "layer"}, "a rank has no tiles, but a block of an image; use parallel.halo read"),
        ({"halo": "exchange"}, "the number of ranks would round the gradients' sums; use parallel.halo read"),
        ({"norm": "batch", "exact": False}, "encoder0.norm0 takes its statistics over a batch.*model.freeze_norm"),
    ],
)
def test_what_cannot_run_at_once_is_refused_or_left(given: dict[str, Any], words: str) -> None:
    norm = given.pop("norm", "none")
    asked = question(norm, grid=(4, 4), **given)
    assert plan_run(asked).tiles_per_batch == 1
    with pytest.raises(ConfigError, match=rf"train.tiles_per_batch is 2, but .*{words}.*; or leave it out"):
        plan_run(replace(asked, tiles_per_batch=2))


def test_tiles_that_must_know_their_place_run_alone() -> None:
    """Each has a place of its own in the image, by which its weights differ."""
    graph = line(MaxPool(), AlignedUpsample(), Convolution(2, 1))
    assert "'AlignedUpsample 1' depends on its place" in (why_alone(graph, Spread(), True) or "")
