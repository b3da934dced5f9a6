"""`plan --memory-budget`: what a step keeps, recomputes or offloads to fit, in how many blocks it would, the largest
tile, and whether a finer grid is better."""

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

Context = tuple[int, int]
MOST_SIDE, MOST_GRIDS, MOST_TRIED = 2**17, 5, 12  # px of a context; grids compared, and looked at


def goes_in_blocks(question: Question, tiling: Tiling) -> bool:
    """Return True if kernels do not take the largest context of `tiling` whole, but blocks do, within the budget."""
    context = tiling.context_max
    return question.memory_budget is not None and not _is_whole(question, context) and bool(_blocks(question, context))


def rebuilding_part(question: Question, tiling: Tiling) -> dict[str, Any]:
    """Return, for the budget and the largest context of `tiling`, the choice of what is recomputed, that with a store,
    and blocks. Each is None where none fits, or where kernels do not take the context `whole`. Return also the sides of
    the largest square contexts, and the quickest way for each of some grids, coarse ones first. Times are shares of
    that of the whole raster, were it to fit."""
    budget, context = _budget(question), tiling.context_max
    step, whole = _step(question, context), _is_whole(question, context)
    leanest = step.leanest
    choices = [_step(question, context, leaves).choose(budget) if whole else None for leaves in (False, True)]
    blocks = _blocks(question, context)

    def largest(fits: Callable[[Context], bool]) -> int | None:
        return _largest(question, lambda side: _is_whole(question, side) and fits(side))

    rebuilt = largest(lambda side: _step(question, side).peak(leanest) <= budget)
    return {
        "budget": budget,
        "context": list(context),
        "kept_all": step.kept,
        "whole": whole,
        "choice": _plain(choices[0]),
        "leaving": _plain(choices[1]),
        "store": _store_in_words(question),
        "blocks": None if blocks is None else asdict(blocks),
        "largest": {
            "kept": largest(lambda side: _step(question, side).kept <= budget),
            "rebuilt": rebuilt,
            "blocks": _largest(question, lambda side: _blocks(question, side) is not None),
        },
        "grids": _grids(question, rebuilt),
    }


def _budget(question: Question) -> int:
    assert question.memory_budget is not None, "a plan with a budget"
    return question.memory_budget


def _is_whole(question: Question, context: Context) -> bool:
    """Return True if kernels take a context at once."""
    return is_countable(question.network.graph(), question.network.bands, context)


def _plain(choice: MemoryChoice | None) -> dict[str, Any] | None:
    """Return a choice without its policy, which is for programs."""
    if choice is None:
        return None
    part = asdict(choice) | {"items": [name for name, _ in choice.items], "away": [*map(list, choice.away)]}
    return {key: value for key, value in part.items() if key != "policy"}


def _step(question: Question, context: Context, leaves: bool = False) -> StepChoices:
    """Return the choices of a step; `leaves`: tensors may be offloaded. The machine's speed is the same in both."""
    from tiledseg.planning.memory.choice import step_choices  # and NumPy, which plans without a budget do not need

    network, store = question.network, _stores(question)[0]
    sizes = network.graph(), network.bands, context, question.bytes_per_value
    return step_choices(*sizes, store if leaves else None, store.speed)


def _stores(question: Question) -> tuple[Store, Store]:
    """Return the store of offloaded tensors, and the disk of blocks: by the machine's profile, else assumed."""
    from tiledseg.planning.memory.store import ASSUMED_STORE, disk_of, speed_of, store_of

    machine = question.machine
    if not machine.known:
        return ASSUMED_STORE, ASSUMED_STORE
    assumed = replace(ASSUMED_STORE, speed=speed_of(machine))
    return store_of(machine) or assumed, disk_of(machine) or assumed


def _store_in_words(question: Question) -> str:
    from tiledseg.planning.memory.store import store_of

    machine, (store, _) = question.machine, _stores(question)
    rates = f"{store.written / 1e9:.3g} GB/s out and {store.read / 1e9:.3g} GB/s in"
    if not machine.known or store_of(machine) is None:
        return f"a disk of {rates}, assumed"
    place = "the host's memory" if machine.has_devices else "a disk"
    return f"{place} of {rates}, by the profile {machine.name}"


def _blocks(question: Question, context: Context) -> BlockPlan | None:
    """Return blocks in memory, or where these do not fit in a file; None where none fit."""
    network, disk, budget = question.network, _stores(question)[1], _budget(question)
    for in_file in (False, True):
        asked = BlocksAsked(None, in_file=in_file, store=disk)
        try:
            blocks = blocks_of(asked, network.graph(), network.bands, context, question.bytes_per_value, budget)
        except GeometryError:
            continue
        if blocks.memory <= budget:
            return blocks
    return None


def _largest(question: Question, fits: Callable[[Context], bool]) -> int | None:
    """Return pixels along a side of the largest square context that fits; None where none does."""
    footprint = network_footprint(question.network.graph())
    unit, least = footprint.alignment, footprint.before + footprint.after
    low, high = 0, MOST_SIDE // unit
    while low + 1 < high:
        middle = (low + high) // 2
        side = middle * unit
        try:
            enough = fits((side, side))
        except GeometryError:  # too small to be legal
            enough = side <= least
        low, high = (middle, high) if enough else (low, middle)
    return low * unit or None


def _grids(question: Question, side: int | None) -> list[dict[str, Any]]:
    """Return rows from the coarsest grid, in blocks, and the coarsest that fits without to the coarsest that keeps
    everything; `side`: of the largest context that fits without."""
    graph = question.network.graph()
    footprint = network_footprint(graph)
    most = 1 if measuring(graph) else min(finest_grid(question.size, footprint))
    first = max(1, max(question.size) // side) if side else most
    rows: list[dict[str, Any]] = []
    for parts in sorted({1, *range(first, min(most, first + MOST_TRIED) + 1)}):
        tiling = make_tiling(question.size, (parts, parts), footprint)
        quickest = _quickest(question, tiling.context_max, len(rows) < MOST_GRIDS)
        if quickest is not None:
            way, extra = quickest
            work = tiling_efficiency(tiling)
            times = {"efficiency": round(work, 4), "extra": round(extra, 4), "time": round(work * (1 + extra), 4)}
            rows.append({"grid": [parts, parts], **times, "way": way})
            if way == "all kept":
                break
    return rows


def _quickest(question: Question, context: Context, looks: bool) -> tuple[str, float] | None:
    """Return the way by which a context fits in least time, and its share more time; `looks`: at other ways than
    keeping all too."""
    step, budget, whole = _step(question, context), _budget(question), _is_whole(question, context)
    if whole and step.kept <= budget:
        return "all kept", 0.0
    if not looks:
        return None
    ways: dict[str, float] = {}
    if whole and budget >= step.fixed + max(step.walk.base):
        for leaves in (False, True):
            choice = _step(question, context, leaves).choose(budget)
            if choice is not None:
                ways["offloaded" if choice.away else "rebuilt"] = choice.extra
    blocks = _blocks(question, context)
    if blocks is not None:
        place = "a file" if blocks.in_file else "memory"
        ways[f"{blocks.shape[0]} x {blocks.shape[1]} blocks in {place}"] = blocks.extra
    return min(ways.items(), key=lambda way: way[1], default=None)


def rebuilding_table(part: dict[str, Any]) -> str:
    """Return a row for each part of the network, lines on the other ways, and a row for each grid."""
    choice, leaving, blocks = part["choice"], part["leaving"], part["blocks"]
    lines: list[str] = []
    if not part["whole"]:
        lines.append(wrapped(f"not whole: a tensor would have more values than {MOST_VALUES}, to which kernels count"))
    elif choice is None:
        lines.append(wrapped(f"no choice fits; {size(part['kept_all'])} are needed where everything is kept"))
    else:
        rows = [("part", "kept", "rebuilt", "more time")]
        for level in choice["levels"]:
            more = f"{100 * level['extra']:.2f} %"
            rows.append((level["name"], size(level["kept"]), size(level["rebuilt"]), more))
        lines.append(columns(rows))
        lines.append(wrapped(f"a step: {_step_words(choice)}, {size(part['kept_all'])} where everything is kept"))
    if not part["whole"] or part["kept_all"] > part["budget"]:  # else nothing is to be gained
        if leaving is not None:
            to = f"with memory.offload auto, to {part['store']}"
            away = f"{len(leaving['away'])} tensors, {size(sum(each for _, each in leaving['away']))}"
            less = f"{to}, nothing leaves: that takes longer"
            lines.append(wrapped(f"{to}: {away} leave; {_step_words(leaving)}" if leaving["away"] else less))
        if blocks is not None:
            lines.append(wrapped(f"in blocks: {BlockPlan(**blocks).in_words}"))
    sides = {key: "none" if pixels is None else f"{pixels} px" for key, pixels in part["largest"].items()}
    lines.append(
        wrapped(
            f"largest square context: {sides['kept']} kept, {sides['rebuilt']} rebuilt, {sides['blocks']} in blocks "
            "in a file"
        )
    )
    if part["grids"]:
        best = min(part["grids"], key=lambda row: row["time"])
        titles = ("grid", "E", "more time", "in all", "")
        lines.append(columns([titles, *(_cells(row, row is best) for row in part["grids"])]))
    return "\n".join(lines)


def _step_words(choice: dict[str, Any]) -> str:
    gap = f", of which a better choice might save {100 * choice['gap']:.2g} % at most"
    return f"{size(choice['peak'])}, {100 * choice['extra']:.2f} % more time{gap if choice['gap'] >= 0.001 else ''}"


def _cells(row: dict[str, Any], best: bool) -> tuple[str, ...]:
    grid, remark = " x ".join(map(str, row["grid"])), row["way"] + ", best" * best
    return grid, f"{row['efficiency']:.4f}", f"{100 * row['extra']:.2f} %", f"{row['time']:.4f}", remark
