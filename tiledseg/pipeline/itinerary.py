"""The moves of one rank of a pipeline: which receives it posts when, and which sends are surely gone.

A program says in which order a rank computes, sends and receives. To run it over real messages more is to be known, and
all of it follows from the programs of all ranks, which every rank has.

- A receive is posted before it is needed, so that the message travels while the rank computes. All computations of all
  ranks have one common order, that of their starts in the simulation. A rank's sends belong to the computation before
  them, and it posts a receive between the two of its own computations between which the sending one lies. So messages
  from one rank to another are posted in one order on both.
- A tensor that has been sent is kept until it has surely left: until something has come from its receiver that this one
  sent later than it received. Nobody has to ask, and nobody waits.

Nothing can deadlock. Sends and receives are posted without waiting. A rank waits for a message only right before the
computation that needs it. The program has been replayed beforehand (`simulation.verify`), so each message that is
waited for is sent by a rank that waits for nothing that comes after. A transport may carry out its messages one by one,
in the order in which a rank starts them (NCCL): all ranks start all messages in the common order, with whatever else
their computations communicate in between, and the first that is not finished has both ends at the head of their queues.
Not any order would do: a message that is posted before a halo exchange on the same queue holds it up. In the order of
starts no receive stands there long before its message is sent (docs/explanation/communication.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiledseg.pipeline.schedule import BACKWARD_SLOTS, FORWARD_SLOTS, Action, ChunkPass, MessageEnd, Program
from tiledseg.pipeline.simulation import simulate

Ends = tuple[MessageEnd, ...]


class Move(NamedTuple):
    """One computation of a rank and the messages around it.

    In this order: `posts` are posted, `receives` waited for, `released` sends known to be gone, `compute` done, `sends`
    posted.
    """

    posts: Ends
    receives: Ends
    released: Ends
    compute: ChunkPass
    sends: Ends


def itinerary(program: Program, rank: int) -> tuple[Move, ...]:
    """Return the moves of a rank."""
    place, releases = _common_order(program), _releases(program, rank)
    groups = [_groups(actions) for actions in program]
    arriving = [
        (place[peer, compute], send.other_end(peer))
        for peer, own in enumerate(groups)
        for _, compute, sends in own
        for send in sends
        if send.peer == rank
    ]
    arriving.sort(key=lambda entry: entry[0])  # stable: those of one computation stay in the order of its sends
    moves: list[Move] = []
    posted = 0
    for receives, compute, sends in groups[rank]:
        first = posted
        while posted < len(arriving) and arriving[posted][0] < place[rank, compute]:
            posted += 1
        posts = tuple(receive for _, receive in arriving[first:posted])
        released = tuple(send for receive in receives for send in releases.get(receive, ()))
        moves.append(Move(posts, receives, released, compute, sends))
    return tuple(moves)


def _groups(actions: Sequence[Action]) -> list[tuple[Ends, ChunkPass, Ends]]:
    """Return each computation with the receives in front of it and the sends after it."""
    groups: list[tuple[Ends, ChunkPass, Ends]] = []
    receives: Ends = ()
    for action in actions:
        if isinstance(action, ChunkPass):
            groups.append((receives, action, ()))
            receives = ()
        elif action.arrives:
            receives = *receives, action
        else:
            before, compute, sends = groups[-1]
            groups[-1] = before, compute, (*sends, action)
    return groups


def _common_order(program: Program) -> dict[tuple[int, ChunkPass], int]:
    """Return the place of each rank's computations among all, by their simulated starts; one follows whatever it needs.

    If two start together, the one of the rank that has done more comes later: its messages are not needed yet.
    """
    chunks = 1 + max(action.chunk for actions in program for action in actions if isinstance(action, ChunkPass))
    line = simulate(program, [FORWARD_SLOTS] * chunks, [BACKWARD_SLOTS] * chunks)
    computations = sorted(
        (span.start, number, rank) for rank, spans in enumerate(line.spans) for number, span in enumerate(spans)
    )
    return {(rank, line.spans[rank][number].action): place for place, (_, number, rank) in enumerate(computations)}


def _releases(program: Program, rank: int) -> dict[MessageEnd, Ends]:
    """Return for a receive of this rank the sends that have arrived for certain once it is complete: those that the
    peer has received before it sent. Sends after which nothing comes are missing: they are waited for at the end."""
    releases: dict[MessageEnd, Ends] = {}
    for peer, actions in enumerate(program):
        arrived: Ends = ()
        for action in actions:
            if isinstance(action, MessageEnd) and action.peer == rank:
                if action.arrives:
                    arrived = *arrived, action.other_end(peer)
                else:
                    releases[action.other_end(peer)], arrived = arrived, ()
    return releases
