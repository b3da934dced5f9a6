"""A schedule before it runs: whether it ends, what each rank holds, how long it takes, and a drawing.

The model of time: a rank does its actions in order; a send costs the rank nothing, its messages leave one after the
other; a receive waits for its message. Times are those of one micro-batch, all micro-batches alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.errors import ConfigError
from tiledseg.pipeline.schedule import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    Action,
    ChunkMap,
    ChunkPass,
    MessageEnd,
    Program,
    Route,
)

Placed = tuple[int, Action]  # rank, action


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

    @property
    def bubble_share(self) -> float:
        """The rest, the share of the ranks' time in which they wait."""
        return 1 - self.busy_share


def verify(program: Program, chunks: int, most_in_flight: Sequence[int]) -> None:
    """Raise ConfigError for a program in which a rank waits forever, or a chunk holds more micro-batches than
    `most_in_flight` says."""
    _, stuck = replay(program)
    found = [f"rank {rank} waits forever at: {words_of(action)}" for rank, action in stuck]
    held = in_flight(program, chunks)
    for chunk, (here, most) in enumerate(zip(held, most_in_flight, strict=True)):
        if here > most:
            found.append(f"chunk {chunk} holds {here} micro-batches at once, but at most {most} are allowed")
    if found:
        raise ConfigError(f"the schedule does not fit its pipeline: {'; '.join(found)}")


def in_flight(program: Program, chunks: int) -> tuple[int, ...]:
    """Return the most micro-batches that each chunk has gone forward with and not yet backward."""
    held, most = [0] * chunks, [0] * chunks
    for actions in program:
        for action in actions:
            if isinstance(action, ChunkPass):
                held[action.chunk] += -1 if action.backward else 1
                most[action.chunk] = max(most[action.chunk], held[action.chunk])
    return tuple(most)


def simulate(
    program: Program,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Callable[[Route], float] = lambda route: 0.0,
) -> Timeline:
    """Return when each computation runs, for times of each chunk and of a message along each route.

    Raises ConfigError for a program that cannot end.
    """
    order, stuck = replay(program)
    if stuck:
        raise ConfigError(f"the schedule cannot end: rank {stuck[0][0]} waits forever at: {words_of(stuck[0][1])}")
    clock, link = [0.0] * len(program), [0.0] * len(program)
    arrival: dict[Placed, float] = {}
    spans: list[list[Span]] = [[] for _ in program]
    for rank, action in order:
        if isinstance(action, ChunkPass):
            start = clock[rank]
            clock[rank] += (backward if action.backward else forward)[action.chunk]
            spans[rank].append(Span(action, start, clock[rank]))
        elif action.arrives:
            clock[rank] = max(clock[rank], arrival[rank, action])
        else:
            link[rank] = max(clock[rank], link[rank]) + transfer(action.route)
            arrival[action.peer, action.other_end(rank)] = link[rank]
    return Timeline(tuple(map(tuple, spans)))


def draw(program: Program, pipeline: ChunkMap, width: int = 116) -> str:
    """Draw the program as text: a row a rank, a column a time slot; a forward pass takes one slot, a backward pass two.

    `F3`, `B3`: forward and backward of micro-batch 3; `f3`, `b3`: of the rank's second chunk (folded); `.`: it waits.
    Wider drawings than `width` characters have their middle left out.
    """
    chunks = len(pipeline.ranks)
    line = simulate(program, [FORWARD_SLOTS] * chunks, [BACKWARD_SLOTS] * chunks)
    slots = round(line.makespan)
    rows = [["."] * slots for _ in program]
    for rank, spans in enumerate(line.spans):
        first = pipeline.ranks.index(rank)
        for span in spans:
            letter = "B" if span.action.backward else "F"
            letter = letter if span.action.chunk == first else letter.lower()
            for slot in range(round(span.start), round(span.stop)):
                rows[rank][slot] = f"{letter}{span.action.micro_batch}"
    labels = [f"stage {rank} " for rank in range(len(rows))]
    room = width - max(map(len, labels))
    cell = max(len(text) for row in rows for text in row) + 1
    if slots * cell > room:
        cell = max(cell, 4)
        columns = max(room // cell, 5)
        head = (columns - 2) * 2 // 3
        rows = [[*row[:head], "...", *row[slots - (columns - 2 - head) :]] for row in rows]
    lines = zip(labels, rows, strict=True)
    return "\n".join(
        (f"{label:<{width - room}}" + "".join(f"{text:<{cell}}" for text in row)).rstrip() for label, row in lines
    )


def replay(program: Program) -> tuple[list[Placed], list[Placed]]:
    """Return all actions in an order in which every receive follows its send, and the action at which each rank is
    stuck."""
    position = [0] * len(program)
    coming: set[Placed] = set()
    order: list[Placed] = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if isinstance(action, MessageEnd):
                    if not action.arrives:
                        coming.add((action.peer, action.other_end(rank)))
                    elif (rank, action) not in coming:
                        break
                order.append((rank, action))
                position[rank] += 1
                moved = True
    stuck = [(rank, program[rank][at]) for rank, at in enumerate(position) if at < len(program[rank])]
    return order, stuck


def words_of(action: Action) -> str:
    """Return an action in words."""
    if isinstance(action, ChunkPass):
        way = "backward" if action.backward else "forward"
        return f"{way} of micro-batch {action.micro_batch}, chunk {action.chunk}"
    way, thing = "receive" if action.arrives else "send", "gradient" if action.gradient else "activation"
    route = f"tensor {action.route.tensor}, chunk {action.route.source} to {action.route.target}"
    return f"{way} of the {thing} of micro-batch {action.micro_batch}, {route}, rank {action.peer}"
