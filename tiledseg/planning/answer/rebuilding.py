"""What `plan --memory-budget` answers: what a step keeps, computes once more or has leave to fit, in how many blocks it
would, the largest tile, and whether a finer grid is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tiledseg.errors import GeometryError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling, tiling_efficiency
from tiledseg.planning.answer.text import columns, size, wrapped
from tiledseg.planning.question import Question
from tiledseg.planning.run.blocks import BlockPlan, BlocksAsked, blocks_of
from tiledseg.planning.run.norms import measuring
from tiledseg.planning.step.tensor_limit import MOST_VALUES, is_countable

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice, StepChoices
    from tiledseg.planning.memory.store import Store

_LARGEST = {"kept": "kept", "rebuilt": "rebuilt", "blocks": "in blocks in a file"}
Context = tuple[int, int]
MOST_SIDE, MOST_GRIDS, MOST_TRIED = 2**17, 5, 12  # px of a context; grids compared, and looked at


def goes_in_blocks(question: Question, tiling: Tiling) -> bool:
    """Whether kernels do not take the largest context of `tiling` whole, but blocks do, within the budget."""
    budget, context = question.memory_budget, tiling.context_max
    return budget is not None and not _is_whole(question, context) and _blocks(question, context, budget) is not None


def rebuilding_part(question: Question, tiling: Tiling) -> dict[str, Any]:
    """For the budget, on the largest context of `tiling`: the choice of what is rebuilt, that with a store, and blocks,
    each None where none fits, or where kernels do not take the context `whole`; sides of the largest square
    contexts; and a row for each of some grids, coarse ones first, with the way that is quickest: times are shares of
    that of the whole raster, were it to fit."""
    budget = question.memory_budget
    assert budget is not None, "asked for"
    step, whole = _step(question, tiling.context_max), _is_whole(question, tiling.context_max)
    leanest = step.leanest
    found = step.choose(budget) if whole else None
    leaving = _step(question, tiling.context_max, True).choose(budget) if whole else None
    blocks = _blocks(question, tiling.context_max, budget)
    largest = {
        "kept": _largest(question, lambda side: _step(question, side).kept <= budget, True),
        "rebuilt": _largest(question, lambda side: _step(question, side).peak(leanest) <= budget, True),
        "blocks": _largest(question, lambda side: _blocks(question, side, budget) is not None),
    }
    return {
        "budget": budget,
        "context": list(tiling.context_max),
        "kept_all": step.kept,
        "whole": whole,
        "choice": None if found is None else _told(found),
        "leaving": None if leaving is None else _told(leaving),
        "store": _store_in_words(question),
        "blocks": None if blocks is None else asdict(blocks),
        "largest": largest,
        "grids": _grids(question, budget, largest["rebuilt"]),
    }


def _is_whole(question: Question, context: Context) -> bool:
    """Whether kernels take a context at once."""
    return is_countable(question.network.graph(), question.network.bands, context)


def _told(choice: MemoryChoice) -> dict[str, Any]:
    """All but the policy itself, which is for programs."""
    told = asdict(choice) | {"items": [name for name, _ in choice.items], "away": [*map(list, choice.away)]}
    del told["policy"]
    return told


def _step(question: Question, context: Context, leaves: bool = False) -> StepChoices:
    """`leaves`: tensors may leave for a store. The machine computes at one speed, whether they may or not."""
    from tiledseg.planning.memory.choice import step_choices  # and NumPy, where a budget is asked about

    network, store = question.network, _stores(question)[0]
    away = store if leaves else None
    return step_choices(network.graph(), network.bands, context, question.bytes_per_value, away, store.speed)


def _stores(question: Question) -> tuple[Store, Store]:
    """What tensors leave for, and the disk of blocks: by the machine's profile, where that is not known, assumed."""
    from tiledseg.planning.memory.store import ASSUMED_STORE, disk_of, speed_of, store_of

    machine = question.machine
    if not machine.known:
        return ASSUMED_STORE, ASSUMED_STORE
    assumed = replace(ASSUMED_STORE, speed=speed_of(machine))
    return store_of(machine) or assumed, disk_of(machine) or assumed


def _store_in_words(question: Question) -> str:
    """What tensors leave for, with its rates."""
    from tiledseg.planning.memory.store import store_of

    machine, (store, _) = question.machine, _stores(question)
    rates = f"{store.written / 1e9:.3g} GB/s out and {store.read / 1e9:.3g} GB/s in"
    if not machine.known or store_of(machine) is None:
        return f"a disk of {rates}, assumed"
    place = "the host's memory" if machine.has_devices else "a disk"
    return f"{place} of {rates}, by the profile {machine.name}"


def _blocks(question: Question, context: Context, budget: int) -> BlockPlan | None:
    """In memory, or where that does not fit in a file; None where no blocks fit."""
    network, disk = question.network, _stores(question)[1]
    for in_file in (False, True):
        asked = BlocksAsked(None, in_file=in_file, store=disk)
        try:
            found = blocks_of(asked, network.graph(), network.bands, context, question.bytes_per_value, budget)
        except GeometryError:
            continue
        if found.memory <= budget:
            return found
    return None


def _largest(question: Question, fits: Callable[[Context], bool], whole: bool = False) -> int | None:
    """Pixels along a side of the largest square context that fits; None where none does. `whole`: kernels count it at
    once."""
    footprint = network_footprint(question.network.graph())
    unit, least = footprint.alignment, footprint.before + footprint.after
    low, high = 0, MOST_SIDE // unit
    while low + 1 < high:
        middle = (low + high) // 2
        side = middle * unit
        try:
            found = (not whole or _is_whole(question, (side, side))) and fits((side, side))
        except GeometryError:  # too small to be legal
            found = side <= least
        low, high = (middle, high) if found else (low, middle)
    return low * unit or None


def _grids(question: Question, budget: int, side: int | None) -> list[dict[str, Any]]:
    """From the coarsest grid, in blocks, and the coarsest that fits without to the coarsest that keeps everything;
    `side`: of the largest context that fits without."""
    graph = question.network.graph()
    footprint = network_footprint(graph)
    most = 1 if measuring(graph) else min(finest_grid(question.size, footprint))
    rows: list[dict[str, Any]] = []
    first = max(1, max(question.size) // side) if side else most
    for parts in sorted({1, *range(first, min(most, first + MOST_TRIED) + 1)}):
        tiling = make_tiling(question.size, (parts, parts), footprint)
        found = _quickest(question, tiling.context_max, budget, len(rows) < MOST_GRIDS)
        if found is not None:
            way, extra = found
            work = tiling_efficiency(tiling)
            times = {"efficiency": round(work, 4), "extra": round(extra, 4), "time": round(work * (1 + extra), 4)}
            rows.append({"grid": [parts, parts], **times, "way": way})
        if found is not None and found[0] == "all kept":
            break
    return rows


def _quickest(question: Question, context: Context, budget: int, looks: bool) -> tuple[str, float] | None:
    """What a context fits by in least time, and its share more time; `looks`: other ways than keeping all too."""
    countable = _is_whole(question, context)
    step = _step(question, context)
    if countable and step.kept <= budget:
        return "all kept", 0.0
    ways: dict[str, float] = {}
    if looks and countable and budget >= step.fixed + max(step.walk.base):
        choices = (_step(question, context, leaves).choose(budget) for leaves in (False, True))
        for choice in filter(None, choices):
            ways["offloaded" if choice.away else "rebuilt"] = choice.extra
    blocks = _blocks(question, context, budget) if looks else None
    if blocks is not None:
        place = "a file" if blocks.in_file else "memory"
        ways[f"{blocks.shape[0]} x {blocks.shape[1]} blocks in {place}"] = blocks.extra
    return min(ways.items(), key=lambda way: way[1]) if ways else None


def rebuilding_table(part: dict[str, Any]) -> str:
    choice, leaving, blocks, largest = (part[key] for key in ("choice", "leaving", "blocks", "largest"))
    lines: list[str] = []
    if not part["whole"]:
        lines.append(wrapped(f"not whole: a tensor would have more values than {MOST_VALUES}, to which kernels count"))
    elif choice is None:
        lines.append(wrapped(f"no choice fits; {size(part['kept_all'])} are needed where everything is kept"))
    else:
        head = ("part", "kept", "rebuilt", "more time")
        rows = [(r["name"], size(r["kept"]), size(r["rebuilt"]), f"{100 * r['extra']:.2f} %") for r in choice["levels"]]
        lines.append(columns([head, *rows]))
        lines.append(wrapped(f"a step: {_step_words(choice)}, {size(part['kept_all'])} where everything is kept"))
    if part["whole"] and part["kept_all"] <= part["budget"]:
        leaving = blocks = None  # nothing is to be gained
    if leaving is not None and leaving["away"]:
        away = f"{len(leaving['away'])} tensors, {size(sum(each for _, each in leaving['away']))}"
        lines.append(wrapped(f"with memory.offload auto, to {part['store']}: {away} leave; {_step_words(leaving)}"))
    elif leaving is not None:
        lines.append(wrapped(f"with memory.offload auto nothing would leave: that takes longer, to {part['store']}"))
    if blocks is not None:
        lines.append(wrapped(f"in blocks: {BlockPlan(**blocks).in_words}"))
    sides = ", ".join(f"{_side(largest[key])} {words}" for key, words in _LARGEST.items())
    lines.append(wrapped(f"largest square context: {sides}"))
    if part["grids"]:
        best = min(part["grids"], key=lambda row: row["time"])
        titles = ("grid", "E", "more time", "in all", "")
        lines.append(columns([titles, *(_cells(row, row is best) for row in part["grids"])]))
    return "\n".join(lines)


def _step_words(choice: dict[str, Any]) -> str:
    gap = f", of which a better choice might save {100 * choice['gap']:.2g} % at most"
    return f"{size(choice['peak'])}, {100 * choice['extra']:.2f} % more time{gap if choice['gap'] >= 0.001 else ''}"


def _cells(row: dict[str, Any], best: bool) -> tuple[str, ...]:
    grid = " x ".join(map(str, row["grid"]))
    remark = row["way"] + ", best" * best
    return grid, f"{row['efficiency']:.4f}", f"{100 * row['extra']:.2f} %", f"{row['time']:.4f}", remark


def _side(pixels: int | None) -> str:
    return "none" if pixels is None else f"{pixels} px"
