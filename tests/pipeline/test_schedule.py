"""Schedules: sound for any number of stages and micro-batches, with the memory in flight of their formulas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.chained import FIRST_SKIP, chained
from tests.pipeline.faults import faults
from tiledseg.config.words import RECOMPUTE, SCHEDULES, chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Add
from tiledseg.geometry.layers.pixelwise import Mark
from tiledseg.geometry.layers.resampling import MaxIndices, MaxPool, MaxUnpool
from tiledseg.pipeline.schedule import (
    Backward,
    ChunkMap,
    Forward,
    MessageEnd,
    ReceiveActivation,
    Route,
    SendActivation,
    SendGradient,
    chunk_routes,
    compute_orders,
    kept_of,
    most_in_flight,
    program,
)
from tiledseg.pipeline.simulation import in_flight, simulate

law = settings(derandomize=True, max_examples=40, deadline=None)
STAGES, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 24)


def test_the_formulas_of_micro_batches_in_flight() -> None:
    """gpipe all; 1f1b n - i; folded as 1f1b over its 2n - 1 chunks; never more than there are."""
    assert most_in_flight("gpipe", 3, 7) == (7, 7, 7)
    assert most_in_flight("1f1b", 3, 7) == (3, 2, 1)
    assert most_in_flight("folded", 3, 7) == (5, 4, 3, 2, 1)
    assert most_in_flight("folded", 3, 2) == (2, 2, 2, 2, 1)


@law
@given(st.sampled_from(SCHEDULES), STAGES, MICRO_BATCHES, st.data())
def test_every_schedule_is_sound(schedule: str, stages: int, micro_batches: int, data: st.DataObject) -> None:
    ranks = chunk_ranks(schedule, stages)
    ends = st.tuples(st.integers(0, len(ranks) - 1), st.integers(0, len(ranks) - 1)).map(sorted)
    drawn = data.draw(st.lists(ends, max_size=3))
    pipeline = chained(ranks, drawn)
    made = program(schedule, pipeline, micro_batches)
    most = most_in_flight(schedule, stages, micro_batches)
    assert faults(made, pipeline, micro_batches, most) == []
    if schedule != "folded":
        assert in_flight(made, len(ranks)) == most


@law
@given(st.sampled_from(["gpipe", "1f1b"]), STAGES, MICRO_BATCHES, st.integers(1, 5), st.integers(1, 5))
def test_the_bubble_of_equal_stages(
    schedule: str, stages: int, micro_batches: int, forward: int, backward: int
) -> None:
    """M + n - 1 turns for M turns of work (Huang et al., 2019)."""
    made = program(schedule, chained(chunk_ranks(schedule, stages)), micro_batches)
    line = simulate(made, [forward] * stages, [backward] * stages)
    assert line.makespan == (micro_batches + stages - 1) * (forward + backward)
    assert line.bubble_share == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@law
@given(STAGES, MICRO_BATCHES)
def test_folding_costs_no_more_than_a_third_of_a_turn(stages: int, micro_batches: int) -> None:
    """Equal ranks: a turn is 6 slots, 2 forward and 4 backward, of two chunks, or of the innermost alone."""
    made = program("folded", chained(chunk_ranks("folded", stages)), micro_batches)
    forward = [2 if chunk == stages - 1 else 1 for chunk in range(2 * stages - 1)]
    line = simulate(made, forward, [2 * f for f in forward])
    assert line.makespan <= 6 * (micro_batches + stages - 1) + 2


@law
@given(STAGES, MICRO_BATCHES)
def test_skips_of_a_fold_send_nothing(stages: int, micro_batches: int) -> None:
    ranks = chunk_ranks("folded", stages)
    pipeline = chained(ranks, [(c, len(ranks) - 1 - c) for c in range(stages)])
    made = program("folded", pipeline, micro_batches)
    messages = [a for actions in made for a in actions if isinstance(a, MessageEnd)]
    assert not any(message.route.tensor >= FIRST_SKIP for message in messages)
    assert len(messages) == 4 * micro_batches * (len(ranks) - 1)


def test_a_skip_goes_straight_from_stash_to_pop_and_back() -> None:
    pipeline = chained((0, 1, 2), [(0, 2)])
    made = program("1f1b", pipeline, 1)
    *chain, skip = pipeline.routes
    assert made[0][:3] == (Forward(0, 0), SendActivation(0, chain[0], 1), SendActivation(0, skip, 2))
    assert not any(isinstance(a, MessageEnd) and a.route == skip for a in made[1])
    assert made[2] == (
        ReceiveActivation(0, chain[1], 1),
        ReceiveActivation(0, skip, 0),
        Forward(0, 2),
        Backward(0, 2),
        SendGradient(0, chain[1], 1),
        SendGradient(0, skip, 0),
    )


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
            kept[action.micro_batch] = inputs if again and isinstance(action, Forward) else 10
            peak = max(peak, sum(kept.values()))
            if isinstance(action, Backward):
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
    routes = chunk_routes(graph, [(0, 2), (2, 4), (4, 6), (6, 7)])
    assert routes == (
        Route(0, 1, 2),
        Route(1, 2, 4),
        Route(2, 3, 6),
        Route(0, 2, 1, returns=False),
        Route(0, 2, 2),
        Route(1, 2, 3, returns=False),
        Route(2, 3, 5),
    )
    made = program("1f1b", ChunkMap((0, 1, 2, 3), routes), 2)
    assert faults(made, ChunkMap((0, 1, 2, 3), routes), 2, (2, 2, 2, 1)) == []
    returned = {action.route.tensor for actions in made for action in actions if isinstance(action, SendGradient)}
    assert returned == {2, 4, 5, 6}


def test_what_cannot_be_scheduled() -> None:
    with pytest.raises(ConfigError, match="'zigzag'; give one of 1f1b, gpipe, folded"):
        chunk_ranks("zigzag", 2)
    with pytest.raises(ConfigError, match="'eager', which was removed; use 1f1b"):
        chunk_ranks("eager", 2)
    with pytest.raises(ConfigError, match="0 stages"):
        chunk_ranks("gpipe", 0)
    with pytest.raises(ConfigError, match="0 micro-batches"):
        program("gpipe", ChunkMap((0,)), 0)
    with pytest.raises(ConfigError, match=r"folded puts chunks on ranks \[0, 1, 0\], but .* \[0, 1\]"):
        program("folded", ChunkMap((0, 1)), 2)
