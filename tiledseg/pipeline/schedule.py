"""Schedules: in which order each rank of a pipeline computes, sends and receives. Plain values, nothing is run.

Symbols: n ranks (stages), m a micro-batch, M their number. A chunk is a run of layers. Chunk i is on rank i, but
`folded` puts chunks r and 2n - 2 - r on rank r, the encoder's part and its mirror in the decoder.

    gpipe   all forwards, then all backwards, last one first (Huang et al., 2019): M micro-batches in flight
    1f1b    n - 1 - i forwards, then a forward and a backward in turn (Narayanan et al., 2019): at most n - i in flight
    folded  in an order made for the chunks' times (see `chunk_orders`): at most 2n - 1 - c in flight at chunk c

Sends are meant as non-blocking and receives as waiting: a receive stands right in front of what needs it, a send right
after what made it. A tensor goes straight from the chunk that makes it to each chunk that takes it, its gradient
straight back. Nothing is sent between chunks of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiledseg.config.words import RECOMPUTE, chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph

if TYPE_CHECKING:
    from tiledseg.pipeline.chunk_orders import ChunkTimes


@dataclass(frozen=True)
class Settings:
    """The settings of a pipeline: the schedule, the layers of each chunk, and whether each stage recomputes (`never`,
    `except_last`, `always`).

    `except_last`: all but the last micro-batch, whose backward pass comes soonest in `gpipe` (Huang et al., 2019).
    `times` of the chunks make the orders that depend on them (see `compute_orders`); the same on all ranks.
    """

    schedule: str
    balance: tuple[int, ...]
    recompute: tuple[str, ...]
    times: ChunkTimes | None = None

    def __post_init__(self) -> None:
        for mode in self.recompute:
            if mode not in RECOMPUTE:
                raise ConfigError(f"a stage recomputes '{mode}'; give one of {', '.join(RECOMPUTE)}")

    def recomputes(self, stage: int, micro_batch: int, micro_batches: int) -> bool:
        mode = self.recompute[stage]
        return mode == "always" or (mode == "except_last" and micro_batch < micro_batches - 1)


@dataclass(frozen=True, order=True)
class Route:
    """A tensor, by its number in the graph, that chunk `source` makes for chunk `target` in each micro-batch.

    `returns`: whether its gradient travels back.
    """

    source: int
    target: int
    tensor: int
    returns: bool = True


@dataclass(frozen=True)
class ChunkMap:
    """The rank of each chunk, and what travels between chunks: one route for each tensor and chunk that takes it."""

    ranks: tuple[int, ...]
    routes: tuple[Route, ...] = ()

    @property
    def size(self) -> int:
        return max(self.ranks) + 1

    def is_local(self, route: Route) -> bool:
        return self.ranks[route.source] == self.ranks[route.target]


@dataclass(frozen=True)
class Forward:
    """The forward pass of a chunk."""

    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class Backward:
    """The backward pass of a chunk; after it nothing of the micro-batch is kept."""

    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class MessageEnd:
    """One end of a message along `route`; `peer` is the other end's rank. Gradients travel from target to source."""

    micro_batch: int
    route: Route
    peer: int


class Send(MessageEnd):
    """The end that sends."""

    def received_from(self, rank: int) -> Receive:
        """Return the other end of what `rank` sends."""
        kind = ReceiveActivation if isinstance(self, SendActivation) else ReceiveGradient
        return kind(self.micro_batch, self.route, rank)


class Receive(MessageEnd):
    """The end that receives."""

    def sent_to(self, rank: int) -> Send:
        """Return the other end of what `rank` receives."""
        kind = SendActivation if isinstance(self, ReceiveActivation) else SendGradient
        return kind(self.micro_batch, self.route, rank)


class SendActivation(Send):
    """The send of what `route.source` has made, on its way to `peer`."""


class ReceiveActivation(Receive):
    """The receive of what `route.target` takes, from `peer`."""


class SendGradient(Send):
    """The send of the gradient of what came along `route`, on its way back to `peer`."""


class ReceiveGradient(Receive):
    """The receive of the gradient of what went along `route`, from `peer`."""


Compute = Forward | Backward
Action = Forward | Backward | Send | Receive
Program = tuple[tuple[Action, ...], ...]  # the actions of each rank, in order


def most_in_flight(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return the most micro-batches that each chunk may hold at once, whatever the chunks' times."""
    chunks = len(chunk_ranks(schedule, stages))
    if schedule == "gpipe":
        return (micro_batches,) * chunks
    return tuple(min(chunks - chunk, micro_batches) for chunk in range(chunks))


def kept_of(schedule: str, in_flight: int, recompute: str) -> tuple[int, int]:
    """Return, of the micro-batches that a chunk holds at once, how many with all activations at most, how many inputs
    only.

    With recomputation one has its activations while it goes backward. `except_last` keeps those of the last micro-batch
    too, which goes backward first in gpipe (Huang et al., 2019), and last otherwise.
    """
    if recompute == "never":
        return in_flight, 0
    complete = min(in_flight, 2 if recompute == "except_last" and schedule != "gpipe" else 1)
    return complete, in_flight - complete


def chunk_routes(graph: Graph, runs: Sequence[tuple[int, int]]) -> tuple[Route, ...]:
    """Return the routes between the chunks of nodes (first, stop). First those from each chunk to the next of what its
    last node makes, then all that pass over nodes.

    The network's input is with the first chunk, its outputs are wanted by the last one.
    """
    chunks = [chunk for chunk, (first, stop) in enumerate(runs) for _ in range(first, stop)]
    chunks.append(chunks[-1])
    found = {
        Route(chunks[max(tensor - 1, 0)], chunks[reader], tensor, graph.wants_gradient[tensor])
        for tensor, readers in enumerate(graph.readers)
        for reader in readers
    }
    between = (route for route in found if route.source != route.target)
    return tuple(sorted(between, key=lambda route: (is_skip(route, runs), route)))


def is_skip(route: Route, runs: Sequence[tuple[int, int]]) -> bool:
    """Return True if a route passes over nodes: it does not go from the last node of a chunk to the next chunk."""
    return route.tensor != runs[route.target][0]


def program(schedule: str, pipeline: ChunkMap, micro_batches: int, times: ChunkTimes | None = None) -> Program:
    """Return the actions of every rank for one step; `times` as for `compute_orders`.

    Raises ConfigError for an unknown schedule, or no micro-batch.
    """
    if micro_batches < 1:
        raise ConfigError(f"there are {micro_batches} micro-batches; give at least 1")
    if pipeline.ranks != chunk_ranks(schedule, pipeline.size):
        raise ConfigError(
            f"the schedule {schedule} puts chunks on ranks {list(chunk_ranks(schedule, pipeline.size))}, but the "
            f"pipeline has them on {list(pipeline.ranks)}; give it that placement"
        )
    orders = compute_orders(schedule, pipeline.size, micro_batches, times)
    return tuple(tuple(with_messages(order, pipeline)) for order in orders)


def forward_program(pipeline: ChunkMap, micro_batches: int) -> Program:
    """Return the actions of every rank where nothing is trained: no backward passes, no gradients."""
    orders = (_forward_only(pipeline, rank, micro_batches) for rank in range(pipeline.size))
    return tuple(tuple(with_messages(order, pipeline)) for order in orders)


def _forward_only(pipeline: ChunkMap, rank: int, micro_batches: int) -> Iterator[Forward]:
    """Yield forward passes.

    A rank with two chunks does the first of as many micro-batches as fit into their way to the second, then one of each
    in turn: no rank waits once the pipeline is full.
    """
    first, *others = (chunk for chunk, place in enumerate(pipeline.ranks) if place == rank)
    ahead = min(-(-(others[0] - first) // 2), micro_batches) if others else 0
    for m in range(ahead):
        yield Forward(m, first)
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield Forward(m + ahead, first)
        for chunk in others:
            yield Forward(m, chunk)


def compute_orders(
    schedule: str, stages: int, micro_batches: int, times: ChunkTimes | None = None
) -> list[list[Compute]]:
    """Return what each rank computes, in order; it depends on no skips.

    `times`: the same on all ranks. Orders of ranks with several chunks are made for them (None: for ranks of equal
    work). The other schedules have one order for all times.
    """
    if schedule == "gpipe":
        return [list(_fill_drain(stage, micro_batches)) for stage in range(stages)]
    if schedule == "1f1b":
        return [list(_in_turn(stage, stages - 1 - stage, micro_batches)) for stage in range(stages)]
    from tiledseg.pipeline.chunk_orders import chunk_of, fastest

    ranks = chunk_ranks(schedule, stages)
    chunks = len(ranks)
    return [
        [(Forward if number < chunks else Backward)(m, chunk_of(number, chunks)) for number, m in passes]
        for passes in fastest(ranks, micro_batches, times)
    ]


def _fill_drain(stage: int, micro_batches: int) -> Iterator[Compute]:
    for m in range(micro_batches):
        yield Forward(m, stage)
    for m in reversed(range(micro_batches)):
        yield Backward(m, stage)


def _in_turn(stage: int, ahead: int, micro_batches: int) -> Iterator[Compute]:
    """Yield a forward and a backward pass in turn, after so many forward ones."""
    for m in range(min(ahead, micro_batches)):
        yield Forward(m, stage)
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield Forward(m + ahead, stage)
        yield Backward(m, stage)


def with_messages(order: Iterable[Compute], pipeline: ChunkMap) -> Iterator[Action]:
    """Yield each computation between its receives and its sends."""
    ranks = pipeline.ranks
    routes = [route for route in pipeline.routes if not pipeline.is_local(route)]
    incoming = [[r for r in routes if r.target == chunk] for chunk in range(len(ranks))]
    outgoing = [[r for r in routes if r.source == chunk] for chunk in range(len(ranks))]
    for action in order:
        m, chunk = action.micro_batch, action.chunk
        if isinstance(action, Forward):
            yield from (ReceiveActivation(m, route, ranks[route.source]) for route in incoming[chunk])
            yield action
            yield from (SendActivation(m, route, ranks[route.target]) for route in outgoing[chunk])
        else:
            yield from (ReceiveGradient(m, route, ranks[route.target]) for route in outgoing[chunk] if route.returns)
            yield action
            yield from (SendGradient(m, route, ranks[route.source]) for route in incoming[chunk] if route.returns)
