"""`plan --memory-budget`: what a step keeps, recomputes or offloads to fit, and in how many blocks it would."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from tiledseg.errors import GeometryError
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.answer.text import Section, words, wrapped
from tiledseg.planning.run.blocks import BlockPlan, BlockSettings, blocks_of
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.walk.choice import MemoryChoice, step_choices
from tiledseg.planning.walk.cost_model import ASSUMED_STORE, Store, disk_of, store_of
from tiledseg.planning.walk.rank_steps import MOST_VALUES, largest_tensor
from tiledseg.units import size


def rebuilding_part(question: RunQuestion, tiling: Tiling, budget: int) -> Section:
    """Return three ways to a step within the budget on the largest context of `tiling`: tensors recomputed, tensors
    recomputed or offloaded, and blocks. A way is None where it does not fit; the first two also where kernels do not
    take the context `whole`. Times are shares of the time of a step that keeps everything."""
    graph, bands, context = question.network.graph(), question.network.bands, tiling.context_max
    machine, whole = question.figures, largest_tensor(graph, bands, context).is_countable
    known, store = store_of(machine), store_of(machine) or _assumed_store(question)
    ways = [step_choices(graph, bands, context, question.value_bytes, s, store.machine) for s in (None, store)]
    choice, offloading = (way.choose(budget) if whole else None for way in ways)
    kept, blocks = ways[0].kept, blocks_within(question, context, budget)
    place = "the host's memory" if known and machine.has_devices else "a disk"
    basis = f"by the profile {machine.name}" if known else "assumed"
    rates = f"{place} of {store.written / 1e9:.3g} GB/s out and {store.read / 1e9:.3g} GB/s in, {basis}"
    values = {
        "budget": budget,
        "context": list(context),
        "kept_all": kept,
        "whole": whole,
        "choice": _choice_values(choice),
        "leaving": _choice_values(offloading),
        "store": rates,
        "blocks": None if blocks is None else asdict(blocks),
    }
    line = f"no choice fits; {size(kept)} are needed where everything is kept"
    if not whole:
        line = f"not whole: a tensor would have more values than {MOST_VALUES}, to which kernels count"
    elif choice is not None:
        again = f", recomputing {', '.join(name for name, _ in choice.items)}" if choice.items else ""
        line = f"a step: {_peak_and_time(choice)}, {size(kept)} where everything is kept{again}"
    lines = [line]
    if offloading is not None and offloading.away and kept > budget:  # else nothing is to be gained
        away = f"{len(offloading.away)} tensors, {size(sum(each for _, each in offloading.away))} leave"
        lines.append(f"with memory.offload auto, to {rates}: {away}; {_peak_and_time(offloading)}")
    if blocks is not None and (kept > budget or not whole):
        lines.append(f"in blocks: {blocks.in_words}")
    title = f"rebuilding: a training step on {words(context)} px in {size(budget)}"
    return Section(values, "\n".join([title, *map(wrapped, lines)]))


def _assumed_store(question: RunQuestion) -> Store:
    return replace(ASSUMED_STORE, machine=question.figures) if question.figures.known else ASSUMED_STORE


def _choice_values(choice: MemoryChoice | None) -> dict[str, Any] | None:
    """Return the values of a choice for JSON, without its policy."""
    if choice is None:
        return None
    of_names = {"items": [name for name, _ in choice.items], "away": [*map(list, choice.away)]}
    return {"kept": choice.kept, "peak": choice.peak, "extra": choice.extra} | of_names


def blocks_within(question: RunQuestion, context: tuple[int, int], budget: int) -> BlockPlan | None:
    """Return the blocks that fit the budget, in memory or else in a file; None where none fit."""
    graph, bands, disk = question.network.graph(), question.network.bands, disk_of(question.figures)
    for in_file in (False, True):
        settings = BlockSettings(None, in_file=in_file, store=disk or _assumed_store(question))
        try:
            blocks = blocks_of(settings, graph, bands, context, question.value_bytes, budget)
        except GeometryError:
            continue
        if blocks.memory <= budget:
            return blocks
    return None


def _peak_and_time(choice: MemoryChoice) -> str:
    return f"{size(choice.peak)}, {100 * choice.extra:.2f} % more time"
