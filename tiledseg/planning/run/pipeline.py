"""The pipeline of a run, decided and checked before any rank starts: balance, messages, time of a step, memory.

Bytes kept for the backward pass follow `walk.cost`. A stage that starts in the middle of the network also keeps the
tensors that it receives, even where the rank before keeps them too. `plan` uses modelled times, a run measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING

from tiledseg.config.words import chunk_ranks
from tiledseg.errors import BudgetError, ConfigError
from tiledseg.geometry.graph import KEEP, Graph, MemoryPolicy
from tiledseg.geometry.memory_policy import homes
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
    Program,
    Route,
    Settings,
    chunk_routes,
    kept_of,
    most_in_flight,
    program,
)
from tiledseg.pipeline.simulation import Timeline, simulate
from tiledseg.planning.run.spread import MicroBatchSize, Parallelism
from tiledseg.planning.walk.cost import ForwardWalk, tile_walk
from tiledseg.planning.walk.cost_model import Machine, Prices
from tiledseg.planning.walk.rank_steps import SentBytes
from tiledseg.planning.walk.step_memory import StepMemory, memory_of, network_walk

if TYPE_CHECKING:
    from tiledseg.planning.walk.choice import MemoryChoice

_SAMPLE = 24  # micro-batches that are simulated to compare balances
MessageTime = Callable[[int], float]  # bytes -> time of one message


@dataclass(frozen=True)
class StageMemory(StepMemory):
    """Bytes of a stage on one micro-batch. `inputs`: tensors that it received, all that a recomputed one keeps."""

    inputs: int

    def kept(self, complete: int, inputs_only: int = 0) -> int:
        """Return the bytes of so many micro-batches with all their activations, and so many with their inputs only."""
        return complete * self.activations + inputs_only * self.inputs

    def needed(self, complete: int, inputs_only: int = 0) -> int:
        """Return all bytes, with so many micro-batches kept at once."""
        return self.total - self.activations + self.kept(complete, inputs_only)


class StagePrices:
    """Memory and messages of runs of nodes (first, stop), half-open, on one micro-batch."""

    def __init__(self, forward: ForwardWalk) -> None:
        self.forward, self.graph, self.costs = forward, forward.graph, forward.costs
        self.memory = cache(self._memory)

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Each edge that passes over nodes: the node that makes the tensor, and the one that reads it."""
        return tuple((tensor - 1, reader) for tensor, reader in self.graph.skips)

    def _memory(self, first: int, stop: int) -> StageMemory:
        """Return the memory of a rank that holds the run; the loss belongs to the last layer."""
        inputs = self.received(first, stop) if first else self.tensor_bytes(0)
        return StageMemory(**vars(memory_of(self.forward, (first, stop))), inputs=inputs)

    def tensor_bytes(self, tensor: int) -> int:
        """Return the bytes of a tensor of the graph, whole: its reader crops it."""
        return self.costs[tensor - 1].output_bytes if tensor else self.forward.input_bytes

    def received(self, first: int, stop: int) -> int:
        """Return the bytes that the run receives in a forward pass."""
        return sum(map(self.tensor_bytes, self.graph.entering(first, stop))) if first else 0


stage_prices = lru_cache(maxsize=32)(StagePrices)  # shared by all pipelines on micro-batches of one size


@dataclass(frozen=True)
class PipelineCase:
    """The settings of a pipeline, and the costs of its layers.

    `modes`: recomputation, one a stage. `micro_batches`: between two flushes. `forward`, `backward`: times of each
    layer, in any unit; `message` in the same (None: messages take no time). `limit`: bytes that a stage may need.
    """

    schedule: str
    modes: tuple[str, ...]
    micro_batches: int
    prices: StagePrices
    forward: Sequence[float]
    backward: Sequence[float]
    message: MessageTime | None
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
            return self.prices.memory(first, stop).needed(*kept)

        return memory

    def rank_bytes(self, balance: Sequence[int]) -> list[int]:
        memory, needed = self.memory(), [0] * self.stages
        for chunk, (first, stop) in enumerate(cuts(balance)):
            needed[self.ranks[chunk]] += memory(first, stop, chunk)
        return needed

    @property
    def alone(self) -> float:
        """Time of a step on one rank, where nothing is recomputed or sent."""
        return self.micro_batches * (sum(self.forward) + sum(self.backward))


@dataclass(frozen=True)
class StagedPipeline:
    """A pipeline with its balance; `times` of its chunks, in which recomputation is part of the backward pass."""

    case: PipelineCase
    balance: tuple[int, ...]
    pipeline: ChunkMap
    times: ChunkTimes

    @cached_property
    def actions(self) -> Program:
        return program(self.case.schedule, self.pipeline, self.case.micro_batches, self.times)

    def route_bytes(self, route: Route) -> int:
        """Return the bytes that travel along a route, one way, for one micro-batch."""
        return 0 if self.pipeline.is_local(route) else self.case.prices.tensor_bytes(route.tensor)

    def timeline(self, transfers: bool = True) -> Timeline:
        """Simulate a step; without `transfers` messages take no time."""
        message = self.case.message if transfers else None
        seconds = {r: message(self.route_bytes(r)) if message else 0.0 for r in self.pipeline.routes}
        return simulate(self.actions, self.times.forward, self.times.backward, seconds.__getitem__)


def stage(case: PipelineCase, balance: tuple[int, ...]) -> StagedPipeline:
    """Return the pipeline of a balance that fits (see `balance.parse_balance`)."""
    runs, prices = cuts(balance), case.prices
    forward = [sum(case.forward[first:stop]) for first, stop in runs]
    backward = [sum(case.backward[first:stop]) for first, stop in runs]
    for chunk, rank in enumerate(case.ranks):
        backward[chunk] += forward[chunk] * case.recomputes(rank)
    sending = [case.message(prices.tensor_bytes(first)) for first, _ in runs[1:]] if case.message else ()
    chunks = ChunkMap(case.ranks, chunk_routes(prices.graph, runs))
    return StagedPipeline(case, balance, chunks, ChunkTimes(forward, backward, sending))


def choose(case: PipelineCase) -> StagedPipeline:
    """Return the pipeline with the automatic balance: the shortest simulated step of several candidates. They are the
    balance whose slowest stage is fastest, and somewhat slower ones that send fewer bytes. Raises ConfigError where
    none fits the network or the limit."""
    tolerances = TOLERANCES if case.message else TOLERANCES[:1]  # the fastest alone, where messages take no time
    both = [f + b for f, b in zip(case.forward, case.backward, strict=True)]
    recomputing = frozenset(chunk for chunk, rank in enumerate(case.ranks) if case.recomputes(rank))

    def traffic(first: int, stop: int) -> int:
        """Return the bytes that a run receives; skips of a folded pipeline stay on their rank."""
        return case.prices.tensor_bytes(first) * bool(first) if case.folds else case.prices.received(first, stop)

    prices = BalancePrices(both, case.memory(), case.limit, traffic, case.forward, recomputing)
    if case.folds:
        balances = choose_folded_balances(prices, case.prices.skips, case.stages, tolerances)
    else:
        balances = choose_balances(prices, len(case.ranks), tolerances)
    sample = replace(case, micro_batches=min(case.micro_batches, _SAMPLE))
    return stage(case, min(dict.fromkeys(balances), key=lambda balance: stage(sample, balance).timeline().makespan))


def torn_skips(case: PipelineCase, balance: Sequence[int]) -> list[str]:
    """Return, in words, the skips of a folded pipeline that would leave their rank, as other schedules' skips may."""
    if not case.folds:
        return []
    stages = [case.ranks[chunk] for chunk, count in enumerate(balance) for _ in range(count)]
    names = case.prices.graph.names
    ends = [(names[maker + 1], stages[max(maker, 0)], stages[taker]) for maker, taker in case.prices.skips]
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
    graph = case.prices.graph
    tensors, inside = [KEEP] * len(graph.names), [KEEP] * len(graph)
    for chunk, (first, stop) in enumerate(runs):
        rank, own = case.ranks[chunk], case.prices.memory(first, stop)
        complete, inputs = kept_of(case.schedule, held[chunk], case.modes[rank])
        fixed = own.weights + own.gradients + own.optimizer + inputs * own.inputs
        step = StepChoices(network_walk(case.prices.forward, run=(first, stop)), fixed, max(1, complete))
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
    place = homes(graph)
    chunk_of = [chunk for chunk, (first, stop) in enumerate(runs) for _ in range(first, stop)]
    crossing = {place[k + 1] for k in range(len(graph)) if chunk_of[k] != chunk_of[max(0, place[k + 1] - 1)]}
    policy = MemoryPolicy(tuple(KEEP if home in crossing else tensors[home] for home in place), tuple(inside))
    items = tuple(pair for each in chosen for pair in each.items)
    return MemoryChoice(policy, max(needed), max(totals), items, max(each.extra for each in chosen))


_PERCENTS = 110, 130, 160, 200, 300, 500  # of the memory that a balance may need before tensors are recomputed


@dataclass(frozen=True)
class PipelinePlan(Settings):
    """The settings of a pipeline, and the micro-batches between two flushes (None: all of a step).

    `seconds`: of the passes of a step with the most micro-batches, replayed with the times that were measured.
    `memory`: bytes of the stage that needs most, where tensors are kept.
    """

    micro_batches: int | None = None
    seconds: float | None = None
    memory: int = 0

    @property
    def in_words(self) -> str:
        """The settings as a line of the log."""
        again = "" if set(self.recompute) == {"never"} else f", recompute {'/'.join(self.recompute)}"
        stages = len(self.recompute)
        return f"{stages} stages, balance [{','.join(map(str, self.balance))}], {self.schedule}{again}"


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds of each layer for the largest micro-batch, forward and backward, and of a message of so many bytes.

    `takes_turns`: ranks a core, where they are more.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    message: MessageTime
    takes_turns: float = 1.0


def modelled(machine: Machine, graph: Graph, bands: int, largest: MicroBatchSize, ranks: int) -> MeasuredTimes:
    """Predict the times by the profile of a machine, of which `ranks` are at work."""
    prices = Prices(graph, bands, largest.value_bytes, machine, ranks)
    forward, backward = zip(*prices.nodes(largest.pixels), strict=True)  # while others wait, a rank has its core alone
    turns = machine.taking_turns(ranks)
    return MeasuredTimes(forward, backward, lambda size: machine.message_seconds(SentBytes(1, size), ranks), turns)


def plan_pipeline(
    parallel: Parallelism,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    memory_bytes: int | None,
    measured: MeasuredTimes | None = None,
) -> PipelinePlan:
    """Plan the pipeline that `parallel` sets, of several stages.

    `memory_bytes`: of a rank for a training step (None: nothing is trained). Raises ConfigError as `balanced_pipeline`,
    and where a stage needs more than that.
    """
    staged = balanced_pipeline(parallel, graph, bands, largest, memory_bytes, measured)
    if parallel.balance is not None and memory_bytes is not None:
        needed = staged.case.rank_bytes(staged.balance)
        rank = next((rank for rank, size in enumerate(needed) if size > memory_bytes), None)
        if rank is not None:
            raise BudgetError(
                f"stage {rank} of parallel.balance [{','.join(map(str, staged.balance))}] needs about "
                f"{needed[rank] / 2**30:.2f} GiB, but {memory_bytes / 2**30:.2f} GiB are free; move layers to "
                "other stages, use more stages, a finer tiling.grid, parallel.recompute always, or balance auto"
            )
    return _pipeline_plan(parallel, staged, largest, measured)


def _pipeline_plan(
    parallel: Parallelism, staged: StagedPipeline, largest: MicroBatchSize, measured: MeasuredTimes | None
) -> PipelinePlan:
    """Return the plan of a balance. Its seconds are those of all flushes of a step: simulated ones, or the busy time of
    cores that ranks share, where that is longer."""
    case, seconds = staged.case, None
    if measured:
        busy = measured.takes_turns * case.alone / case.stages
        seconds = -(-largest.count // case.micro_batches) * max(staged.timeline().makespan, busy)
    memory = max(case.rank_bytes(staged.balance))
    return PipelinePlan(
        case.schedule, staged.balance, case.modes, staged.times, parallel.micro_batches, seconds, memory
    )


def rebuilt_pipeline(
    parallel: Parallelism,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    memory_bytes: int,
    measured: MeasuredTimes | None,
) -> tuple[PipelinePlan, MemoryChoice] | None:
    """Plan a pipeline whose stages fit the memory by recomputing tensors, and return their choice too. Balances for
    more and more memory are tried, and the first one that fits is taken; None where there is none."""
    for percent in _PERCENTS:
        try:
            staged = balanced_pipeline(parallel, graph, bands, largest, memory_bytes * percent // 100, measured)
        except ConfigError:
            continue
        choice = choose_stages(staged.case, staged.balance, memory_bytes)
        if choice is not None:
            return _pipeline_plan(parallel, staged, largest, measured), choice
        if parallel.balance is not None:
            break
    return None


def balanced_pipeline(
    parallel: Parallelism,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    memory_bytes: int | None,
    measured: MeasuredTimes | None,
    name: str = "parallel.balance",
) -> StagedPipeline:
    """Return the pipeline with the balance that the user gave by this `name`, or an automatic one within the memory.

    `measured`: times of each layer and of messages, for `balance: auto` (None: multiply-adds, a backward pass for two
    forward where all is trained, and messages that take no time). Raises ConfigError where the balance does not fit the
    network or the schedule, or none fits the memory.
    """
    prices = stage_prices(tile_walk(graph, bands, largest.pixels, largest.value_bytes))
    forward = measured.forward if measured else [cost.multiply_adds for cost in prices.costs]
    backward = measured.backward if measured else [cost.passes * cost.multiply_adds for cost in prices.costs]
    case = PipelineCase(
        parallel.schedule,
        parallel.recompute,
        max(1, min(parallel.micro_batches or largest.count, largest.count)),
        prices,
        forward,
        backward,
        measured.message if measured else None,
        memory_bytes,
    )
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
