"""A schedule before it runs: what each rank holds, how long it takes, and each rank's moves.

The model of time: a rank does its actions in order; a send costs the rank nothing, its messages leave one after the
other; a receive waits for its message. Times are those of one micro-batch, all micro-batches alike.

To run a program over real messages a rank has to know which receives it posts when, and which sends are surely gone:

- A receive is posted before it is needed, so that the message travels while the rank computes. All computations of all
  ranks have one common order, that of their starts in the simulation. A rank's sends belong to the computation before
  them, and it posts a receive between the two of its own computations between which the sending one lies. So messages
  from one rank to another are posted in one order on both.
- A tensor that has been sent is kept until it has surely left: until something has come from its receiver that this one
  sent later than it received. Nobody has to ask, and nobody waits.

Nothing can deadlock. Sends and receives are posted without waiting. A rank waits for a message only right before the
computation that needs it, and the program has been replayed. A transport may carry out its messages one by one, in the
order in which a rank starts them (NCCL): all ranks start all messages in the common order, so the first that is not
finished has both ends at the head of their queues (docs/explanation/communication.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.pipeline.schedule import BACKWARD_SLOTS, FORWARD_SLOTS, ChunkPass, MessageEnd, Program, Route, StageTurn

Placed = tuple[int, StageTurn]  # rank, turn
Ends = tuple[MessageEnd, ...]


class Span(NamedTuple):
    """A computation and when it runs, in the unit of the times given."""

    action: ChunkPass
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """The computations of each rank, and their times."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max(span.stop for rank in self.spans for span in rank)

    @property
    def busy(self) -> tuple[float, ...]:
        return tuple(sum(span.stop - span.start for span in rank) for rank in self.spans)

    @property
    def busy_share(self) -> float:
        """Computing time of all ranks / (ranks x makespan); 1 where nothing takes time."""
        return sum(self.busy) / (len(self.spans) * self.makespan) if self.makespan else 1.0


def in_flight(program: Program, chunks: int) -> tuple[int, ...]:
    """Return the most micro-batches that each chunk has gone forward with and not yet backward."""
    held, most = [0] * chunks, [0] * chunks
    for turns in program:
        for _, (_, chunk, backward), _ in turns:
            held[chunk] += -1 if backward else 1
            most[chunk] = max(most[chunk], held[chunk])
    return tuple(most)


def simulate(
    program: Program,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Callable[[Route], float] = lambda route: 0.0,
) -> Timeline:
    """Return when each computation runs, for times of each chunk and of a message along each route."""
    order, stuck = replay(program)
    assert not stuck, f"the schedule cannot end: rank {stuck[0][0]} waits forever before {stuck[0][1].compute}"
    clock, link = [0.0] * len(program), [0.0] * len(program)
    arrival: dict[tuple[int, MessageEnd], float] = {}
    spans: list[list[Span]] = [[] for _ in program]
    for rank, (receives, action, sends) in order:
        start = max([clock[rank], *(arrival[rank, end] for end in receives)])
        clock[rank] = start + (backward if action.backward else forward)[action.chunk]
        spans[rank].append(Span(action, start, clock[rank]))
        for end in sends:
            link[rank] = max(clock[rank], link[rank]) + transfer(end.route)
            arrival[end.peer, end.other_end(rank)] = link[rank]
    return Timeline(tuple(map(tuple, spans)))


def replay(program: Program) -> tuple[list[Placed], list[Placed]]:
    """Return all turns in an order in which each receive follows its send, and where each rank is stuck."""
    position = [0] * len(program)
    coming: set[tuple[int, MessageEnd]] = set()
    order: list[Placed] = []
    moved = True
    while moved:
        moved = False
        for rank, turns in enumerate(program):
            while position[rank] < len(turns):
                turn = turns[position[rank]]
                if not all((rank, end) in coming for end in turn.receives):
                    break
                coming.update((end.peer, end.other_end(rank)) for end in turn.sends)
                order.append((rank, turn))
                position[rank] += 1
                moved = True
    return order, [(rank, program[rank][at]) for rank, at in enumerate(position) if at < len(program[rank])]


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
    # The place of each rank's computations among all, by their simulated starts: one follows whatever it needs. If two
    # start together, the one of the rank that has done more comes later: its messages are not needed yet.
    chunks = 1 + max(turn.compute.chunk for turns in program for turn in turns)
    line = simulate(program, [FORWARD_SLOTS] * chunks, [BACKWARD_SLOTS] * chunks)
    computations = sorted(
        (span.start, number, on) for on, spans in enumerate(line.spans) for number, span in enumerate(spans)
    )
    place = {(on, line.spans[on][number].action): at for at, (_, number, on) in enumerate(computations)}
    # For a receive of this rank the sends that have arrived for certain once it is complete: those that the peer has
    # received before it sent. Sends after which nothing comes are missing: they are waited for at the end.
    releases: dict[MessageEnd, Ends] = {}
    for peer, turns in enumerate(program):
        arrived: Ends = ()
        for turn in turns:
            arrived += tuple(end.other_end(peer) for end in turn.receives if end.peer == rank)
            for end in turn.sends:
                if end.peer == rank:
                    releases[end.other_end(peer)], arrived = arrived, ()
    arriving = [
        (place[peer, turn.compute], send.other_end(peer))
        for peer, turns in enumerate(program)
        for turn in turns
        for send in turn.sends
        if send.peer == rank
    ]
    arriving.sort(key=lambda entry: entry[0])  # stable: those of one computation stay in the order of its sends
    moves: list[Move] = []
    posted = 0
    for receives, compute, sends in program[rank]:
        first = posted
        while posted < len(arriving) and arriving[posted][0] < place[rank, compute]:
            posted += 1
        posts = tuple(receive for _, receive in arriving[first:posted])
        released = tuple(send for receive in receives for send in releases.get(receive, ()))
        moves.append(Move(posts, receives, released, compute, sends))
    return tuple(moves)
