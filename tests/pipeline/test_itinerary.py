"""Laws of itineraries: nothing is lost, matched wrongly, let go too early, or waited for forever, on any transport."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.drawn import law
from tests.pipeline.chained import chained
from tiledseg.config.words import SCHEDULES, chunk_ranks
from tiledseg.pipeline.schedule import ChunkMap, ChunkPass, ChunkTimes, Orders, compute_orders, forward_orders
from tiledseg.pipeline.simulation import Messages, itinerary, simulate

FORWARD, BACKWARD = 1.0, 2.0
# Least time of the same orders where messages have a queue of their own and are buffered, as a multiple.
BOUNDS = {"gpipe": 1.0, "1f1b": 1.3, "folded": 1.85}


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Orders, ChunkMap]:
    """Any schedule with any skips that it may have, forward only too."""
    schedule, stages = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 5))
    ranks = chunk_ranks(schedule, stages)
    chunks = len(ranks)
    ends = st.tuples(st.integers(0, chunks - 1), st.integers(0, chunks - 1)).map(sorted)
    skips = draw(st.lists(ends, max_size=5))
    if schedule == "folded":
        skips = [(a, b) for a, b in skips if ranks[a] == ranks[b]]
    pipeline = chained(ranks, skips)
    count = draw(st.integers(1, 9))
    if draw(st.booleans()):
        return forward_orders(pipeline, count), pipeline
    times = None
    if draw(st.booleans()):
        some = st.lists(st.floats(0.1, 5), min_size=chunks, max_size=chunks)
        times = ChunkTimes(draw(some), draw(some))
    return compute_orders(schedule, stages, count, times), pipeline


@law
@given(pipelines())
def test_every_message_is_posted_in_order_and_let_go_in_time(drawn: tuple[Orders, ChunkMap]) -> None:
    orders, pipeline = drawn
    plans = [itinerary(orders, pipeline, rank) for rank in range(len(orders))]

    def way(messages: Messages, sender: int, receiver: int) -> list[object]:
        return [m for m in messages if (pipeline.ranks[m.sender], pipeline.ranks[m.receiver]) == (sender, receiver)]

    for rank, moves in enumerate(plans):
        assert [move.compute for move in moves] == orders[rank]
        released = [sent for move in moves for sent in move.released]
        assert len(set(released)) == len(released)
        for peer in set(range(len(orders))) - {rank}:
            posted = [message for move in moves for message in way(move.posts, peer, rank)]
            assert posted == [message for move in plans[peer] for message in way(move.makes, peer, rank)], (
                "a transport matches by order"
            )
            theirs = [message for move in plans[peer] for message in (*move.needs, *move.makes)]
            before: set[object] = set()
            for move in moves:
                before.update(move.posts)
                coming = way(move.needs, peer, rank)
                assert before.issuperset(coming), "posted before it is waited for"
                for sent in way(move.released, rank, peer):  # the peer had it before it sent what has just come
                    assert any(theirs.index(message) > theirs.index(sent) for message in coming)
    for chunk, rank in enumerate(pipeline.ranks):  # so that running statistics move as they do without a pipeline
        forward = [each.micro_batch for each in orders[rank] if each[1:] == (chunk, False)]
        assert forward == list(range(len(forward)))


def seconds_in_one_queue(orders: Orders, pipeline: ChunkMap) -> float:
    """A rank does the head of its queue and then the next: a message takes no time, once both ends are at it."""
    queues: list[list[object]] = []
    for rank in range(len(orders)):
        queues.append([])
        for move in itinerary(orders, pipeline, rank):
            sends = [message for message in move.makes if not pipeline.is_local(message.route)]
            queues[-1] += [*move.posts, move.compute, *sends]
    clock, at = [0.0] * len(queues), [0] * len(queues)
    heads: dict[object, int] = {}  # messages at whose head one rank stands
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue):
                head = queue[at[rank]]
                if isinstance(head, ChunkPass):
                    clock[rank] += BACKWARD if head.backward else FORWARD
                else:
                    other = heads.setdefault(head, rank)
                    if other == rank:
                        break
                    clock[rank] = clock[other] = max(clock[rank], clock[other])
                    at[other] += 1
                at[rank] += 1
                moved = True
    assert at == [len(queue) for queue in queues], "the queues wait for each other"
    return max(clock)


@law
@given(pipelines())
def test_nothing_waits_for_ever(drawn: tuple[Orders, ChunkMap]) -> None:
    """Even where no message is buffered, and each rank does its messages and passes one by one."""
    assert seconds_in_one_queue(*drawn) > 0


@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_receive_does_not_hold_up_what_is_computed_before_it_is_needed(schedule: str, stages: int) -> None:
    """Six stages, gpipe, 24 micro-batches: 432 units of time where all sends were placed stage by stage, now 87."""
    pipeline = chained(chunk_ranks(schedule, stages))
    chunks = len(pipeline.ranks)
    every = [compute_orders(schedule, stages, count) for count in (1, 8, 24)]
    for orders in (*every, forward_orders(pipeline, 20)):
        least = simulate(orders, pipeline, [FORWARD] * chunks, [BACKWARD] * chunks).makespan
        assert least <= seconds_in_one_queue(orders, pipeline) <= BOUNDS[schedule] * least
