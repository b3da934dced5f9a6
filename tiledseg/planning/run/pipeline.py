"""The pipeline of a run, decided and checked before any rank starts: balance, schedule, recomputation, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiledseg.errors import BudgetError, ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import is_legal_size
from tiledseg.geometry.sharing.decomposition import MeshShape, decompose
from tiledseg.geometry.sharing.layer_windows import layer_blocks
from tiledseg.geometry.tiling import Tiling
from tiledseg.pipeline.schedule import Settings
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.run.spread import Parallelism, Spread
from tiledseg.planning.step.cost import tile_walk
from tiledseg.planning.step.rank_steps import SentBytes

if TYPE_CHECKING:  # most runs do without
    from tiledseg.planning.memory.choice import MemoryChoice
    from tiledseg.planning.staged_pipeline import MessageTime, StagedPipeline

_OVER = 110, 130, 160, 200, 300, 500  # per cent of the memory that a balance may need before tensors are recomputed


@dataclass(frozen=True)
class PipelinePlan(Settings):
    """The settings of a pipeline, and the micro-batches between two flushes (None: all of a step).

    `seconds`: of the passes of a step with the most micro-batches, replayed with the times that were measured.
    """

    micro_batches: int | None = None
    seconds: float | None = None

    @property
    def in_words(self) -> str:
        """The settings as a line of the log."""
        again = "" if set(self.recompute) == {"never"} else f", recompute {'/'.join(self.recompute)}"
        stages = len(self.recompute)
        return f"{stages} stages, balance [{','.join(map(str, self.balance))}], {self.schedule}{again}"


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch of a pipeline: its pixels, the most of them in a step of one pipeline, and the bytes of a
    value."""

    pixels: tuple[int, int]
    count: int
    value_bytes: int


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


def micro_batch_size(
    spread: Spread,
    graph: Graph,
    tilings: Sequence[Tiling],
    tiles_per_step: int,
    images_per_step: int,
    value_bytes: int,
) -> MicroBatchSize:
    """Return the largest micro-batch of rasters cut by `tilings`, and how many a pipeline has in a step at most."""
    images = -(-images_per_step // spread.mesh.replicas)
    if spread.shares_layers:
        sizes = []
        for tiling in tilings:
            blocks = layer_blocks(tiling, graph, (spread.mesh.rows, spread.mesh.cols), spread.fusion)
            height, width = (max(block.size for block in cut.blocks) for cut in (blocks.rows, blocks.cols))
            while not is_legal_size(graph, height):  # a block of an unpadded network may be no legal input
                height += 1
            while not is_legal_size(graph, width):
                width += 1
            sizes.append((height, width))
        return MicroBatchSize(max(sizes, key=math.prod), images, value_bytes)
    pixels = max([tiling.context_max for tiling in tilings], key=math.prod)
    if not spread.shares_images:
        return MicroBatchSize(pixels, -(-tiles_per_step // spread.mesh.replicas), value_bytes)
    shape = spread.mesh.rows, spread.mesh.cols
    every = [decompose(tiling, shape).tile_sizes() for tiling in tilings]
    tiles = max(max(map(len, rows)) * max(map(len, cols)) for rows, cols in every)
    return MicroBatchSize(pixels, images * tiles, value_bytes)


def plan_pipeline(
    parallel: Parallelism,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    memory_bytes: int | None,
    measured: MeasuredTimes | None = None,
) -> PipelinePlan | None:
    """Plan the pipeline that `parallel` sets; None for one stage.

    `memory_bytes`: of a rank for a training step (None: nothing is trained). Raises ConfigError as `balanced_pipeline`,
    and where a stage needs more than that.
    """
    if parallel.stages == 1:
        return None
    staged = balanced_pipeline(parallel, graph, bands, largest, memory_bytes, measured)
    if parallel.balance is not None and memory_bytes is not None:
        needed = staged.case.rank_bytes(staged.balance)
        rank = next((rank for rank, size in enumerate(needed) if size > memory_bytes), None)
        if rank is not None:
            raise BudgetError(
                f"stage {rank} of parallel.balance [{','.join(map(str, staged.balance))}] needs about "
                f"{needed[rank] / 2**30:.2f} GiB, but {memory_bytes / 2**30:.2f} GiB are to be had; move layers to "
                "other stages, use more stages, a finer tiling.grid, parallel.recompute always, or balance auto"
            )
    return _planned(parallel, staged, largest, measured)


def _planned(
    parallel: Parallelism, staged: StagedPipeline, largest: MicroBatchSize, measured: MeasuredTimes | None
) -> PipelinePlan:
    """Return the plan of a balance. Its seconds are those of all flushes of a step: as simulated, or as long as cores
    that ranks take turns on are busy."""
    case, seconds = staged.case, None
    if measured:
        busy = measured.takes_turns * case.alone / case.stages
        seconds = -(-largest.count // case.micro_batches) * max(staged.timeline().makespan, busy)
    return PipelinePlan(case.schedule, staged.balance, case.modes, staged.times, parallel.micro_batches, seconds)


def rebuilt_pipeline(
    parallel: Parallelism,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    memory_bytes: int,
    measured: MeasuredTimes | None,
) -> tuple[PipelinePlan, MemoryChoice] | None:
    """Plan a pipeline where no balance fits the memory with everything kept: the first balance for somewhat more memory
    whose stages fit by recomputing tensors, and their choice. Return None where there is none."""
    from tiledseg.planning.staged_pipeline import choose_stages

    for percent in _OVER:
        try:
            memory = memory_bytes * percent // 100
            staged = balanced_pipeline(parallel, graph, bands, largest, memory, measured)
        except ConfigError:
            continue
        choice = choose_stages(staged.case, staged.balance, memory_bytes)
        if choice is not None:
            return _planned(parallel, staged, largest, measured), choice
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
    from tiledseg.pipeline.balance import parse_balance
    from tiledseg.planning.staged_pipeline import PipelineCase, choose, stage, stage_prices, torn_skips

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


def pipeline_bytes(
    parallel: Parallelism, graph: Graph, bands: int, largest: MicroBatchSize, balance: Sequence[int]
) -> int:
    """Return the bytes of a training step on the rank that needs most, of a pipeline with that balance."""
    staged = balanced_pipeline(replace(parallel, balance=tuple(balance)), graph, bands, largest, None, None)
    return max(staged.case.rank_bytes(staged.balance))


def spread_note(mesh: MeshShape, hosts: Sequence[str]) -> str | None:
    """Return a warning where the stages of a pipeline are on several hosts; `hosts` of all ranks, in order."""
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
