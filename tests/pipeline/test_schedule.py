"""Schedules: sound for any number of stages and micro-batches, with the memory in flight of their formulas; and their
simulation, which finds faults and keeps to the model of time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.chained import FIRST_SKIP, chained, is_sound
from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.config.run import ModelConfig
from tiledseg.config.words import RECOMPUTE, SCHEDULES, chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Add
from tiledseg.geometry.layers.pixelwise import Mark
from tiledseg.geometry.layers.resampling import MaxIndices, MaxPool, MaxUnpool
from tiledseg.pipeline.balance import BalancePrices, choose_folded_balances, cuts
from tiledseg.pipeline.schedule import (
    ChunkPass,
    ChunkTimes,
    Route,
    compute_orders,
    cut_network,
    forward_orders,
    kept_of,
    most_in_flight,
)
from tiledseg.pipeline.simulation import simulate
from tiledseg.planning.walk.cost import tile_walk

law = settings(derandomize=True, max_examples=40, deadline=None)
STAGES, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 24)


@law
@given(st.sampled_from(SCHEDULES), STAGES, MICRO_BATCHES, st.data())
def test_every_schedule_is_sound(schedule: str, stages: int, micro_batches: int, data: st.DataObject) -> None:
    ranks = chunk_ranks(schedule, stages)
    ends = st.tuples(st.integers(0, len(ranks) - 1), st.integers(0, len(ranks) - 1)).map(sorted)
    drawn = data.draw(st.lists(ends, max_size=3))
    pipeline = chained(ranks, drawn)
    orders = compute_orders(schedule, stages, micro_batches)
    most = most_in_flight(schedule, stages, micro_batches)
    assert is_sound(orders, pipeline, micro_batches, most)
    if schedule != "folded":
        chunks = len(ranks)
        assert simulate(orders, pipeline, [1] * chunks, [1] * chunks).in_flight(chunks) == most


@law
@given(st.sampled_from(["gpipe", "1f1b"]), STAGES, MICRO_BATCHES, st.integers(1, 5), st.integers(1, 5))
def test_the_bubble_of_equal_stages(
    schedule: str, stages: int, micro_batches: int, forward: int, backward: int
) -> None:
    """M + n - 1 turns for M turns of work (Huang et al., 2019)."""
    orders = compute_orders(schedule, stages, micro_batches)
    line = simulate(orders, chained(chunk_ranks(schedule, stages)), [forward] * stages, [backward] * stages)
    assert line.makespan == (micro_batches + stages - 1) * (forward + backward)
    assert 1 - line.busy_share == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@law
@given(st.sampled_from(SCHEDULES), st.sampled_from(RECOMPUTE), STAGES, MICRO_BATCHES, st.integers(1, 9))
def test_what_recomputation_keeps(schedule: str, recompute: str, stages: int, micro_batches: int, inputs: int) -> None:
    """Walked through the order of each chunk, in units of which a micro-batch's activations have 10."""
    orders = compute_orders(schedule, stages, micro_batches)
    most = most_in_flight(schedule, stages, micro_batches)
    for chunk, held in enumerate(most):
        kept: dict[int, int] = {}
        peak = 0
        for action in (action for order in orders for action in order if action.chunk == chunk):
            again = recompute == "always" or (recompute == "except_last" and action.micro_batch < micro_batches - 1)
            kept[action.micro_batch] = inputs if again and not action.backward else 10
            peak = max(peak, sum(kept.values()))
            if action.backward:
                del kept[action.micro_batch]
        complete, inputs_only = kept_of(schedule, held, recompute)
        assert peak <= 10 * complete + inputs * inputs_only
        if schedule != "folded":
            assert peak == 10 * complete + inputs * inputs_only


def test_each_tensor_has_a_route_to_each_chunk_that_takes_it() -> None:
    """The weights stand in `a`: nothing before it has a gradient. Nor have indices."""
    nodes = (
        Node("mark", Mark()),
        Node("a", Convolution(1, 3, padding=1)),
        Node("indices", MaxIndices()),
        Node("pool", MaxPool(), ("a",)),
        Node("up", MaxUnpool(), ("pool", "indices")),
        Node("sum", Add((0, 0, 0)), ("a", "up", "mark")),
        Node("head", Convolution(2, 1)),
    )
    graph = Graph(nodes, ("head", "up"))
    pipeline = cut_network(graph, (2, 2, 2, 1), range(4))
    assert pipeline.runs == ((0, 2), (2, 4), (4, 6), (6, 7))
    assert pipeline.routes == (
        Route(0, 1, 2),
        Route(1, 2, 4),
        Route(2, 3, 6),
        Route(0, 2, 1, returns=False),
        Route(0, 2, 2),
        Route(1, 2, 3, returns=False),
        Route(2, 3, 5),
    )
    orders = compute_orders("1f1b", 4, 2)
    assert is_sound(orders, pipeline, 2, (2, 2, 2, 1))
    made = [message for order in orders for each in order for message in pipeline.messages(each)[1]]
    assert {message.route.tensor for message in made if message.gradient} == {2, 4, 5, 6}


def test_what_cannot_be_scheduled() -> None:
    with pytest.raises(ConfigError, match="'zigzag'; give one of 1f1b, gpipe, folded"):
        chunk_ranks("zigzag", 2)
    with pytest.raises(ConfigError, match="0 stages"):
        chunk_ranks("gpipe", 0)


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pass_without_gradients_keeps_every_rank_busy(schedule: str, stages: int) -> None:
    """Forward only, chunks of equal ranks: M micro-batches take M turns and the way there."""
    pipeline = chained(chunk_ranks(schedule, stages))
    orders = forward_orders(pipeline, 20)
    assert not any(each.backward for order in orders for each in order)
    folded = len(pipeline.ranks) > stages
    times = [2.0 if pipeline.ranks.count(rank) == 1 and folded else 1.0 for rank in pipeline.ranks]
    assert simulate(orders, pipeline, times, times).makespan <= (2 if folded else 1) * 20 + 2 * stages


TIMES = st.lists(st.floats(0, 10, allow_subnormal=False), min_size=13, max_size=13)


def makespan(stages: int, micro_batches: int, times: ChunkTimes, order_for: ChunkTimes | None) -> float:
    """Check a folded pipeline."""
    orders, pipeline = (
        compute_orders("folded", stages, micro_batches, order_for),
        chained(chunk_ranks("folded", stages)),
    )
    sending = times.sending or (0.0,) * len(pipeline.ranks)
    return simulate(orders, pipeline, *times[:2], lambda route: sending[route.source]).makespan


def least(stages: int, micro_batches: int, times: ChunkTimes) -> float:
    """No order takes less: a rank has its work to do, and may start and has to end as others need to reach it."""
    both = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    ranks = chunk_ranks("folded", stages)
    work = [sum(t for t, r in zip(both, ranks, strict=True) if r == rank) for rank in range(stages)]
    return max(sum(both), *(micro_batches * work[rank] + sum(both[:rank]) for rank in range(stages)))


@law
@given(st.integers(1, 7), st.integers(1, 16), TIMES, TIMES)
def test_folded_orders_are_sound_for_any_times_and_depend_on_their_ratios_alone(
    stages: int, micro_batches: int, forward: list[float], backward: list[float]
) -> None:
    """All ranks make the order for themselves, each for the same times."""
    pipeline = chained(chunk_ranks("folded", stages))
    chunks = len(pipeline.ranks)
    times = ChunkTimes(forward[:chunks], backward[:chunks])
    orders = compute_orders("folded", stages, micro_batches, times)
    assert is_sound(orders, pipeline, micro_batches, most_in_flight("folded", stages, micro_batches))
    assert least(stages, micro_batches, times) * (1 - 1e-12) <= makespan(stages, micro_batches, times, times)
    larger = ChunkTimes(*([64 * time for time in part] for part in times))
    assert orders == compute_orders("folded", stages, micro_batches, larger)
    for schedule in ("1f1b", "gpipe"):
        assert compute_orders(schedule, stages, micro_batches, times) == compute_orders(schedule, stages, micro_batches)


@pytest.mark.parametrize("stages", [3, 6])
@pytest.mark.parametrize("model", PRESETS)
def test_folded_presets_come_near_the_least_makespan(model: str, stages: int) -> None:
    """Orders for ranks of equal work take up to 1.82, 1.74, 1.58 and 1.55 times the least. Orders that know of messages
    are not slower; each message takes a tenth of the slowest rank's time."""
    network = build_network(ModelConfig(name=model), bands=4, classes=2)
    work = [cost.multiply_adds for cost in tile_walk(network.graph(), network.bands, (1024, 1024)).costs]
    ends = [(tensor - 1, reader) for tensor, reader in network.graph().skips]
    forward = [float(sum(work[a:b])) for a, b in cuts(choose_folded_balances(BalancePrices(work), ends, stages)[0])]
    times = ChunkTimes(forward, [2 * f for f in forward])
    for micro_batches, most in ((4, 1.55), (24, 1.17)):
        assert makespan(stages, micro_batches, times, times) <= most * least(stages, micro_batches, times)
    ranks = chunk_ranks("folded", stages)
    slowest = max(3 * sum(t for t, r in zip(forward, ranks, strict=True) if r == rank) for rank in range(stages))
    sending = times._replace(sending=[slowest / 10] * (len(ranks) - 1))
    assert makespan(stages, 24, sending, sending) <= 1.03 * makespan(stages, 24, sending, times)


def test_a_pass_that_never_starts_is_named() -> None:
    two = chained((0, 1))
    first, second = compute_orders("1f1b", 2, 5)
    with pytest.raises(AssertionError, match="the schedule cannot end: rank 0 waits forever before ChunkPass"):
        simulate((first[::-1], second), two, [1, 1], [1, 1])


def test_messages_take_turns_on_a_ranks_link_and_cost_it_no_time() -> None:
    pipeline = chained((0, 1, 2), [(0, 2)])
    orders = compute_orders("gpipe", 3, 1)
    line = simulate(orders, pipeline, [1] * 3, [1] * 3, lambda route: 10 if route.tensor >= FIRST_SKIP else 2)
    start = {turn.compute: turn.start for turns in line.turns for turn in turns}
    assert start[ChunkPass(0, 1)] == 3  # 1 of work, 2 on the way
    assert start[ChunkPass(0, 2)] == 13  # the skip left after the activation: 1 + 2 + 10
    assert start[ChunkPass(0, 2, True)] == 14
    assert start[ChunkPass(0, 0, True)] == 15 + 2 + 10  # its gradient likewise
    orders, one = [[ChunkPass(0, 0), ChunkPass(0, 2)], [ChunkPass(0, 1)]], chained((0, 1, 0), [(0, 2)])
    line = simulate(orders, one, [1] * 3, [1] * 3, lambda route: route.tensor)
    assert line.makespan == 1 + 1 + 1 + 2 + 1, "a skip on one rank is not sent"
