"""`plan --memory-budget`: what a step keeps, recomputes or offloads to fit, in how many blocks it would, the largest
tile, and whether a finer grid is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from tiledseg.errors import GeometryError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling, tiling_efficiency
from tiledseg.planning.answer.text import columns, size, words, wrapped
from tiledseg.planning.memory.choice import MemoryChoice, StepChoices, step_choices
from tiledseg.planning.memory.store import ASSUMED_STORE, disk_of, store_of
from tiledseg.planning.question import Question
from tiledseg.planning.run.blocks import BlockPlan, BlocksAsked, blocks_of
from tiledseg.planning.run.norms import measuring
from tiledseg.planning.step.tensor_limit import MOST_VALUES, is_countable

Context = tuple[int, int]
MOST_SIDE, MOST_GRIDS, MOST_TRIED = 2**17, 5, 12  # px of a context; grids compared, and looked at


def goes_in_blocks(question: Question, tiling: Tiling) -> bool:
    """Return True if kernels do not take the largest context of `tiling` whole, but blocks do, within the budget."""
    if question.memory_budget is None:
        return False
    budget, context = _Budget(question), tiling.context_max
    return not budget.is_whole(context) and budget.blocks(context) is not None


def rebuilding_part(question: Question, tiling: Tiling) -> dict[str, Any]:
    """Return, for the budget and the largest context of `tiling`, the choice of what is recomputed, that with a store,
    and blocks. Each is None where none fits, or where kernels do not take the context `whole`. Return also the sides of
    the largest square contexts, and the quickest way for each of some grids, coarse ones first. Times are shares of
    that of the whole raster, were it to fit."""
    budget, context = _Budget(question), tiling.context_max
    step, whole, blocks = budget.step(context), budget.is_whole(context), budget.blocks(context)
    leanest = step.leanest
    steps = step, budget.step(context, leaves=True)
    choice, leaving = (_plain(each.choose(budget.bytes) if whole else None, each) for each in steps)
    rebuilt = budget.largest(lambda at: budget.is_whole(at) and budget.step(at).peak(leanest) <= budget.bytes)
    return {
        "budget": budget.bytes,
        "context": list(context),
        "kept_all": step.kept,
        "whole": whole,
        "choice": choice,
        "leaving": leaving,
        "store": budget.store_in_words,
        "blocks": None if blocks is None else asdict(blocks),
        "largest": {
            "kept": budget.largest(lambda at: budget.is_whole(at) and budget.step(at).kept <= budget.bytes),
            "rebuilt": rebuilt,
            "blocks": budget.largest(lambda at: budget.blocks(at) is not None),
        },
        "grids": budget.grids(rebuilt),
    }


def _plain(choice: MemoryChoice | None, step: StepChoices) -> dict[str, Any] | None:
    """Return a choice of a step as plain values, without its policy."""
    if choice is None:
        return None
    part = asdict(choice) | {"items": [name for name, _ in choice.items], "away": [*map(list, choice.away)]}
    return {key: value for key, value in part.items() if key != "policy"} | {"levels": step.by_part(choice.policy)}


class _Budget:
    """A network's step within the bytes of a budget. `store`: of offloaded tensors; `disk`: of blocks; both by the
    machine's profile, else assumed."""

    def __init__(self, question: Question) -> None:
        assert question.memory_budget is not None, "a plan with a budget"
        self.size, self.bytes, machine = question.size, question.memory_budget, question.machine
        self.graph, self.bands, self.value = question.network.graph(), question.network.bands, question.bytes_per_value
        self.footprint = network_footprint(self.graph)
        self.store = self.disk = ASSUMED_STORE
        place, basis = "a disk", "assumed"
        if machine.known:
            assumed = replace(ASSUMED_STORE, machine=machine)
            self.store, self.disk = store_of(machine) or assumed, disk_of(machine) or assumed
            if store_of(machine) is not None:
                place = "the host's memory" if machine.has_devices else "a disk"
                basis = f"by the profile {machine.name}"
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

    def grids(self, side: int | None) -> list[dict[str, Any]]:
        """Return rows from the coarsest grid, in blocks, and the coarsest that fits without to the coarsest that keeps
        everything; `side`: of the largest context that fits without."""
        most = 1 if measuring(self.graph) else min(finest_grid(self.size, self.footprint))
        first = max(1, max(self.size) // side) if side else most
        rows: list[dict[str, Any]] = []
        for parts in sorted({1, *range(first, min(most, first + MOST_TRIED) + 1)}):
            tiling = make_tiling(self.size, (parts, parts), self.footprint)
            quickest = self._quickest(tiling.context_max, len(rows) < MOST_GRIDS)
            if quickest is not None:
                way, extra = quickest
                work = tiling_efficiency(tiling)
                times = {"efficiency": round(work, 4), "extra": round(extra, 4), "time": round(work * (1 + extra), 4)}
                rows.append({"grid": [parts, parts], **times, "way": way})
                if way == "all kept":
                    break
        return rows

    def _quickest(self, context: Context, looks: bool) -> tuple[str, float] | None:
        """Return the way by which a context fits in least time, and its share more time; `looks`: at other ways than
        keeping all too."""
        step, whole = self.step(context), self.is_whole(context)
        if whole and step.kept <= self.bytes:
            return "all kept", 0.0
        if not looks:
            return None
        ways: dict[str, float] = {}
        if whole and self.bytes >= step.fixed + max(step.walk.base):
            for leaves in (False, True):
                choice = self.step(context, leaves).choose(self.bytes)
                if choice is not None:
                    ways["offloaded" if choice.away else "rebuilt"] = choice.extra
        blocks = self.blocks(context)
        if blocks is not None:
            place = "a file" if blocks.in_file else "memory"
            ways[f"{blocks.shape[0]} x {blocks.shape[1]} blocks in {place}"] = blocks.extra
        return min(ways.items(), key=lambda way: way[1], default=None)


def rebuilding_table(part: dict[str, Any]) -> str:
    """Return a row for each part of the network, lines on the other ways, and a row for each grid."""
    choice, leaving, blocks = part["choice"], part["leaving"], part["blocks"]
    lines, remarks = list[str](), list[str]()
    if not part["whole"]:
        remarks.append(f"not whole: a tensor would have more values than {MOST_VALUES}, to which kernels count")
    elif choice is None:
        remarks.append(f"no choice fits; {size(part['kept_all'])} are needed where everything is kept")
    else:
        levels = choice["levels"]
        parts = [
            (row["name"], size(row["kept"]), size(row["rebuilt"]), f"{100 * row['extra']:.2f} %") for row in levels
        ]
        lines.append(columns([("part", "kept", "rebuilt", "more time"), *parts]))
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
        rows = [("grid", "E", "more time", "in all", "")]
        for row in part["grids"]:
            figures = f"{row['efficiency']:.4f}", f"{100 * row['extra']:.2f} %", f"{row['time']:.4f}"
            rows.append((words(row["grid"]), *figures, row["way"] + ", best" * (row is best)))
        lines.append(columns(rows))
    return "\n".join(lines)


def _step_words(choice: dict[str, Any]) -> str:
    return f"{size(choice['peak'])}, {100 * choice['extra']:.2f} % more time"
