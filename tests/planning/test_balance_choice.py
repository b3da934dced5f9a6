"""Automatic balances against all balances, by the simulated step."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from tiledseg.architecture.unet import UNet
from tiledseg.config.words import SCHEDULES
from tiledseg.pipeline.simulation import simulate
from tiledseg.planning.run.pipeline import LayerTimes, PipelineCase, StagedPipeline, choose, stage, torn_skips
from tiledseg.planning.walk.cost import tile_walk

LAYERS = UNet(2, 1, base_channels=2).graph()
WALK = tile_walk(LAYERS, 4, (32, 32))


def case_of(schedule: str, stages: int, seed: int, per_byte: float = 0.0, **more: object) -> PipelineCase:
    """Layers of drawn times."""
    draw = random.Random(seed)
    forward = [draw.uniform(0.2, 1.0) for _ in LAYERS.nodes]
    backward = [draw.uniform(0.5, 2.0) for _ in LAYERS.nodes]
    times = LayerTimes(forward, backward, lambda size: 0.01 + per_byte * size if per_byte else 0.0)
    case = PipelineCase(schedule, ("never",) * stages, 6, WALK, times, None)
    return replace(case, **more)  # type: ignore[arg-type]


def all_pipelines(case: PipelineCase) -> list[StagedPipeline]:
    """Those of every balance that the schedule allows."""
    layers, chunks = len(LAYERS), len(case.ranks)
    stops = [(0, *chosen, layers) for chosen in combinations(range(1, layers), chunks - 1)]
    balances = [tuple(b - a for a, b in pairwise(stop)) for stop in stops]
    return [stage(case, balance) for balance in balances if not torn_skips(case, balance)]


@pytest.mark.parametrize("per_byte", [0.0, 1e-5, 1e-4])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("1f1b", 3), ("gpipe", 3), ("folded", 2)])
def test_next_to_no_balance_has_a_shorter_step(schedule: str, stages: int, per_byte: float) -> None:
    """Of some balances the one with the shortest step is taken. It is at most 5 % longer than the shortest of all."""
    ratios = []
    for seed in range(4):
        case = case_of(schedule, stages, seed, per_byte)
        best = min(staged.timeline().makespan for staged in all_pipelines(case))
        ratios.append(choose(case).timeline().makespan / best)
    assert max(ratios) <= 1.05
    assert sum(ratio < 1.03 for ratio in ratios) >= 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_limit_of_memory_is_kept(schedule: str) -> None:
    """Whatever is moved: each stage of the answer fits."""
    free = case_of(schedule, 2, seed=7)
    needs = [staged.case.rank_bytes(staged.balance) for staged in all_pipelines(free)]
    tightest = min(map(max, needs))
    for limit in (tightest, tightest * 5 // 4):
        found = choose(replace(free, limit=limit))
        assert max(found.case.rank_bytes(found.balance)) <= limit


def test_what_travels_is_counted_once_each_way() -> None:
    """The step over links of a second a byte, with layers of no time, is as long as the busiest rank sends."""
    case = case_of("gpipe", 2, seed=1, per_byte=1.0, micro_batches=3)
    nothing = [0.0] * len(LAYERS)
    case = replace(case, times=replace(case.times, forward=nothing, backward=nothing))
    staged = stage(case, (12, len(LAYERS) - 12))
    sent = sum(0.01 + staged.route_bytes(route) for route in staged.pipeline.routes)
    assert staged.timeline().makespan == pytest.approx(2 * 3 * sent)
    assert staged.timeline(transfers=False).makespan == 0
    assert simulate(staged.orders, staged.pipeline, staged.times.forward, staged.times.backward).makespan == 0
