"""Folded orders for chunks of unequal work: sound for any times, within their memory, and near the least makespan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.chained import chained
from tests.pipeline.faults import faults
from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.config.run import ModelConfig
from tiledseg.config.words import chunk_ranks
from tiledseg.pipeline.balance import BalancePrices, choose_folded_balances, cuts
from tiledseg.pipeline.chunk_orders import ChunkTimes
from tiledseg.pipeline.schedule import Route, compute_orders, most_in_flight, program
from tiledseg.pipeline.simulation import simulate
from tiledseg.planning.step.cost import layer_costs

law = settings(derandomize=True, max_examples=60, deadline=None)
STAGES, MICRO_BATCHES = st.integers(1, 7), st.integers(1, 16)
TIMES = st.lists(st.floats(0, 10, allow_subnormal=False), min_size=13, max_size=13)


def makespan(stages: int, micro_batches: int, times: ChunkTimes, order_for: ChunkTimes | None) -> float:
    pipeline = chained(chunk_ranks("folded", stages))

    def sending(route: Route) -> float:
        return times.sending[route.source] if times.sending else 0.0

    return simulate(program("folded", pipeline, micro_batches, order_for), *times[:2], sending).makespan


def least(stages: int, micro_batches: int, times: ChunkTimes) -> float:
    """No order takes less: a rank has its work to do, and may start and has to end as others need to reach it."""
    forward, backward, _ = times
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    ranks = chunk_ranks("folded", stages)
    work = [sum(t for t, r in zip(both, ranks, strict=True) if r == rank) for rank in range(stages)]
    return max(sum(both), *(micro_batches * work[rank] + sum(both[:rank]) for rank in range(stages)))


@law
@given(STAGES, MICRO_BATCHES, TIMES, TIMES)
def test_sound_for_any_times_and_within_the_bound(
    stages: int, micro_batches: int, forward: list[float], backward: list[float]
) -> None:
    """At most 2n - 1 - c micro-batches in flight at chunk c."""
    pipeline = chained(chunk_ranks("folded", stages))
    chunks = len(pipeline.ranks)
    times = ChunkTimes(forward[:chunks], backward[:chunks])
    made = program("folded", pipeline, micro_batches, times)
    assert faults(made, pipeline, micro_batches, most_in_flight("folded", stages, micro_batches)) == []
    assert least(stages, micro_batches, times) * (1 - 1e-12) <= makespan(stages, micro_batches, times, times)


@law
@given(STAGES, MICRO_BATCHES, TIMES)
def test_orders_depend_on_the_ratios_of_times_alone(stages: int, micro_batches: int, forward: list[float]) -> None:
    """All ranks make the order for themselves, each for the same times."""
    chunks = 2 * stages - 1
    times = ChunkTimes(forward[:chunks], [2 * f for f in forward[:chunks]])
    larger = ChunkTimes(*([64 * time for time in part] for part in times))
    made = compute_orders("folded", stages, micro_batches, times)
    assert made == compute_orders("folded", stages, micro_batches, times)
    assert made == compute_orders("folded", stages, micro_batches, larger)


@law
@given(st.sampled_from(["1f1b", "gpipe"]), STAGES, MICRO_BATCHES, TIMES)
def test_other_schedules_have_one_order(schedule: str, stages: int, micro_batches: int, forward: list[float]) -> None:
    times = ChunkTimes(forward[:stages], forward[:stages])
    assert compute_orders(schedule, stages, micro_batches, times) == compute_orders(schedule, stages, micro_batches)


def preset_times(model: str, stages: int) -> ChunkTimes:
    """Multiply-adds of the chunks of the automatic folded balance, the backward pass twice the forward one."""
    network = build_network(ModelConfig(name=model), bands=4, classes=2)
    work = [cost.multiply_adds for cost in layer_costs(network.graph(), network.bands, (1024, 1024))]
    ends = [(tensor - 1, reader) for tensor, reader in network.graph().skips]
    forward = [float(sum(work[a:b])) for a, b in cuts(choose_folded_balances(BalancePrices(work), ends, stages)[0])]
    return ChunkTimes(forward, [2 * f for f in forward])


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("model", PRESETS)
def test_the_presets_come_near_the_least_makespan(model: str, stages: int) -> None:
    """Orders for ranks of equal work take up to 1.82, 1.74, 1.58 and 1.55 times the least."""
    times = preset_times(model, stages)
    for micro_batches, most in ((4, 1.55), (8, 1.32), (24, 1.17), (48, 1.12)):
        found = makespan(stages, micro_batches, times, times)
        assert found <= most * least(stages, micro_batches, times)


@pytest.mark.parametrize("stages", [2, 4, 6, 8])
def test_equal_ranks_take_no_more_turns_than_those_of_1f1b(stages: int) -> None:
    """A turn is a rank's work for a micro-batch; 1f1b takes M + n - 1 of them."""
    forward = [2.0 if chunk == stages - 1 else 1.0 for chunk in range(2 * stages - 1)]
    times = ChunkTimes(forward, [2 * f for f in forward])
    for micro_batches in (stages, 24):
        assert makespan(stages, micro_batches, times, times) <= 6 * (micro_batches + stages - 1)
        assert makespan(stages, micro_batches, times, None) <= 6 * (micro_batches + stages - 1)


@pytest.mark.parametrize("model", PRESETS)
def test_orders_that_know_of_messages_are_no_slower(model: str) -> None:
    """Each message takes a tenth of the slowest rank's time."""
    free = preset_times(model, 6)
    ranks = chunk_ranks("folded", 6)
    slowest = max(3 * sum(t for t, r in zip(free.forward, ranks, strict=True) if r == rank) for rank in range(6))
    times = free._replace(sending=[slowest / 10] * 10)
    assert makespan(6, 24, times, times) < makespan(6, 24, times, free)
