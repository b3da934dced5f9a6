"""Schedules: the order of the passes of each rank of a pipeline, and their messages. Plain values; nothing runs.

Symbols: n ranks (stages), m a micro-batch, M their number. A chunk is a run of layers. Chunk i is on rank i, but
`folded` places chunks r and 2n - 2 - r on rank r: a part of the encoder and its mirror in the decoder.

    gpipe   all forwards, then all backwards, last one first (Huang et al., 2019): M micro-batches in flight
    1f1b    n - 1 - i forwards, then a forward and a backward in turn (Narayanan et al., 2019): at most n - i in flight
    folded  in an order chosen for the chunks' times (`folded_orders`): at most 2n - 1 - c in flight at chunk c

Sends do not block, receives wait: a receive stands right before the pass that needs it, a send right after the pass
that made the tensor. A tensor goes directly from its chunk to each chunk that reads it, and its gradient directly back.
Chunks of one rank send each other nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from tiledseg.config.words import chunk_ranks
from tiledseg.geometry.graph import Graph
from tiledseg.pipeline.balance import cuts

FORWARD_SLOTS, BACKWARD_SLOTS = 1, 2  # the backward pass computes two gradients where the forward has one output

# Shares of the slowest rank's time (see `folded_orders`). Values chosen for each pipeline would gain 1 % in the mean.
_RATE, _PATIENCE = 0.6, 0.15


class ChunkTimes(NamedTuple):
    """Times of each chunk's passes, in any unit; `sending`: of the message from each chunk to the next (empty: 0)."""

    forward: Sequence[float]
    backward: Sequence[float]
    sending: Sequence[float] = ()


@dataclass(frozen=True)
class Settings:
    """The settings of a pipeline: the schedule, the number of layers of each chunk, and the recompute mode of each
    stage (`never`, `except_last`, `always`).

    `except_last`: all but the last micro-batch, whose backward pass comes soonest in `gpipe` (Huang et al., 2019).
    `times`: of the chunks, for orders that depend on them (see `compute_orders`); the same on all ranks.
    """

    schedule: str
    balance: tuple[int, ...]
    recompute: tuple[str, ...]
    times: ChunkTimes | None = None

    def recomputes(self, stage: int, micro_batch: int, micro_batches: int) -> bool:
        mode = self.recompute[stage]
        return mode == "always" or (mode == "except_last" and micro_batch < micro_batches - 1)

    def cut(self, graph: Graph) -> ChunkMap:
        """Return the chunks of a network."""
        return cut_network(graph, self.balance, chunk_ranks(self.schedule, len(self.recompute)))


@dataclass(frozen=True, order=True)
class Route:
    """A tensor, by its number in the graph, that chunk `source` makes for chunk `target` in each micro-batch.

    `returns`: its gradient travels back.
    """

    source: int
    target: int
    tensor: int
    returns: bool = True


@dataclass(frozen=True)
class ChunkMap:
    """The chunks of a pipeline: the rank of each, the routes between them, one for each tensor and chunk that reads it,
    and the nodes of each: `runs` of (first, stop), half-open."""

    ranks: tuple[int, ...]
    routes: tuple[Route, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        return max(self.ranks) + 1

    def layers_of(self, rank: int) -> set[int]:
        runs = zip(self.ranks, self.runs, strict=True)
        return {layer for place, (first, stop) in runs if place == rank for layer in range(first, stop)}

    def is_local(self, route: Route) -> bool:
        return self.ranks[route.source] == self.ranks[route.target]

    def is_skip(self, route: Route) -> bool:
        """Return True if a route does not go from the last node of a chunk to the next chunk: it passes over nodes."""
        return route.tensor != self.runs[route.target][0]

    def messages(self, each: ChunkPass) -> tuple[list[StageMessage], list[StageMessage]]:
        """Return the tensors that a pass needs from other chunks, and those that it makes for them."""
        m, chunk, backward = each
        routes = [route for route in self.routes if route.returns or not backward]
        entering = [StageMessage(m, route, backward) for route in routes if route.target == chunk]
        leaving = [StageMessage(m, route, backward) for route in routes if route.source == chunk]
        return (leaving, entering) if backward else (entering, leaving)


def cut_network(graph: Graph, balance: Sequence[int], ranks: Sequence[int]) -> ChunkMap:
    """Return the chunks of a balance that fits (see `balance.parse_balance`), on these ranks. Routes: first those of
    each chunk's last tensor to the next chunk, then skips. The first chunk has the network's input, and the last one
    needs its outputs."""
    chunks = [chunk for chunk, count in enumerate(balance) for _ in range(count)]
    chunks.append(chunks[-1])
    routes = {
        Route(chunks[max(tensor - 1, 0)], chunks[reader], tensor, graph.wants_gradient[tensor])
        for tensor, readers in enumerate(graph.readers)
        for reader in readers
    }
    cut = ChunkMap(tuple(ranks), runs=cuts(balance))
    between = (route for route in routes if route.source != route.target)
    return replace(cut, routes=tuple(sorted(between, key=lambda route: (cut.is_skip(route), route))))


class ChunkPass(NamedTuple):
    """The forward or `backward` pass of a chunk for a micro-batch."""

    micro_batch: int
    chunk: int
    backward: bool = False


class StageMessage(NamedTuple):
    """The tensor of `route` for a micro-batch: an activation on its way from source to target, or the `gradient` that
    travels back."""

    micro_batch: int
    route: Route
    gradient: bool = False

    @property
    def sender(self) -> int:
        """The chunk that makes it."""
        return self.route.target if self.gradient else self.route.source

    @property
    def receiver(self) -> int:
        """The chunk that needs it."""
        return self.route.source if self.gradient else self.route.target


Orders = Sequence[Sequence[ChunkPass]]  # of each rank


def most_in_flight(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return the most micro-batches that each chunk may hold at once, for any times of the chunks."""
    chunks = len(chunk_ranks(schedule, stages))
    if schedule == "gpipe":
        return (micro_batches,) * chunks
    return tuple(min(chunks - chunk, micro_batches) for chunk in range(chunks))


def kept_of(schedule: str, in_flight: int, recompute: str) -> tuple[int, int]:
    """Return, of the micro-batches that a chunk holds at once, the most with all activations, and those with inputs
    only.

    With recomputation one has its activations during its backward pass. `except_last` keeps those of the last
    micro-batch too, whose backward pass is the first in gpipe (Huang et al., 2019) and the last otherwise.
    """
    if recompute == "never":
        return in_flight, 0
    complete = min(in_flight, 2 if recompute == "except_last" and schedule != "gpipe" else 1)
    return complete, in_flight - complete


def forward_orders(pipeline: ChunkMap, micro_batches: int) -> Orders:
    """Return the passes of each rank, in order, without training: no backward passes.

    A rank with two chunks first runs its first chunk for as many micro-batches as fit on the way to its second chunk,
    then alternates: no rank waits once the pipeline is full.
    """
    orders: list[list[ChunkPass]] = []
    for rank in range(pipeline.size):
        first, *others = (chunk for chunk, place in enumerate(pipeline.ranks) if place == rank)
        ahead = -(-(others[0] - first) // 2) if others else 0
        turns = (
            [ChunkPass(m, first), *(ChunkPass(m - ahead, chunk) for chunk in others)]
            for m in range(micro_batches + ahead)
        )
        orders.append([each for turn in turns for each in turn if 0 <= each.micro_batch < micro_batches])
    return orders


def compute_orders(schedule: str, stages: int, micro_batches: int, times: ChunkTimes | None = None) -> Orders:
    """Return the passes of each rank, in order; they do not depend on skips.

    `times`, the same on all ranks, decide the order of `folded` (None: ranks of equal work) and of no other schedule.
    """
    if schedule == "folded":
        return folded_orders(chunk_ranks(schedule, stages), micro_batches, times)
    orders: list[list[ChunkPass]] = []
    for stage in range(stages):
        forward, backward = ([ChunkPass(m, stage, back) for m in range(micro_batches)] for back in (False, True))
        ahead = min(stages - 1 - stage, micro_batches)
        if schedule == "gpipe":
            orders.append(forward + backward[::-1])
        else:
            turns = (each for m in range(micro_batches) for each in (*forward[m + ahead : m + ahead + 1], backward[m]))
            orders.append([*forward[:ahead], *turns])
    return orders


def folded_orders(ranks: Sequence[int], micro_batches: int, times: ChunkTimes | None = None) -> Orders:
    """Return the order in which each rank runs its most urgent pass, for these times of chunks on `ranks` (None: ranks
    of equal work). The law: for any times, the order can be replayed without a deadlock (`simulation.simulate`).

    A micro-batch makes 2C passes over the C chunks, numbered in their order: forward through chunks 0 to C - 1, then
    backward through C - 1 to 0. The urgency of a pass is its latest start if a micro-batch is to leave the pipeline
    every `_RATE`. A rank waits up to `_PATIENCE` for a more urgent pass before it runs another. Chunk c holds at most
    C - c micro-batches, as in 1f1b.
    """
    if times is None:
        shares = [1 / ranks.count(rank) for rank in ranks]
        times = ChunkTimes([FORWARD_SLOTS * share for share in shares], [BACKWARD_SLOTS * share for share in shares])
    chunks = len(ranks)
    place = (*ranks, *reversed(ranks))
    seconds = (*times.forward, *reversed(times.backward))  # of each pass
    sending = times.sending or (0.0,) * (chunks - 1)
    waits = (0.0, *sending, 0.0, *reversed(sending), 0.0)  # time of the message before each pass
    own = [[number for number, at in enumerate(place) if at == rank] for rank in range(max(ranks) + 1)]
    slowest = max(sum(seconds[number] for number in passes) for passes in own)
    steps = [time + waits[number + 1] for number, time in enumerate(seconds)]
    left = list(accumulate(reversed(steps)))[::-1]  # time from the start of each pass to the end of the last
    ends: list[list[float]] = [[] for _ in seconds]  # end times of each pass, by micro-batch
    order: list[list[ChunkPass]] = [[] for _ in own]

    def ready_at(number: int) -> float:
        """Return the earliest start of the pass's next micro-batch; infinity if it is unknown or the chunk is full."""
        m = len(ends[number])
        if m == micro_batches or (number and len(ends[number - 1]) <= m):
            return math.inf
        if number < chunks and m - len(ends[-1 - number]) >= chunks - number:
            return math.inf
        return ends[number - 1][m] + waits[number] if number else 0.0

    free = [0.0] * len(own)
    events = [(0.0, rank) for rank in range(len(own))]  # times at which a rank may be able to start a pass
    while events:
        now, rank = heapq.heappop(events)
        if free[rank] > now:
            continue
        soon = [number for number in own[rank] if ready_at(number) <= now + _PATIENCE * slowest]
        if not soon:
            continue  # another event follows when a pass is ready
        number = min(soon, key=lambda number: (_RATE * slowest * len(ends[number]) - left[number], number))
        if ready_at(number) > now:
            continue
        free[rank] = now + seconds[number]
        order[rank].append(ChunkPass(len(ends[number]), min(number, 2 * chunks - 1 - number), number >= chunks))
        ends[number].append(free[rank])
        heapq.heappush(events, (free[rank], rank))
        if number + 1 < len(seconds):
            heapq.heappush(events, (free[rank] + waits[number + 1], place[number + 1]))
    return order
