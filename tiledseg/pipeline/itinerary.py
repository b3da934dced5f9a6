"""The moves of one rank of a pipeline: which receives it posts when, and which sends are surely gone.

A program says in which order a rank computes, sends and receives. To run it over real messages more is to be known, and
all of it follows from the programs of all ranks, which every rank has:

- Messages from one rank to another are matched in order, so a rank posts its receives from a peer in the order in which
  that peer sends, whatever order it needs them in.
- A receive is posted before it is needed, so that the message travels while the rank computes: by `AHEAD` computations.
- A tensor that has been sent is kept until it has surely left: until something has come from its receiver that this one
  sent later than it received. Nobody has to ask, and nobody waits.

Nothing can deadlock. Sends and receives are posted without waiting. A rank waits for a message only right before the
computation that needs it. The program has been replayed beforehand (`simulation.verify`), so each message that is
waited for is sent by a rank that waits for nothing that comes after. A transport that carries out its messages one by
one, in the order in which a rank starts them (NCCL), needs more: `in_order` gives all computations of all ranks one
common order, that of their starts in the simulation. A rank's sends belong to the computation before them, and it posts
a receive between the two of its own computations between which the sending one lies. So all ranks start all messages in
one order, with whatever else their computations communicate in between, and the first that is not finished has both
ends at the head of their queues. Not any order would do: a message that is posted before a halo exchange on the same
queue holds it up. In the order of starts no receive stands there long before its message is sent
(docs/explanation/communication.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tiledseg.pipeline.chunk_orders import BACKWARD_SLOTS, FORWARD_SLOTS
from tiledseg.pipeline.schedule import Action, Compute, MessageEnd, Program, Receive, Send
from tiledseg.pipeline.simulation import simulate

AHEAD = 2  # computations: in 1f1b one forward and one backward pass


@dataclass(frozen=True)
class Move:
    """One computation of a rank and the messages around it.

    In this order: `posts` are posted, `receives` waited for, `released` sends known to be gone, `compute` done, `sends`
    posted.
    """

    posts: tuple[Receive, ...]
    receives: tuple[Receive, ...]
    released: tuple[Send, ...]
    compute: Compute
    sends: tuple[Send, ...]


def itinerary(program: Program, rank: int, in_order: bool = False) -> tuple[Move, ...]:
    """Return the moves of a rank. `in_order`: for a transport that carries out messages in the order of their start."""
    groups = _groups(program[rank])
    posts = _posts_in_order(program, rank, groups) if in_order else _posts_ahead(program, rank, groups)
    releases = _releases(program, rank)
    return tuple(
        Move(posted, receives, tuple(send for r in receives for send in releases.get(r, ())), compute, sends)
        for posted, (receives, compute, sends) in zip(posts, groups, strict=True)
    )


_Group = tuple[tuple[Receive, ...], Compute, tuple[Send, ...]]


def _groups(actions: Sequence[Action]) -> list[_Group]:
    """Return each computation with the receives in front of it and the sends after it."""
    groups: list[_Group] = []
    receives: list[Receive] = []
    for action in actions:
        if isinstance(action, Receive):
            receives.append(action)
        elif isinstance(action, Send):
            before, compute, sends = groups[-1]
            groups[-1] = before, compute, (*sends, action)
        else:
            groups.append((tuple(receives), action, ()))
            receives = []
    return groups


def _posts_ahead(program: Program, rank: int, groups: Sequence[_Group]) -> list[tuple[Receive, ...]]:
    """Return, before each computation, the receives of the next `AHEAD` ones, from each peer in the order of its
    sends."""
    queues = {peer: _sent_to(program, peer, rank) for peer in range(len(program)) if peer != rank}
    place = {receive: index for queue in queues.values() for index, receive in enumerate(queue)}
    posted = dict.fromkeys(queues, 0)
    found: list[tuple[Receive, ...]] = []
    for index in range(len(groups)):
        now: list[Receive] = []
        for receives, _, _ in groups[index : index + 1 + AHEAD]:
            for receive in receives:
                stop = place[receive] + 1
                now += queues[receive.peer][posted[receive.peer] : stop]
                posted[receive.peer] = max(posted[receive.peer], stop)
        found.append(tuple(now))
    return found


def _posts_in_order(program: Program, rank: int, groups: Sequence[_Group]) -> list[tuple[Receive, ...]]:
    """Return, before each computation, the receives whose senders' computations come before it in the common order."""
    place = _common_order(program)
    queue = [
        (place[peer, compute], send.received_from(peer))
        for peer, actions in enumerate(program)
        for _, compute, sends in _groups(actions)
        for send in sends
        if send.peer == rank
    ]
    queue.sort(key=lambda entry: entry[0])  # stable: those of one computation stay in the order of its sends
    found: list[tuple[Receive, ...]] = []
    at = 0
    for _, compute, _ in groups:
        stop = at
        while stop < len(queue) and queue[stop][0] < place[rank, compute]:
            stop += 1
        found.append(tuple(receive for _, receive in queue[at:stop]))
        at = stop
    return found


def _common_order(program: Program) -> dict[tuple[int, Compute], int]:
    """Return the place of each rank's computations among all, by their simulated starts; one follows whatever it needs.

    If two start together, the one of the rank that has done more comes later: its messages are not needed yet.
    """
    chunks = 1 + max(action.chunk for actions in program for action in actions if not isinstance(action, MessageEnd))
    line = simulate(program, [FORWARD_SLOTS] * chunks, [BACKWARD_SLOTS] * chunks)
    computations = sorted(
        (span.start, number, rank) for rank, spans in enumerate(line.spans) for number, span in enumerate(spans)
    )
    return {(rank, line.spans[rank][number].action): place for place, (_, number, rank) in enumerate(computations)}


def _releases(program: Program, rank: int) -> dict[Receive, tuple[Send, ...]]:
    """Return for a receive of this rank the sends that have arrived for certain once it is complete.

    A send is gone once something has come that its receiver sent after its receive. Sends of which that never happens
    are missing here: they are waited for at the end.
    """
    released: dict[int, tuple[Send, ...]] = {}
    own = {action: index for index, action in enumerate(program[rank])}
    for peer, actions in enumerate(program):
        at_peer = {action: index for index, action in enumerate(actions)}
        incoming = _sent_to(program, peer, rank)
        sent_at = [at_peer[receive.sent_to(rank)] for receive in incoming]
        # Of the messages that a peer sends from each one on, the place at which this rank takes up the first.
        firsts = list(accumulate((own[receive] for receive in reversed(incoming)), min))[::-1]
        for send in _sent_by(program, rank, peer):
            later = bisect_right(sent_at, at_peer[send.received_from(rank)])
            if later < len(firsts):
                released[firsts[later]] = (*released.get(firsts[later], ()), send)
    return {action: released[place] for action, place in own.items() if place in released}  # type: ignore[misc]


def _sent_by(program: Program, rank: int, peer: int) -> list[Send]:
    return [action for action in program[rank] if isinstance(action, Send) and action.peer == peer]


def _sent_to(program: Program, peer: int, rank: int) -> list[Receive]:
    """Return what a peer sends to a rank, in its order, as the rank's receives."""
    return [send.received_from(peer) for send in _sent_by(program, peer, rank)]
