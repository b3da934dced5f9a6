"""Laws of itineraries: nothing is lost, matched wrongly, let go too early, or waited for forever, on any transport."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.drawn import law
from tests.pipeline.chained import chained
from tests.pipeline.faults import faults
from tiledseg.config.words import SCHEDULES, chunk_ranks
from tiledseg.pipeline.chunk_orders import ChunkTimes
from tiledseg.pipeline.itinerary import AHEAD, Move, itinerary
from tiledseg.pipeline.schedule import (
    Backward,
    ChunkMap,
    Forward,
    Program,
    Receive,
    ReceiveActivation,
    Send,
    SendActivation,
    forward_program,
    program,
)


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


def partner(receive: Receive, rank: int) -> tuple[int, Send]:
    """The rank that sends it, and its send."""
    from tiledseg.pipeline.schedule import SendGradient

    kind = SendActivation if isinstance(receive, ReceiveActivation) else SendGradient
    return receive.peer, kind(receive.micro_batch, receive.route, rank)


@law
@given(pipelines(), st.booleans())
def test_every_action_is_there_once_and_in_order(drawn: tuple[Program, ChunkMap], in_order: bool) -> None:
    actions, _ = drawn
    for rank, own in enumerate(actions):
        moves = itinerary(actions, rank, in_order)
        flat = [action for move in moves for action in (*move.receives, move.compute, *move.sends)]
        assert flat == list(own)
        posted = [receive for move in moves for receive in move.posts]
        assert sorted(map(repr, posted)) == sorted(repr(r) for move in moves for r in move.receives)
        for index, move in enumerate(moves):
            before = {receive for earlier in moves[: index + 1] for receive in earlier.posts}
            assert before.issuperset(move.receives), "posted before it is waited for"
        released = [send for move in moves for send in move.released]
        assert len(set(released)) == len(released)


@law
@given(pipelines(), st.booleans())
def test_messages_of_a_pair_are_posted_in_the_order_of_their_sends(
    drawn: tuple[Program, ChunkMap], in_order: bool
) -> None:
    """What a transport that matches by order needs."""
    actions, _ = drawn
    plans = [itinerary(actions, rank, in_order) for rank in range(len(actions))]
    for rank, moves in enumerate(plans):
        for peer in range(len(actions)):
            posted = [partner(r, rank)[1] for move in moves for r in move.posts if r.peer == peer]
            sent = [send for move in plans[peer] for send in move.sends if send.peer == rank]
            assert posted == sent


@law
@given(pipelines())
def test_receives_are_posted_ahead_but_no_further_than_said(drawn: tuple[Program, ChunkMap]) -> None:
    """Beyond what the next computations need, only what the peer sends before that."""
    actions, _ = drawn
    for rank in range(len(actions)):
        moves = itinerary(actions, rank)
        needed_at = {r: index for index, move in enumerate(moves) for r in move.receives}
        for index, move in enumerate(moves):
            for peer in {r.peer for r in move.posts}:
                mine = [r for r in move.posts if r.peer == peer]
                assert needed_at[mine[-1]] <= index + AHEAD
        first = moves[0] if moves else None
        if first is not None and len(moves) > 1:
            early = {r for move in moves[: 1 + AHEAD] for r in move.receives}
            assert early.issubset(first.posts)


@law
@given(pipelines(), st.booleans())
def test_a_tensor_is_let_go_only_after_its_receiver_has_it(drawn: tuple[Program, ChunkMap], in_order: bool) -> None:
    """When a send is released, the peer has waited for it before it sent what has just come."""
    actions, _ = drawn
    plans = [itinerary(actions, rank, in_order) for rank in range(len(actions))]
    for rank, moves in enumerate(plans):
        for move in moves:
            for send in move.released:
                theirs = actions[send.peer]
                arrived = next(
                    i
                    for i, action in enumerate(theirs)
                    if getattr(action, "route", None) == send.route
                    and action.micro_batch == send.micro_batch
                    and type(action).__name__ == type(send).__name__.replace("Send", "Receive")
                )
                answers = [partner(r, rank) for r in move.receives if r.peer == send.peer]
                assert any(theirs.index(answer) > arrived for _, answer in answers)


def ends(plans: list[tuple[Move, ...]], in_order: bool) -> bool:
    """Replays the moves over a network in which a message passes only when both its ends are posted.

    `in_order`: and only when both are at the head of their rank's queue of messages, sends and receives alike.
    """
    queues: list[deque[tuple[int, int, object]]] = [deque() for _ in plans]
    at, waiting, done = [0] * len(plans), [False] * len(plans), set()
    moved = True
    while moved:
        moved = False
        for rank, moves in enumerate(plans):
            while at[rank] < len(moves):
                move = moves[at[rank]]
                if not waiting[rank]:
                    queues[rank] += [(*sorted((rank, r.peer)), partner(r, rank)) for r in move.posts]
                    waiting[rank] = True
                if any(partner(r, rank) not in done for r in move.receives):
                    break
                queues[rank] += [(*sorted((rank, s.peer)), (rank, s)) for s in move.sends]
                at[rank] += 1
                waiting[rank] = False
                moved = True
        passed = _pass_messages(queues, in_order)
        done |= passed
        moved = moved or bool(passed)
    return all(position == len(moves) for position, moves in zip(at, plans, strict=True)) and not any(queues)


def _pass_messages(queues: list[deque], in_order: bool) -> set:
    passed = set()
    for queue in queues:
        for entry in list(queue)[: 1 if in_order else None]:
            low, high, key = entry
            reach = [(list(queues[end])[:1] if in_order else list(queues[end])) for end in (low, high)]
            if all(entry in found for found in reach):
                passed.add(key)
                for end in (low, high):
                    queues[end].remove(entry)
    return passed


@law
@given(pipelines())
def test_nothing_waits_for_ever(drawn: tuple[Program, ChunkMap]) -> None:
    """Even where no message is buffered; with `in_order`, even where each rank's messages pass one by one."""
    actions, _ = drawn
    for in_order in (False, True):
        assert ends([itinerary(actions, rank, in_order) for rank in range(len(actions))], in_order)


def test_posting_ahead_would_block_a_transport_that_keeps_the_order() -> None:
    """The replay can fail: that is why NCCL has an order of its own."""
    pipeline = chained(chunk_ranks("1f1b", 3))
    actions = program("1f1b", pipeline, 6)
    assert not ends([itinerary(actions, rank) for rank in range(3)], in_order=True)


@law
@given(pipelines())
def test_every_chunk_goes_forward_in_the_order_of_micro_batches(drawn: tuple[Program, ChunkMap]) -> None:
    """So that running statistics move as they do without a pipeline."""
    actions, pipeline = drawn
    for chunk, rank in enumerate(pipeline.ranks):
        forward = [a.micro_batch for a in actions[rank] if isinstance(a, Forward) and a.chunk == chunk]
        assert forward == list(range(len(forward)))


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pass_without_gradients_keeps_every_rank_busy(schedule: str, stages: int) -> None:
    """Forward only, chunks of equal ranks: M micro-batches take M turns and the way there."""
    from tiledseg.pipeline.simulation import simulate

    pipeline = chained(chunk_ranks(schedule, stages))
    count = 20
    actions = forward_program(pipeline, count)
    assert not [a for rank in actions for a in rank if isinstance(a, Backward)]
    folded = len(pipeline.ranks) > stages
    times = [2.0 if pipeline.ranks.count(rank) == 1 and folded else 1.0 for rank in pipeline.ranks]
    line = simulate(actions, times, times)
    turn = 2 if folded else 1
    assert line.makespan <= turn * count + 2 * stages
    assert faults(program(schedule, pipeline, 3), pipeline, 3) == []
