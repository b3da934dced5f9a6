"""The exchange of figures at the end of a step: sums over all, and figures of each, in one all-reduce."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiledseg.comm.axes import Axes
from tiledseg.comm.collectives import Communicator


class StepSums(NamedTuple):
    """The sums over all ranks: losses and their weights, ranks asked to stop, seconds waited for samples and for
    messages, halos and tensors sent between stages, valid pixels, and numbers of the summed gradient."""

    loss: float
    weight: float
    stops: float
    data_seconds: float
    communication_seconds: float
    halo_bytes: float
    halo_messages: float
    stage_bytes: float = 0.0
    stage_messages: float = 0.0
    pixels: float = 0.0
    gradient: float = 0.0


class RankFigures(NamedTuple):
    """The figures of one rank: its peak memory in bytes, and, in a pipeline, seconds computed and those of all its
    passes."""

    memory_bytes: float
    busy_seconds: float = 0.0
    seconds: float = 0.0


class PipelineResult(NamedTuple):
    """The figures of the stages in a step. `stage_seconds`: computing of each (mean over its ranks). `bubble_share`: of
    the ranks' time, waiting for each other. `bytes`, `messages`: between stages, from all ranks together."""

    stage_seconds: tuple[float, ...]
    bubble_share: float
    bytes: int
    messages: int


def over_ranks(
    sums: StepSums, own: RankFigures, communicator: Communicator
) -> tuple[StepSums, tuple[RankFigures, ...]]:
    """Return the sums over all ranks, and the figures of each, by rank. Collective, of numbers that lie on the host."""
    figures = [(0.0,) * len(own)] * communicator.size
    figures[communicator.rank] = own
    totals = torch.tensor([*sums, *(value for row in figures for value in row)], dtype=torch.float64)
    communicator.all_reduce_sum(totals).wait()
    each = totals[len(sums) :].view(-1, len(own)).tolist()
    return StepSums(*totals[: len(sums)].tolist()), tuple(RankFigures(*row) for row in each)


def pipeline_result(sums: StepSums, each: tuple[RankFigures, ...], axes: Axes) -> PipelineResult | None:
    """Return the figures of the stages; None without stages."""
    shape = axes.shape
    if shape.stages == 1:
        return None
    busy = [figures.busy_seconds for figures in each[: shape.ranks]]
    longest = max(figures.seconds for figures in each)
    holders = shape.ranks // shape.stages
    stage_seconds = tuple(sum(busy[stage :: shape.stages]) / holders for stage in range(shape.stages))
    bubble = 1 - sum(busy) / (shape.ranks * longest) if longest else 0.0
    return PipelineResult(stage_seconds, bubble, int(sums.stage_bytes), int(sums.stage_messages))
