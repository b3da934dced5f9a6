"""The pipeline of a run, decided and checked before any rank starts: balance, schedule, recomputation, memory."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from tiledseg.errors import BudgetError, ConfigError, GeometryError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.receptive_field import output_size
from tiledseg.geometry.sharing.blocks import layer_blocks
from tiledseg.geometry.sharing.decomposition import decompose
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.geometry.tiling import Tiling
from tiledseg.pipeline.schedule import Settings
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.step.cost import backward_passes, tile_walk
from tiledseg.planning.step.halo_traffic import SentBytes

if TYPE_CHECKING:  # what most runs do without
    from tiledseg.planning.memory.choice import MemoryChoice
    from tiledseg.planning.stages.cost import StagePrices
    from tiledseg.planning.stages.staged_pipeline import MessageTime, PipelineCase, StagedPipeline

_OVER = 110, 130, 160, 200, 300, 500  # per cent of the memory that a balance may need before tensors are rebuilt
_TIGHTER = 12  # balances that are tried with less for the stages that have no choice


@dataclass(frozen=True)
class PipelinePlan(Settings):
    """How the pipeline runs, and the micro-batches between two flushes (None: all of a step).

    `seconds`: of the passes of a step with the most micro-batches, replayed with the times that were measured.
    """

    micro_batches: int | None = None
    seconds: float | None = None

    @property
    def in_words(self) -> str:
        """For the user, who may have left the choice to the program."""
        recompute = sorted(set(self.recompute))
        again = "" if recompute == ["never"] else f", recompute {'/'.join(self.recompute)}"
        stages = len(self.recompute)
        return f"{stages} stages, balance [{','.join(map(str, self.balance))}], {self.schedule}{again}"


@dataclass(frozen=True)
class MicroBatchSize:
    """What goes through a pipeline at once at most: its pixels, the most of them in a step of one pipeline, and what a
    value takes."""

    pixels: tuple[int, int]
    count: int
    value_bytes: int


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds of each layer for the largest micro-batch, forward and backward, and of a message of so many bytes.

    `takes_turns`: ranks a core, where they are more; `speaks_alone`: no core is free to carry messages meanwhile.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    message: MessageTime
    takes_turns: float = 1.0
    speaks_alone: bool = False


def modelled(machine: Machine, graph: Graph, bands: int, largest: MicroBatchSize, ranks: int) -> MeasuredTimes:
    """The same by what is known of the machine, of which `ranks` are at work, in place of measured ones."""
    prices = Prices(graph, bands, largest.value_bytes, machine, ranks)
    forward, backward = zip(*prices.nodes(largest.pixels), strict=True)  # while others wait, a rank has its core alone
    turns, alone = machine.taking_turns(ranks), not machine.has_free_core(ranks)
    return MeasuredTimes(forward, backward, lambda size: prices.messages(SentBytes(1, size)), turns, alone)


def micro_batch_size(
    spread: Spread,
    graph: Graph,
    tilings: Sequence[Tiling],
    tiles_per_step: int,
    images_per_step: int,
    value_bytes: int,
) -> MicroBatchSize:
    """The largest micro-batch of rasters cut by `tilings`, and the most of them that a pipeline has in a step."""
    images = -(-images_per_step // spread.mesh.replicas)
    if spread.shares_layers:
        return MicroBatchSize(_largest_block(spread, graph, tilings), images, value_bytes)
    pixels = max((tiling.context_max for tiling in tilings), key=lambda size: size[0] * size[1])
    if not spread.shares_images:
        return MicroBatchSize(pixels, -(-tiles_per_step // spread.mesh.replicas), value_bytes)
    shape = spread.mesh.rows, spread.mesh.cols
    sizes = itertools.chain(*(itertools.product(*decompose(tiling, shape).tile_sizes()) for tiling in tilings))
    tiles = max(len(rows) * len(cols) for rows, cols in sizes)
    return MicroBatchSize(pixels, images * tiles, value_bytes)


def _largest_block(spread: Spread, graph: Graph, tilings: Sequence[Tiling]) -> tuple[int, int]:
    found = []
    for tiling in tilings:
        blocks = layer_blocks(tiling, graph, (spread.mesh.rows, spread.mesh.cols), spread.fusion)
        rows, cols = (max(dim.owned(i).size for i in range(dim.parts)) for dim in (blocks.rows, blocks.cols))
        found.append((_legal(graph, rows), _legal(graph, cols)))
    return max(found, key=lambda size: size[0] * size[1])


def _legal(graph: Graph, side: int) -> int:
    """The first side from `side` on that the network takes by itself: a block of an unpadded one may be none."""
    while True:
        try:
            output_size(graph, side)
        except GeometryError:
            side += 1
        else:
            return side


def plan_pipeline(
    parallel: Parallelism,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    memory_bytes: int | None,
    measured: MeasuredTimes | None = None,
) -> PipelinePlan | None:
    """The pipeline that `parallel` asks for; None for one stage.

    `memory_bytes`: what a rank may use for a training step (None: nothing is trained). Raises ConfigError as
    `balanced_pipeline`, and where a stage needs more than that.
    """
    if parallel.stages == 1:
        return None
    staged = balanced_pipeline(parallel, graph, bands, largest, memory_bytes, measured)
    case = staged.case
    if parallel.balance is not None:
        check_memory(case, staged.balance)
    return _planned(parallel, staged, largest, measured)


def _planned(
    parallel: Parallelism, staged: StagedPipeline, largest: MicroBatchSize, measured: MeasuredTimes | None
) -> PipelinePlan:
    case = staged.case
    flushes = -(-largest.count // case.micro_batches)
    seconds = flushes * _flush_seconds(staged, measured) if measured else None
    return PipelinePlan(case.schedule, staged.balance, case.modes, staged.times, parallel.micro_batches, seconds)


def _flush_seconds(staged: StagedPipeline, measured: MeasuredTimes) -> float:
    """Of the micro-batches between two flushes: as simulated, with messages where the ranks' own cores carry them, or
    as long as cores that ranks take turns on are busy."""
    case = staged.case
    spoken = case.micro_batches * max(staged.messages) if measured.speaks_alone else 0.0
    return max(staged.timeline().makespan, measured.takes_turns * case.alone / case.stages) + spoken


def rebuilt_pipeline(
    parallel: Parallelism,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    memory_bytes: int,
    measured: MeasuredTimes | None,
) -> tuple[PipelinePlan, MemoryChoice] | None:
    """Plan a pipeline where no balance fits the memory with everything kept: a balance that nearly does, and what its
    stages recompute so that they do. Return None where there is none."""
    from tiledseg.planning.memory.stage_choice import choose_stages

    @cache
    def balanced(memory: int) -> StagedPipeline | None:
        try:
            return balanced_pipeline(parallel, graph, bands, largest, memory, measured)
        except ConfigError:
            return None

    limits = [memory_bytes * over // 100 for over in _OVER]
    enough = bisect_left(limits, True, key=lambda memory: balanced(memory) is not None)  # more memory fits too
    for memory in limits[enough:]:
        staged = balanced(memory)
        assert staged is not None, "there is one from `enough` on"
        choice = choose_stages(staged.case, staged.balance, memory_bytes)
        if choice is not None:
            return _planned(parallel, staged, largest, measured), choice
        if parallel.balance is not None:
            return None
    widest = balanced(limits[-1])
    found = _tightened(widest.case, memory_bytes) if widest else None
    return (_planned(parallel, found[0], largest, measured), found[1]) if found else None


def _tightened(case: PipelineCase, memory_bytes: int) -> tuple[StagedPipeline, MemoryChoice] | None:
    """Return a balance and its choice: as long as stages have none, they get fewer bytes than they needed."""
    from tiledseg.planning.memory.stage_choice import choose_stages, stages_without
    from tiledseg.planning.stages.staged_pipeline import choose

    assert case.limit is not None, "a balance within a limit"
    limits = [case.limit] * case.stages
    for _ in range(_TIGHTER):
        try:
            staged = choose(replace(case, limits=tuple(limits)))
        except ConfigError:
            return None
        choice = choose_stages(staged.case, staged.balance, memory_bytes)
        if choice is not None:
            return staged, choice
        needed = case.rank_bytes(staged.balance)
        short = stages_without(case, staged.balance, memory_bytes)
        for stage in short:
            limits[stage] = needed[stage] * 9 // 10
        if not short:
            return None
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
    from tiledseg.pipeline.balance import parse_balance
    from tiledseg.planning.stages.staged_pipeline import PipelineCase, check_skips, choose, stage

    prices = _stage_prices(graph, bands, largest.pixels, largest.value_bytes)
    forward = measured.forward if measured else [cost.multiply_adds for cost in prices.costs]
    backward = measured.backward if measured else [backward_passes(graph, k) * work for k, work in enumerate(forward)]
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
    given = parse_balance(parallel.balance, len(graph))
    check_skips(case, given, name)
    return stage(case, given)


@lru_cache(maxsize=32)
def _stage_prices(graph: Graph, bands: int, pixels: tuple[int, int], value_bytes: int) -> StagePrices:
    """What is worked out for one pipeline serves all others on micro-batches of that size."""
    from tiledseg.planning.stages.cost import StagePrices

    return StagePrices(tile_walk(graph, bands, pixels, value_bytes))


def pipeline_bytes(
    parallel: Parallelism, graph: Graph, bands: int, largest: MicroBatchSize, balance: Sequence[int]
) -> int:
    """Bytes of a training step on the rank that needs most, of a pipeline with that balance."""
    staged = balanced_pipeline(replace(parallel, balance=tuple(balance)), graph, bands, largest, None, None)
    return max(staged.case.rank_bytes(staged.balance))


def check_memory(case: PipelineCase, balance: Sequence[int]) -> None:
    """Raise ConfigError for the first stage whose layers need more than the case's limit, where there is one."""
    if case.limit is None:
        return
    for rank, needed in enumerate(case.rank_bytes(balance)):
        if needed > case.limit:
            raise BudgetError(_too_large(rank, needed, case.limit, balance))


def spread_note(mesh: MeshShape, hosts: Sequence[str]) -> str | None:
    """What the user should know where the stages of a pipeline are on several hosts; `hosts` of all ranks, in order."""
    if mesh.stages == 1:
        return None
    for first in range(0, mesh.ranks, mesh.stages):
        own = [hosts[rank] for rank in mesh.pipeline(first)]
        if len(set(own)) > 1:
            other = next(host for host in own if host != own[0])
            return (
                f"the pipeline of ranks {first} to {first + mesh.stages - 1} is on several hosts ({own[0]}, {other}), "
                f"so its activations go through the network; start a multiple of {mesh.stages} ranks a host, in the "
                "order of hosts"
            )
    return None


def _too_large(rank: int, needed: int, memory: int, balance: Sequence[int]) -> str:
    return (
        f"stage {rank} of parallel.balance [{','.join(map(str, balance))}] needs about {needed / 2**30:.2f} GiB, but "
        f"{memory / 2**30:.2f} GiB are to be had; move layers to other stages, use more stages, a finer tiling.grid, "
        "parallel.recompute always, or balance auto"
    )
