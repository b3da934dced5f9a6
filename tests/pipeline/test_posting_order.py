"""How long a pipeline takes whose computations communicate too, on a transport with one queue a rank."""

from __future__ import annotations

import pytest

from tests.pipeline.chained import chained
from tiledseg.config.words import SCHEDULES, chunk_ranks
from tiledseg.pipeline.itinerary import Move, itinerary
from tiledseg.pipeline.schedule import (
    Forward,
    Program,
    ReceiveActivation,
    SendActivation,
    SendGradient,
    forward_program,
    program,
)
from tiledseg.pipeline.simulation import simulate

FORWARD, BACKWARD = 1.0, 2.0
# Least time of the same program where messages have a queue of their own and are buffered, as a multiple.
BOUNDS = {"gpipe": 1.0, "1f1b": 1.3, "folded": 1.8}


def queue_of(moves: tuple[Move, ...], rank: int) -> list[object]:
    """Computations, and messages as (sender, send), in the order in which a rank posts them."""
    queue: list[object] = []
    for move in moves:
        for r in move.posts:
            kind = SendActivation if isinstance(r, ReceiveActivation) else SendGradient
            queue.append((r.peer, kind(r.micro_batch, r.route, rank)))
        queue.append(move.compute)
        queue += [(rank, send) for send in move.sends]
    return queue


def seconds_in_one_queue(actions: Program) -> float:
    """A rank does the head of its queue and then the next: a message takes no time, once both ends are at it."""
    queues = [queue_of(itinerary(actions, rank, in_order=True), rank) for rank in range(len(actions))]
    clock, at = [0.0] * len(queues), [0] * len(queues)
    heads: dict[object, int] = {}  # messages at whose head one rank stands
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue):
                head = queue[at[rank]]
                if isinstance(head, tuple):
                    other = heads.setdefault(head, rank)
                    if other == rank:
                        break
                    clock[rank] = clock[other] = max(clock[rank], clock[other])
                    at[other] += 1
                else:
                    clock[rank] += FORWARD if isinstance(head, Forward) else BACKWARD
                at[rank] += 1
                moved = True
    assert at == [len(queue) for queue in queues], "the queues wait for each other"
    return max(clock)


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 24])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_receive_does_not_hold_up_what_is_computed_before_it_is_needed(
    schedule: str, stages: int, micro_batches: int
) -> None:
    """Six stages, gpipe, 24 micro-batches: 432 units of time where all sends were placed stage by stage, now 87."""
    pipeline = chained(chunk_ranks(schedule, stages))
    actions = program(schedule, pipeline, micro_batches)
    chunks = len(pipeline.ranks)
    least = simulate(actions, [FORWARD] * chunks, [BACKWARD] * chunks).makespan
    assert least <= seconds_in_one_queue(actions) <= BOUNDS[schedule] * least


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pass_without_gradients_is_not_held_up(schedule: str, stages: int) -> None:
    pipeline = chained(chunk_ranks(schedule, stages))
    actions = forward_program(pipeline, 20)
    chunks = len(pipeline.ranks)
    least = simulate(actions, [FORWARD] * chunks, [BACKWARD] * chunks).makespan
    assert seconds_in_one_queue(actions) <= BOUNDS[schedule] * least
