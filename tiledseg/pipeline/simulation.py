"""The simulation of a schedule: micro-batches in flight, times, and each rank's moves.

The model of time: a rank runs its passes in order; a send takes none of the rank's time, and its messages leave one
after the other; a receive waits for its message. All micro-batches take equal times.

To run a program over real messages, a rank must know when to post each receive, and which sends have completed:

- A receive is posted ahead, so that the message travels while the rank computes. All computations of all ranks have one
  common order, that of their starts in the simulation. A rank sends after its computation, and the receiver posts
  between the two of its own computations that enclose the sending one. So two ranks post the messages between them in
  the same order.
- A sent tensor is kept until it has surely arrived: until its receiver's next message comes, which was sent after the
  tensor's receipt. No rank asks or waits for it.

Nothing can deadlock. Posting does not wait. A rank waits for a message only right before the computation that needs it,
and the program has been replayed. A transport may process a rank's messages one by one in the order of their start
(NCCL): all ranks start all messages in the common order, so the first unfinished one is at the head of both queues
(docs/explanation/communication.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.pipeline.schedule import BACKWARD_SLOTS, FORWARD_SLOTS, ChunkPass, MessageEnd, Program, Route, StageTurn

Placed = tuple[int, StageTurn]  # rank, turn
Ends = tuple[MessageEnd, ...]


class Span(NamedTuple):
    """A computation with its start and stop, in the unit of the simulated times."""

    action: ChunkPass
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """The computations of each rank with their times."""

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
        """Computing time of all ranks / (ranks x makespan); 1 if nothing takes time."""
        return sum(self.busy) / (len(self.spans) * self.makespan) if self.makespan else 1.0


def in_flight(program: Program, chunks: int) -> tuple[int, ...]:
    """Return the most micro-batches that each chunk holds between their forward and backward passes."""
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
    """Return the times of all computations, from the times of each chunk and of a message along each route."""
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
    """Return all turns in an order in which each receive follows its send, and the turns at which ranks are stuck."""
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
    """A computation of a rank and the messages around it, in this order: post the receives `posts`, wait for
    `receives`, release the completed sends `released`, run `compute`, post `sends`."""

    posts: Ends
    receives: Ends
    released: Ends
    compute: ChunkPass
    sends: Ends


def itinerary(program: Program, rank: int) -> tuple[Move, ...]:
    # The place of each computation among all, by simulated starts: each follows those it depends on. If two start
    # together, that of the rank that is further ahead comes later: its messages are not needed yet.
    chunks = 1 + max(turn.compute.chunk for turns in program for turn in turns)
    line = simulate(program, [FORWARD_SLOTS] * chunks, [BACKWARD_SLOTS] * chunks)
    computations = sorted(
        (span.start, number, on) for on, spans in enumerate(line.spans) for number, span in enumerate(spans)
    )
    place = {(on, line.spans[on][number].action): at for at, (_, number, on) in enumerate(computations)}
    # For each receive of this rank, the sends that have surely arrived once it completes: those that the peer received
    # before it sent. Sends without a later message from the peer are waited for at the end of the run.
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
