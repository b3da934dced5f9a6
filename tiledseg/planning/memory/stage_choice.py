"""The choice of what is kept or recomputed on the stages of a pipeline, so that each rank fits a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiledseg.geometry.graph import KEEP, MemoryPolicy
from tiledseg.geometry.memory_policy import homes
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.schedule import kept_of, most_in_flight
from tiledseg.planning.memory.choice import MemoryChoice, StepChoices
from tiledseg.planning.staged_pipeline import PipelineCase


def choose_stages(case: PipelineCase, balance: Sequence[int], budget: int) -> MemoryChoice | None:
    """Return one choice for all stages of a balance, each rank of at most `budget` bytes; None where a stage has none.
    The chunks of a rank share its budget in proportion to what they need. A chunk's fixed bytes include the inputs of
    micro-batches that are recomputed whole."""
    runs, needed, memory = cuts(balance), case.rank_bytes(balance), case.memory()
    held = most_in_flight(case.schedule, case.stages, case.micro_batches)
    chosen, totals = list[MemoryChoice](), [0] * case.stages
    for chunk, run in enumerate(runs):
        rank, own = case.ranks[chunk], case.prices.memory(*run)
        complete, inputs = kept_of(case.schedule, held[chunk], case.modes[rank])
        fixed = own.weights + own.gradients + own.optimizer + inputs * own.inputs
        step = StepChoices(case.prices.walk(*run), fixed, max(1, complete))
        fits = needed[rank] <= budget
        choice = step.choose(step.kept if fits else memory(*run, chunk) * budget // needed[rank])
        if choice is None:
            return None
        chosen.append(choice)
        totals[rank] += choice.peak
    return None if max(totals) > budget else replace(_joined(case, runs, chosen), kept=max(needed), peak=max(totals))


def _joined(case: PipelineCase, runs: Sequence[tuple[int, int]], chosen: Sequence[MemoryChoice]) -> MemoryChoice:
    """Join the chunks' choices: a tensor has the word of the chunk that makes it, and is kept where it crosses chunks.
    The extra time is that of the stage with the most."""
    graph = case.prices.graph
    tensors, inside = [KEEP] * len(graph.names), [KEEP] * len(graph)
    for (first, stop), each in zip(runs, chosen, strict=True):
        inside[first:stop] = each.policy.inside[first:stop]
        tensors[first + 1 : stop + 1] = each.policy.tensors[first + 1 : stop + 1]
    place = homes(graph)
    chunk_of = [chunk for chunk, (first, stop) in enumerate(runs) for _ in range(first, stop)]
    crossing = {place[k + 1] for k in range(len(graph)) if chunk_of[k] != chunk_of[max(0, place[k + 1] - 1)]}
    policy = MemoryPolicy(tuple(KEEP if home in crossing else tensors[home] for home in place), tuple(inside))
    items = tuple(pair for each in chosen for pair in each.items)
    return MemoryChoice(policy, 0, 0, items, max(each.extra for each in chosen))
