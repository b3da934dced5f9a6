"""Schedules: in which order each rank of a pipeline computes, sends and receives. Plain values, nothing is run.

Symbols: n ranks (stages), m a micro-batch, M their number. A chunk is a run of layers; `gpipe` and `1f1b` put chunk i
on rank i, `folded` puts chunks r and 2n - 2 - r on rank r, the encoder's part and its mirror in the decoder.

    gpipe   all forwards, then all backwards, last one first (Huang et al., 2019): M micro-batches in flight
    1f1b    n - 1 - i forwards, then a forward and a backward in turn (Narayanan et al., 2019): at most n - i in flight
    folded  in an order made for the chunks' times (see `folding`): at most 2n - 1 - c in flight at chunk c

Sends are meant as non-blocking and receives as waiting: a receive stands right in front of what needs it, a send right
behind what made it. A skip goes straight from the chunk that stashes it to the chunk that pops it, its gradient
straight back. Nothing is sent between chunks of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiledseg.errors import ConfigError
from tiledseg.pipeline import folding
from tiledseg.pipeline.folding import ChunkTimes

SCHEDULES = ("1f1b", "gpipe", "folded")
RECOMPUTE = ("never", "except_last", "always")  # of which micro-batches a stage keeps inputs only (see `kept_of`)


@dataclass(frozen=True, order=True)
class Route:
    """A tensor that chunk `source` makes for chunk `target` in each micro-batch; without `skip`, the activation."""

    source: int
    target: int
    skip: str = ""


@dataclass(frozen=True)
class Pipeline:
    """The rank of each chunk, and the skips between chunks, one route for each chunk that pops."""

    ranks: tuple[int, ...]
    skips: tuple[Route, ...] = ()

    @property
    def size(self) -> int:
        return max(self.ranks) + 1

    @property
    def routes(self) -> tuple[Route, ...]:
        """Activations from chunk to chunk, then the skips between different chunks."""
        chain = (Route(chunk, chunk + 1) for chunk in range(len(self.ranks) - 1))
        return (*chain, *(skip for skip in self.skips if skip.source != skip.target))

    def is_local(self, route: Route) -> bool:
        return self.ranks[route.source] == self.ranks[route.target]


@dataclass(frozen=True)
class Forward:
    """The forward pass of a chunk."""

    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class Backward:
    """The backward pass of a chunk; behind it nothing of the micro-batch is kept."""

    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class Message:
    """One end of a transfer along `route`; `peer` is the other end's rank. Gradients travel from target to source."""

    micro_batch: int
    route: Route
    peer: int


class SendActivation(Message):
    """The output or the skip of `route.source`, on its way to `peer`."""


class ReceiveActivation(Message):
    """The input or the skip that `route.target` needs, from `peer`."""


class SendGradient(Message):
    """The gradient of what came along `route`, on its way back to `peer`."""


class ReceiveGradient(Message):
    """The gradient of what went along `route`, from `peer`."""


Compute = Forward | Backward
Action = Forward | Backward | Message
Program = tuple[tuple[Action, ...], ...]  # the actions of each rank, in order


def chunk_ranks(schedule: str, stages: int) -> tuple[int, ...]:
    """The rank of each chunk. Raises ConfigError for an unknown schedule, or fewer than 1 stage."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"the schedule is '{schedule}'; give one of {', '.join(SCHEDULES)}")
    if stages < 1:
        raise ConfigError(f"the pipeline has {stages} stages; give at least 1")
    down = tuple(range(stages))
    return down + down[-2::-1] if schedule == "folded" else down


def most_in_flight(schedule: str, stages: int, micro_batches: int) -> tuple[int, ...]:
    """The most micro-batches that each chunk may hold at once, whatever the chunks' times."""
    chunks = len(chunk_ranks(schedule, stages))
    if schedule == "gpipe":
        return (micro_batches,) * chunks
    return tuple(min(chunks - chunk, micro_batches) for chunk in range(chunks))


def kept_of(schedule: str, in_flight: int, recompute: str) -> tuple[int, int]:
    """Of the micro-batches that a chunk holds at once: how many with all activations at most, how many inputs only.

    With recomputation one has its activations while it goes backward. `except_last` keeps those of the last micro-batch
    too, which goes backward first in gpipe (Huang et al., 2019), and last otherwise.
    """
    if recompute == "never":
        return in_flight, 0
    complete = min(in_flight, 2 if recompute == "except_last" and schedule != "gpipe" else 1)
    return complete, in_flight - complete


def chunk_skips(skips: Sequence[tuple[str, int, int]], cuts: Sequence[tuple[int, int]]) -> tuple[Route, ...]:
    """Routes of skips (name, stashing layer, popping layer) between chunks of layers (first, stop)."""

    def chunk(layer: int) -> int:
        return next(c for c, (first, stop) in enumerate(cuts) if first <= layer < stop)

    return tuple(sorted({Route(chunk(stash), chunk(pop), name) for name, stash, pop in skips}))


def program(schedule: str, pipeline: Pipeline, micro_batches: int, times: ChunkTimes | None = None) -> Program:
    """The actions of every rank for one step; `times` as for `compute_orders`.

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


def compute_orders(
    schedule: str, stages: int, micro_batches: int, times: ChunkTimes | None = None
) -> list[list[Compute]]:
    """What each rank computes, in order; it depends on no skips.

    `times`: the same on all ranks. Folded orders are made for them; without them, for ranks of equal work. The other
    schedules have one order for all times.
    """
    if schedule == "gpipe":
        return [list(_fill_drain(stage, micro_batches)) for stage in range(stages)]
    if schedule == "1f1b":
        return [list(_one_forward_one_backward(stage, stages, micro_batches)) for stage in range(stages)]
    return _folded(stages, micro_batches, times)


def _fill_drain(stage: int, micro_batches: int) -> Iterator[Compute]:
    for m in range(micro_batches):
        yield Forward(m, stage)
    for m in reversed(range(micro_batches)):
        yield Backward(m, stage)


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Compute]:
    ahead = min(stages - 1 - stage, micro_batches)
    for m in range(ahead):
        yield Forward(m, stage)
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield Forward(m + ahead, stage)
        yield Backward(m, stage)


def _folded(stages: int, micro_batches: int, times: ChunkTimes | None) -> list[list[Compute]]:
    ranks = chunk_ranks("folded", stages)
    chunks = len(ranks)
    passes = folding.periodic(ranks, micro_batches) if times is None else folding.fastest(ranks, micro_batches, times)
    return [
        [(Forward if number < chunks else Backward)(m, folding.chunk_of(number, chunks)) for number, m in rank]
        for rank in passes
    ]


def with_messages(order: Sequence[Compute], pipeline: Pipeline) -> Iterator[Action]:
    """Each computation between its receives and its sends."""
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
            yield from (ReceiveGradient(m, route, ranks[route.target]) for route in outgoing[chunk])
            yield action
            yield from (SendGradient(m, route, ranks[route.source]) for route in incoming[chunk])
