"""Laws of itineraries: nothing is lost, matched wrongly, let go too early, or waited for forever, on any transport."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.drawn import law
from tests.pipeline.chained import chained, flat
from tiledseg.config.words import SCHEDULES, chunk_ranks
from tiledseg.pipeline.schedule import (
    ChunkMap,
    ChunkPass,
    ChunkTimes,
    MessageEnd,
    Program,
    forward_program,
    program,
)
from tiledseg.pipeline.simulation import itinerary, simulate

FORWARD, BACKWARD = 1.0, 2.0
# Least time of the same program where messages have a queue of their own and are buffered, as a multiple.
BOUNDS = {"gpipe": 1.0, "1f1b": 1.3, "folded": 1.85}


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Program, ChunkMap]:
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
        return forward_program(pipeline, count), pipeline
    times = None
    if draw(st.booleans()):
        some = st.lists(st.floats(0.1, 5), min_size=chunks, max_size=chunks)
        times = ChunkTimes(draw(some), draw(some))
    return program(schedule, pipeline, count, times), pipeline


@law
@given(pipelines())
def test_every_action_is_there_once_posted_in_order_and_let_go_in_time(drawn: tuple[Program, ChunkMap]) -> None:
    actions, pipeline = drawn
    plans = [itinerary(actions, rank) for rank in range(len(actions))]
    for rank, (own, moves) in enumerate(zip(actions, plans, strict=True)):
        assert [action for move in moves for action in (*move.receives, move.compute, *move.sends)] == flat(own)
        for index, move in enumerate(moves):
            before = {receive for earlier in moves[: index + 1] for receive in earlier.posts}
            assert before.issuperset(move.receives), "posted before it is waited for"
            for send in move.released:  # the peer had it before it sent what has just come
                theirs = flat(actions[send.peer])
                answers = [theirs.index(r.other_end(rank)) for r in move.receives if r.peer == send.peer]
                assert any(at > theirs.index(send.other_end(rank)) for at in answers)
        released = [send for move in moves for send in move.released]
        assert len(set(released)) == len(released)
        for peer in range(len(actions)):
            posted = [r.other_end(rank) for move in moves for r in move.posts if r.peer == peer]
            sent = [send for move in plans[peer] for send in move.sends if send.peer == rank]
            assert posted == sent, "a transport matches by order"
    for chunk, rank in enumerate(pipeline.ranks):  # so that running statistics move as they do without a pipeline
        forward = [t.compute.micro_batch for t in actions[rank] if t.compute[1:] == (chunk, False)]
        assert forward == list(range(len(forward)))


def seconds_in_one_queue(actions: Program) -> float:
    """A rank does the head of its queue and then the next: a message takes no time, once both ends are at it."""
    queues: list[list[ChunkPass | tuple[int, MessageEnd]]] = []
    for rank in range(len(actions)):
        queues.append([])
        for move in itinerary(actions, rank):
            queues[-1] += [(r.peer, r.other_end(rank)) for r in move.posts]
            queues[-1] += [move.compute, *((rank, send) for send in move.sends)]
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
def test_nothing_waits_for_ever(drawn: tuple[Program, ChunkMap]) -> None:
    """Even where no message is buffered, and each rank does its messages and passes one by one."""
    assert seconds_in_one_queue(drawn[0]) > 0


@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_receive_does_not_hold_up_what_is_computed_before_it_is_needed(schedule: str, stages: int) -> None:
    """Six stages, gpipe, 24 micro-batches: 432 units of time where all sends were placed stage by stage, now 87."""
    pipeline = chained(chunk_ranks(schedule, stages))
    chunks = len(pipeline.ranks)
    every = [program(schedule, pipeline, count) for count in (1, 8, 24)]
    for actions in (*every, forward_program(pipeline, 20)):
        least = simulate(actions, [FORWARD] * chunks, [BACKWARD] * chunks).makespan
        assert least <= seconds_in_one_queue(actions) <= BOUNDS[schedule] * least
