"""The pipeline of a run, decided and checked before any rank starts: balance, messages, time of a step, memory.

Bytes kept for the backward pass follow `walk.cost`. A stage that starts in the middle of the network also keeps the
tensors that it receives, even where the rank before keeps them too. Times are those of a machine's profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING

from tiledseg.config.words import chunk_ranks
from tiledseg.errors import BudgetError, ConfigError
from tiledseg.geometry.graph import KEEP, Graph, MemoryPolicy
from tiledseg.pipeline.balance import (
    TOLERANCES,
    BalancePrices,
    choose_balances,
    choose_folded_balances,
    cuts,
    parse_balance,
)
from tiledseg.pipeline.schedule import (
    ChunkMap,
    ChunkTimes,
    Orders,
    Route,
    Settings,
    compute_orders,
    cut_network,
    kept_of,
    most_in_flight,
)
from tiledseg.pipeline.simulation import Timeline, simulate
from tiledseg.planning.run.spread import MicroBatchSize, Parallelism
from tiledseg.planning.walk.cost import ForwardWalk, tile_walk
from tiledseg.planning.walk.cost_model import Machine, Prices
from tiledseg.planning.walk.step_memory import StepMemory, memory_of, network_walk

if TYPE_CHECKING:
    from tiledseg.planning.walk.choice import MemoryChoice

_SAMPLE = 24  # micro-batches that are simulated to compare balances
MessageTime = Callable[[int], float]  # bytes -> time of one message


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer for the largest micro-batch, forward and backward, and of a message of so many bytes.
    `takes_turns`: ranks a core, where they are more."""

    forward: Sequence[float]
    backward: Sequence[float]
    message: MessageTime
    takes_turns: float = 1.0


@lru_cache(maxsize=32)
def stage_memory(walk: ForwardWalk) -> Callable[[int, int], StepMemory]:
    """Return a function from a run of nodes (first, stop), half-open, to its memory on one micro-batch. All pipelines
    on micro-batches of one size share its cache."""
    return cache(lambda first, stop: memory_of(walk, (first, stop)))


@dataclass(frozen=True)
class PipelineCase:
    """The settings of a pipeline, and the costs of its layers.

    `walk`: of one micro-batch. `modes`: recomputation, one a stage. `micro_batches`: between two flushes. `limit`:
    bytes that a stage may need.
    """

    schedule: str
    modes: tuple[str, ...]
    micro_batches: int
    walk: ForwardWalk
    times: LayerTimes
    limit: int | None

    @property
    def stages(self) -> int:
        return len(self.modes)

    @property
    def ranks(self) -> tuple[int, ...]:
        return chunk_ranks(self.schedule, self.stages)

    @property
    def folds(self) -> bool:
        """True if ranks hold a part of the way down and its mirror on the way up, and skips have to stay on them."""
        return len(self.ranks) > self.stages and self.ranks == self.ranks[::-1]

    def recomputes(self, rank: int) -> bool:
        """Return True if a stage goes forward twice; `except_last` counts as `always` with several micro-batches."""
        return self.modes[rank] == "always" or (self.modes[rank] == "except_last" and self.micro_batches > 1)

    def memory(self) -> Callable[[int, int, int], int]:
        """Return a function from (first, stop, chunk) to the bytes of these layers with micro-batches in flight."""
        held = most_in_flight(self.schedule, self.stages, self.micro_batches)

        @cache
        def memory(first: int, stop: int, chunk: int) -> int:
            kept = kept_of(self.schedule, held[chunk], self.modes[self.ranks[chunk]])
            return stage_memory(self.walk)(first, stop).needed(*kept)

        return memory

    def rank_bytes(self, balance: Sequence[int]) -> list[int]:
        memory, needed = self.memory(), [0] * self.stages
        for chunk, (first, stop) in enumerate(cuts(balance)):
            needed[self.ranks[chunk]] += memory(first, stop, chunk)
        return needed

    @property
    def alone(self) -> float:
        """Time of a step on one rank, where nothing is recomputed or sent."""
        return self.micro_batches * (sum(self.times.forward) + sum(self.times.backward))


@dataclass(frozen=True)
class StagedPipeline:
    """A pipeline with its balance; `times` of its chunks, in which recomputation is part of the backward pass."""

    case: PipelineCase
    balance: tuple[int, ...]
    pipeline: ChunkMap
    times: ChunkTimes

    @cached_property
    def orders(self) -> Orders:
        return compute_orders(self.case.schedule, self.case.stages, self.case.micro_batches, self.times)

    def route_bytes(self, route: Route) -> int:
        """Return the bytes that travel along a route, one way, for one micro-batch."""
        return 0 if self.pipeline.is_local(route) else self.case.walk.tensor_bytes(route.tensor)

    def timeline(self, transfers: bool = True) -> Timeline:
        """Simulate a step; without `transfers` messages take no time."""
        message = self.case.times.message
        seconds = {r: message(self.route_bytes(r)) if transfers else 0.0 for r in self.pipeline.routes}
        return simulate(self.orders, self.pipeline, self.times.forward, self.times.backward, seconds.__getitem__)


def stage(case: PipelineCase, balance: tuple[int, ...]) -> StagedPipeline:
    """Return the pipeline of a balance that fits (see `balance.parse_balance`)."""
    runs, times = cuts(balance), case.times
    forward = [sum(times.forward[first:stop]) for first, stop in runs]
    backward = [sum(times.backward[first:stop]) for first, stop in runs]
    for chunk, rank in enumerate(case.ranks):
        backward[chunk] += forward[chunk] * case.recomputes(rank)
    sending = [times.message(case.walk.tensor_bytes(first)) for first, _ in runs[1:]]
    chunks = cut_network(case.walk.graph, balance, case.ranks)
    return StagedPipeline(case, balance, chunks, ChunkTimes(forward, backward, sending))


def choose(case: PipelineCase) -> StagedPipeline:
    """Return the pipeline with the automatic balance: the shortest simulated step of several candidates. They are the
    balance whose slowest stage is fastest, and somewhat slower ones that send fewer bytes. Raises ConfigError where
    none fits the network or the limit."""
    times = case.times
    both = [f + b for f, b in zip(times.forward, times.backward, strict=True)]
    recomputing = frozenset(chunk for chunk, rank in enumerate(case.ranks) if case.recomputes(rank))

    def traffic(first: int, stop: int) -> int:
        """Return the bytes that a run receives; skips of a folded pipeline stay on their rank."""
        return case.walk.tensor_bytes(first) * bool(first) if case.folds else case.walk.received(first, stop)

    prices = BalancePrices(both, case.memory(), case.limit, traffic, times.forward, recomputing)
    if case.folds:
        skips = [(tensor - 1, reader) for tensor, reader in case.walk.graph.skips]
        balances = choose_folded_balances(prices, skips, case.stages, TOLERANCES)
    else:
        balances = choose_balances(prices, len(case.ranks), TOLERANCES)
    sample = replace(case, micro_batches=min(case.micro_batches, _SAMPLE))
    return stage(case, min(dict.fromkeys(balances), key=lambda balance: stage(sample, balance).timeline().makespan))


def torn_skips(case: PipelineCase, balance: Sequence[int]) -> list[str]:
    """Return, in words, the skips of a folded pipeline that would leave their rank, as other schedules' skips may."""
    if not case.folds:
        return []
    stages = [case.ranks[chunk] for chunk, count in enumerate(balance) for _ in range(count)]
    names, skips = case.walk.graph.names, case.walk.graph.skips
    ends = [(names[tensor], stages[max(tensor - 1, 0)], stages[reader]) for tensor, reader in skips]
    return [f"{name} from stage {source} to {target}" for name, source, target in ends if source != target]


def choose_stages(case: PipelineCase, balance: Sequence[int], budget: int) -> MemoryChoice | None:
    """Return one choice for all stages of a balance, each rank of at most `budget` bytes; None where a stage has none.
    The chunks of a rank share its budget in proportion to what they need. A chunk's fixed bytes include the inputs of
    micro-batches that are recomputed whole. A tensor has the word of the chunk that makes it, and is kept where it
    crosses chunks. The extra time is that of the stage with the most."""
    from tiledseg.planning.walk.choice import MemoryChoice, StepChoices

    runs, needed, memory = cuts(balance), case.rank_bytes(balance), case.memory()
    held = most_in_flight(case.schedule, case.stages, case.micro_batches)
    chosen, totals = list[MemoryChoice](), [0] * case.stages
    graph = case.walk.graph
    tensors, inside = [KEEP] * len(graph.names), [KEEP] * len(graph)
    for chunk, (first, stop) in enumerate(runs):
        rank, own = case.ranks[chunk], stage_memory(case.walk)(first, stop)
        complete, inputs = kept_of(case.schedule, held[chunk], case.modes[rank])
        fixed = own.weights + own.gradients + own.optimizer + inputs * own.inputs
        step = StepChoices(network_walk(case.walk, run=(first, stop)), fixed, max(1, complete))
        fits = needed[rank] <= budget
        choice = step.choose(step.kept if fits else memory(first, stop, chunk) * budget // needed[rank])
        if choice is None:
            return None
        chosen.append(choice)
        totals[rank] += choice.peak
        inside[first:stop] = choice.policy.inside[first:stop]
        tensors[first + 1 : stop + 1] = choice.policy.tensors[first + 1 : stop + 1]
    if max(totals) > budget:
        return None
    place = graph.homes
    chunk_of = [chunk for chunk, (first, stop) in enumerate(runs) for _ in range(first, stop)]
    crossing = {place[k + 1] for k in range(len(graph)) if chunk_of[k] != chunk_of[max(0, place[k + 1] - 1)]}
    policy = MemoryPolicy(tuple(KEEP if home in crossing else tensors[home] for home in place), tuple(inside))
    items = tuple(pair for each in chosen for pair in each.items)
    return MemoryChoice(policy, max(needed), max(totals), items, max(each.extra for each in chosen))


_PERCENTS = 100, 110, 130, 160, 200, 300, 500  # of the memory that a balance may need before tensors are recomputed


@dataclass(frozen=True)
class PipelinePlan(Settings):
    """The settings of a pipeline, and the micro-batches between two flushes (None: all of a step).

    `seconds`: of the passes of a step with the most micro-batches, replayed with the times of its layers.
    `memory`: bytes of the stage that needs most, where tensors are kept. `rebuilt`: the tensors that are recomputed so
    that all stages fit, None where that is not needed.
    """

    micro_batches: int | None = None
    seconds: float = 0.0
    memory: int = 0
    rebuilt: MemoryChoice | None = None

    @property
    def in_words(self) -> str:
        """The settings as a line of the log."""
        again = "" if set(self.recompute) == {"never"} else f", recompute {'/'.join(self.recompute)}"
        stages = len(self.recompute)
        return f"{stages} stages, balance [{','.join(map(str, self.balance))}], {self.schedule}{again}"


def layer_times(machine: Machine, graph: Graph, bands: int, largest: MicroBatchSize, ranks: int) -> LayerTimes:
    """Predict the times by the profile of a machine, of which `ranks` are at work."""
    prices = Prices(graph, bands, largest.value_bytes, machine, ranks)
    forward, backward = zip(*prices.nodes(largest.pixels), strict=True)  # while others wait, a rank has its core alone
    turns = machine.taking_turns(ranks)
    return LayerTimes(forward, backward, lambda size: machine.message_seconds([size], ranks), turns)


def plan_pipeline(
    parallel: Parallelism,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    memory_bytes: int | None,
    times: LayerTimes | None = None,
    rebuilds: bool = False,
) -> PipelinePlan:
    """Plan the pipeline that `parallel` sets, of several stages. Its seconds are those of all flushes of a step:
    simulated ones, or the busy time of cores that ranks share, where that is longer.

    `memory_bytes`: of a rank for a training step (None: nothing is trained). `rebuilds`: where no balance fits it,
    balances for more and more memory are tried, and the first is taken whose stages fit by recomputing tensors. Raises
    ConfigError as `balanced_pipeline`, and where a stage needs more than the memory.
    """
    refused: ConfigError | None = None
    for percent in _PERCENTS if rebuilds else _PERCENTS[:1]:
        limit = None if memory_bytes is None else memory_bytes * percent // 100
        try:
            staged = balanced_pipeline(parallel, graph, bands, largest, limit, times)
        except ConfigError as error:
            refused = refused or error
            continue
        case, choice = staged.case, None
        needed = case.rank_bytes(staged.balance)
        if memory_bytes is not None and max(needed) > memory_bytes:
            choice = choose_stages(case, staged.balance, memory_bytes) if rebuilds else None
            if choice is None and parallel.balance is None:
                continue
            if choice is None:
                rank = next(rank for rank, size in enumerate(needed) if size > memory_bytes)
                raise BudgetError(
                    f"stage {rank} of parallel.balance [{','.join(map(str, staged.balance))}] needs about "
                    f"{needed[rank] / 2**30:.2f} GiB, but {memory_bytes / 2**30:.2f} GiB are free; move layers to "
                    "other stages, use more stages, a finer tiling.grid, parallel.recompute always, or balance auto"
                )
        busy = case.times.takes_turns * case.alone / case.stages
        seconds = -(-largest.count // case.micro_batches) * max(staged.timeline().makespan, busy)
        settings = case.schedule, staged.balance, case.modes, staged.times, parallel.micro_batches
        return PipelinePlan(*settings, seconds, max(needed), choice)
    assert refused is not None, "the first balance fits, or is refused"
    raise refused


def balanced_pipeline(
    parallel: Parallelism,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    memory_bytes: int | None,
    times: LayerTimes | None,
    name: str = "parallel.balance",
) -> StagedPipeline:
    """Return the pipeline with the balance that the user gave by this `name`, or an automatic one within the memory.

    `times`: of each layer and of messages, for `balance: auto` (None: those of an assumed machine). Raises ConfigError
    where the balance does not fit the network or the schedule, or none fits the memory.
    """
    walk = tile_walk(graph, bands, largest.pixels, largest.value_bytes)
    times = times or layer_times(Machine(), graph, bands, largest, parallel.stages)
    micro_batches = max(1, min(parallel.micro_batches or largest.count, largest.count))
    case = PipelineCase(parallel.schedule, parallel.recompute, micro_batches, walk, times, memory_bytes)
    if parallel.balance is None:
        return choose(case)
    balance = parse_balance(parallel.balance, len(graph))
    torn = torn_skips(case, balance)
    if torn:
        raise ConfigError(
            f"the schedule {case.schedule} keeps skips on their rank, but {name} [{','.join(map(str, balance))}] sends "
            f"{', '.join(torn)}; move the cuts, or give auto"
        )
    return stage(case, balance)
