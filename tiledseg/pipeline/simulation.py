"""The simulation of a schedule: times, micro-batches in flight, and each rank's moves.

The model of time: a rank runs its passes in order; a send takes none of the rank's time, and its messages leave one
after the other; a receive waits for its message. All micro-batches take equal times.

To run a schedule over real messages, a rank must know when to post each receive, and which sends have completed:

- A receive is posted ahead, so that the message travels while the rank computes. All computations of all ranks have one
  common order, that of their starts in the simulation. A rank sends after its computation, and the receiver posts
  between the two of its own computations that enclose the sending one. So two ranks post the messages between them in
  the same order.
- A sent tensor is kept until it has surely arrived: until its receiver's next message comes, which was sent after the
  tensor's receipt. No rank asks or waits for it.

Nothing can deadlock. Posting does not wait. A rank waits for a message only right before the computation that needs it,
and the schedule has been simulated. A transport may process a rank's messages one by one in the order of their start
(NCCL): all ranks start all messages in the common order, so the first unfinished one is at the head of both queues
(docs/explanation/communication.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.pipeline.schedule import BACKWARD_SLOTS, FORWARD_SLOTS, ChunkMap, ChunkPass, Orders, Route, StageMessage

Messages = Sequence[StageMessage]


class TimedPass(NamedTuple):
    """A pass of a rank from `start` to `stop`, in the unit of the simulated times; the tensors that it `needs` from
    other chunks, and those that it `makes` for them, of its own rank and of others."""

    start: float
    stop: float
    needs: Messages
    compute: ChunkPass
    makes: Messages


@dataclass(frozen=True)
class Timeline:
    """The turns of each rank, in order."""

    turns: tuple[tuple[TimedPass, ...], ...]

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max(turn.stop for rank in self.turns for turn in rank)

    @property
    def busy_share(self) -> float:
        """Computing time of all ranks / (ranks x makespan); 1 if nothing takes time."""
        busy = sum(sum(turn.stop - turn.start for turn in rank) for rank in self.turns)
        return busy / (len(self.turns) * self.makespan) if self.makespan else 1.0

    def in_flight(self, chunks: int) -> tuple[int, ...]:
        """Return the most micro-batches that each chunk holds between their forward and backward passes."""
        held, most = [0] * chunks, [0] * chunks
        for _, chunk, backward in (turn.compute for rank in self.turns for turn in rank):
            held[chunk] += -1 if backward else 1
            most[chunk] = max(most[chunk], held[chunk])
        return tuple(most)


def simulate(
    orders: Orders,
    pipeline: ChunkMap,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Callable[[Route], float] = lambda route: 0.0,
) -> Timeline:
    """Return all turns, from the times of each chunk and of a message along each route. The orders must end: each pass
    comes after those that it needs."""
    clock, link = [0.0] * len(orders), [0.0] * len(orders)
    arrival: dict[StageMessage, float] = {}
    turns: list[list[TimedPass]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while len(turns[rank]) < len(order):
                compute = order[len(turns[rank])]
                needs, makes = pipeline.messages(compute)
                if not all(message in arrival for message in needs):
                    break
                start = max([clock[rank], *(arrival[message] for message in needs)])
                clock[rank] = stop = start + (backward if compute.backward else forward)[compute.chunk]
                for message in makes:
                    if pipeline.is_local(message.route):
                        arrival[message] = stop
                    else:
                        arrival[message] = link[rank] = max(stop, link[rank]) + transfer(message.route)
                turns[rank].append(TimedPass(start, stop, needs, compute, makes))
                moved = True
    for rank, (order, own) in enumerate(zip(orders, turns, strict=True)):
        assert len(own) == len(order), f"the schedule cannot end: rank {rank} waits forever before {order[len(own)]}"
    return Timeline(tuple(map(tuple, turns)))


class Move(NamedTuple):
    """A pass of a rank and the messages around it, in this order: post the receives `posts`, wait for those that the
    pass `needs`, release the completed sends `released`, run `compute`, send those that it `makes` for other ranks."""

    posts: Messages
    needs: Messages
    released: Messages
    compute: ChunkPass
    makes: Messages


def itinerary(orders: Orders, pipeline: ChunkMap, rank: int) -> tuple[Move, ...]:
    """Return the moves of a rank."""
    chunks = len(pipeline.ranks)
    line = simulate(orders, pipeline, [FORWARD_SLOTS] * chunks, [BACKWARD_SLOTS] * chunks)
    # All passes in one order, by simulated starts: each follows those it depends on. If two start together, that of the
    # rank that is further ahead comes later: its messages are not needed yet.
    common = sorted(
        (turn.start, number, on) for on, turns in enumerate(line.turns) for number, turn in enumerate(turns)
    )
    moves: list[Move] = []
    posts: list[StageMessage] = []  # since the last move
    # Own messages that each peer has received since it last sent one here.
    arrived: list[list[StageMessage]] = [[] for _ in orders]
    # For each message from a peer, the own ones that have surely arrived once it comes. Those without a later message
    # from the peer are waited for at the end of the run.
    releases: dict[StageMessage, Messages] = {}
    for _, number, on in common:
        _, _, needs, compute, makes = line.turns[on][number]
        if on == rank:
            released = [sent for message in needs for sent in releases.get(message, ())]
            moves.append(Move(posts, needs, released, compute, makes))
            posts = []
            continue
        arrived[on] += [message for message in needs if pipeline.ranks[message.sender] == rank]
        for message in makes:
            if pipeline.ranks[message.receiver] == rank:
                posts.append(message)
                releases[message], arrived[on] = arrived[on], []
    return tuple(moves)
