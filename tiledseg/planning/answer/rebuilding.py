"""`plan --memory-budget`: what a step keeps, recomputes or offloads to fit, in how many blocks it would, the largest
tile, and whether a finer grid is better."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from tiledseg.errors import GeometryError
from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling, tiling_efficiency
from tiledseg.planning.answer.text import columns, words, wrapped
from tiledseg.planning.run.blocks import BlockPlan, BlocksAsked, blocks_of
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import measuring
from tiledseg.planning.walk.choice import MemoryChoice, StepChoices, step_choices
from tiledseg.planning.walk.cost_model import ASSUMED_STORE, disk_of, store_of
from tiledseg.planning.walk.items import BACKWARD
from tiledseg.planning.walk.rank_steps import MOST_VALUES, is_countable
from tiledseg.units import size

Context = tuple[int, int]
MOST_SIDE, MOST_GRIDS, MOST_TRIED = 2**17, 5, 12  # px of a context; grids compared, and looked at


def rebuilding_part(question: RunQuestion, tiling: Tiling, budget: int) -> dict[str, Any]:
    """Return, for the budget and the largest context of `tiling`, the choice of what is recomputed, that with a store,
    and blocks. Each is None where none fits, or where kernels do not take the context `whole`. Return also the sides of
    the largest square contexts, and the quickest way for each of some grids, coarse ones first. Times are shares of
    that of the whole raster, were it to fit."""
    ways, context = Ways(question, budget), tiling.context_max
    step, whole, blocks = ways.step(context), ways.is_whole(context), ways.blocks(context)
    steps = step, ways.step(context, leaves=True)
    choice, leaving = (_plain(each.choose(budget) if whole else None, each) for each in steps)
    rebuilt = ways.largest(lambda at: ways.is_whole(at) and ways.step(at).peak(step.leanest) <= budget)
    return {
        "budget": budget,
        "context": list(context),
        "kept_all": step.kept,
        "whole": whole,
        "choice": choice,
        "leaving": leaving,
        "store": ways.store_in_words,
        "blocks": None if blocks is None else asdict(blocks),
        "largest": {
            "kept": ways.largest(lambda at: ways.is_whole(at) and ways.step(at).kept <= budget),
            "rebuilt": rebuilt,
            "blocks": ways.largest(lambda at: ways.blocks(at) is not None),
        },
        "grids": ways.grids(rebuilt),
    }


def _plain(choice: MemoryChoice | None, step: StepChoices) -> dict[str, Any] | None:
    """Return a choice of a step as plain values, without its policy."""
    if choice is None:
        return None
    levels: dict[str, dict[str, Any]] = {}  # by what stands before the dot in nodes' names
    whole = (1 + BACKWARD) * step.walk.forward
    for item, word in zip(step.walk.items, step.walk.words(choice.policy), strict=True):
        name = item.name.split(".")[0]
        level = levels.setdefault(name, {"name": name, "kept": 0, "rebuilt": 0, "extra": 0.0, "away": 0})
        if word != REBUILD or item.used:
            level["kept" if word == KEEP else "away" if word == OFFLOAD else "rebuilt"] += item.bytes
            level["extra"] += {KEEP: 0.0, REBUILD: item.rebuild, OFFLOAD: item.offload}[word] / whole
    part = asdict(choice) | {"items": [name for name, _ in choice.items], "away": [*map(list, choice.away)]}
    return {key: value for key, value in part.items() if key != "policy"} | {"levels": list(levels.values())}


class Ways:
    """The ways of a network's step to fit a budget. `store`: of offloaded tensors; `disk`: of blocks; both by the
    machine's profile, else assumed."""

    def __init__(self, question: RunQuestion, budget: int) -> None:
        self.size, self.bytes, machine = question.shape, budget, question.figures
        self.graph, self.bands, self.value = question.network.graph(), question.network.bands, question.value_bytes
        self.footprint = network_footprint(self.graph)
        assumed = replace(ASSUMED_STORE, machine=machine) if machine.known else ASSUMED_STORE
        self.store, self.disk = store_of(machine) or assumed, disk_of(machine) or assumed
        known = store_of(machine) is not None
        basis = f"by the profile {machine.name}" if known else "assumed"
        place = "the host's memory" if known and machine.has_devices else "a disk"
        rates = f"{self.store.written / 1e9:.3g} GB/s out and {self.store.read / 1e9:.3g} GB/s in"
        self.store_in_words = f"{place} of {rates}, {basis}"

    def is_whole(self, context: Context) -> bool:
        """Return True if kernels take a context at once."""
        return is_countable(self.graph, self.bands, context)

    def step(self, context: Context, leaves: bool = False) -> StepChoices:
        """Return the choices of a step; `leaves`: tensors may be offloaded. The machine's speed is the same in both."""
        store = self.store if leaves else None
        return step_choices(self.graph, self.bands, context, self.value, store, self.store.machine)

    def blocks(self, context: Context) -> BlockPlan | None:
        """Return blocks in memory, or where these do not fit in a file; None where none fit."""
        for in_file in (False, True):
            asked = BlocksAsked(None, in_file=in_file, store=self.disk)
            try:
                blocks = blocks_of(asked, self.graph, self.bands, context, self.value, self.bytes)
            except GeometryError:
                continue
            if blocks.memory <= self.bytes:
                return blocks
        return None

    def largest(self, fits: Callable[[Context], bool]) -> int | None:
        """Return pixels along a side of the largest square context that fits; None where none does."""
        unit, least = self.footprint.alignment, self.footprint.before + self.footprint.after

        def is_too_large(parts: int) -> bool:
            try:
                return not fits((parts * unit, parts * unit))
            except GeometryError:  # too small to be legal
                return parts * unit > least

        return bisect(range(1, MOST_SIDE // unit), False, key=is_too_large) * unit or None

    def grids(self, side: int | None) -> list[dict[str, Any]]:
        """Return rows from the coarsest grid, in blocks, and the coarsest that fits without to the coarsest that keeps
        everything; `side`: of the largest context that fits without."""
        most = 1 if measuring(self.graph) else min(finest_grid(self.size, self.footprint))
        first = max(1, max(self.size) // side) if side else most
        rows: list[dict[str, Any]] = []
        for parts in sorted({1, *range(first, min(most, first + MOST_TRIED) + 1)}):
            tiling = make_tiling(self.size, (parts, parts), self.footprint)
            ways = self._all(tiling.context_max, len(rows) < MOST_GRIDS)
            if ways:
                way, work = min(ways, key=lambda name: ways[name]), tiling_efficiency(tiling)
                times = {"efficiency": work, "extra": ways[way], "time": work * (1 + ways[way])}
                rounded = {name: round(value, 4) for name, value in times.items()}
                rows.append({"grid": [parts, parts], **rounded, "way": way})
                if way == "all kept":
                    break
        return rows

    def _all(self, context: Context, looks: bool) -> dict[str, float]:
        """Return the ways by which a context fits, each with its share more time; `looks`: at other ways than keeping
        all too."""
        step, whole = self.step(context), self.is_whole(context)
        if whole and step.kept <= self.bytes:
            return {"all kept": 0.0}
        ways: dict[str, float] = {}
        if looks and whole and self.bytes >= step.fixed + max(step.walk.base):
            for choice in (self.step(context, leaves).choose(self.bytes) for leaves in (False, True)):
                if choice is not None:
                    ways["offloaded" if choice.away else "rebuilt"] = choice.extra
        blocks = self.blocks(context) if looks else None
        if blocks is not None:
            ways[f"{words(blocks.shape)} blocks in {'a file' if blocks.in_file else 'memory'}"] = blocks.extra
        return ways


def rebuilding_text(part: dict[str, Any]) -> str:
    """Return a row for each part of the network, lines on the other ways, and a row for each grid."""
    choice, leaving, blocks = part["choice"], part["leaving"], part["blocks"]
    lines, remarks = list[str](), list[str]()
    if not part["whole"]:
        remarks.append(f"not whole: a tensor would have more values than {MOST_VALUES}, to which kernels count")
    elif choice is None:
        remarks.append(f"no choice fits; {size(part['kept_all'])} are needed where everything is kept")
    else:
        levels = choice["levels"]
        rows = [(p["name"], size(p["kept"]), size(p["rebuilt"]), f"{100 * p['extra']:.2f} %") for p in levels]
        lines.append(columns([("part", "kept", "rebuilt", "more time"), *rows]))
        remarks.append(f"a step: {_step_words(choice)}, {size(part['kept_all'])} where everything is kept")
    if not part["whole"] or part["kept_all"] > part["budget"]:  # else nothing is to be gained
        if leaving is not None:
            away = f"{len(leaving['away'])} tensors, {size(sum(each for _, each in leaving['away']))} leave"
            said = f"{away}; {_step_words(leaving)}" if leaving["away"] else "nothing leaves: that takes longer"
            remarks.append(f"with memory.offload auto, to {part['store']}: {said}")
        if blocks is not None:
            remarks.append(f"in blocks: {BlockPlan(**blocks).in_words}")
    sides = {key: "none" if pixels is None else f"{pixels} px" for key, pixels in part["largest"].items()}
    kinds = f"{sides['kept']} kept, {sides['rebuilt']} rebuilt, {sides['blocks']} in blocks in a file"
    lines += map(wrapped, [*remarks, f"largest square context: {kinds}"])
    if part["grids"]:
        best = min(part["grids"], key=lambda row: row["time"])
        grids = [("grid", "E", "more time", "in all", "")]
        for row in part["grids"]:
            figures = f"{row['efficiency']:.4f}", f"{100 * row['extra']:.2f} %", f"{row['time']:.4f}"
            grids.append((words(row["grid"]), *figures, row["way"] + ", best" * (row is best)))
        lines.append(columns(grids))
    return "\n".join(lines)


def _step_words(choice: dict[str, Any]) -> str:
    return f"{size(choice['peak'])}, {100 * choice['extra']:.2f} % more time"
