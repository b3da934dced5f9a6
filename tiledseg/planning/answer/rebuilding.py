"""What `plan --memory-budget` answers: what a step keeps and computes once more to fit, the largest tile, and whether a
finer grid is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiledseg.errors import GeometryError
from tiledseg.geometry.efficiency import tiling_efficiency
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling
from tiledseg.planning.answer.question import Question
from tiledseg.planning.answer.text import columns, size, wrapped
from tiledseg.planning.run.norms import measuring
from tiledseg.planning.tensor_limit import is_countable

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice, StepChoices

MOST_SIDE, MOST_GRIDS, MOST_TRIED = 2**17, 5, 12  # px of a context; grids compared, and looked at


def rebuilding_part(question: Question, tiling: Tiling) -> dict[str, Any]:
    """For the budget: the choice on the largest context of `tiling`, None where none fits; sides of the largest square
    contexts; and a row for each of some grids, coarse ones first: their times are shares of that of the whole raster,
    were it to fit."""
    budget = question.memory_budget
    assert budget is not None, "asked for"
    step = _step(question, tiling.context_max)
    found = step.choose(budget)
    largest = {
        "kept": _largest(question, lambda step: step.kept <= budget),
        "rebuilt": _largest(question, lambda step: step.choose(budget, quick=True) is not None),
    }
    return {
        "budget": budget,
        "context": list(tiling.context_max),
        "kept_all": step.kept,
        "choice": None if found is None else _told(found),
        "largest": largest,
        "grids": _grids(question, budget, largest["rebuilt"]) if largest["rebuilt"] else [],
    }


def _told(choice: MemoryChoice) -> dict[str, Any]:
    """All but the policy itself, which is for programs."""
    told = asdict(choice) | {"items": [name for name, _ in choice.items]}
    del told["policy"]
    return told


def _step(question: Question, context: tuple[int, int]) -> StepChoices:
    from tiledseg.planning.memory.choice import step_choices  # and NumPy, where a budget is asked about

    network = question.network
    return step_choices(network.graph(), network.bands, context, question.bytes_per_value)


def _largest(question: Question, fits: Callable[[StepChoices], bool]) -> int | None:
    """Pixels along a side of the largest square context that fits and that kernels can count; None where none does."""
    network, footprint = question.network, network_footprint(question.network.graph())
    graph, unit = network.graph(), footprint.alignment
    low, high = 0, MOST_SIDE // unit
    while low + 1 < high:
        middle = (low + high) // 2
        side = middle * unit
        try:
            found = is_countable(graph, network.bands, (side, side)) and fits(_step(question, (side, side)))
        except GeometryError:  # too small to be legal
            found = side <= footprint.before + footprint.after
        low, high = (middle, high) if found else (low, middle)
    return low * unit or None


def _grids(question: Question, budget: int, side: int) -> list[dict[str, Any]]:
    """From the coarsest grid that fits at all to the coarsest that keeps everything; `side`: of the largest context."""
    graph = question.network.graph()
    footprint = network_footprint(graph)
    most = 1 if measuring(graph) else min(finest_grid(question.size, footprint))
    rows: list[dict[str, Any]] = []
    first = max(1, max(question.size) // side)
    for parts in range(first, min(most, first + MOST_TRIED) + 1):
        tiling = make_tiling(question.size, (parts, parts), footprint)
        if not is_countable(graph, question.network.bands, tiling.context_max):
            continue
        step = _step(question, tiling.context_max)
        keeps = step.kept <= budget
        if not keeps and (len(rows) >= MOST_GRIDS or budget < step.fixed + max(step.walk.base)):
            continue
        found = None if keeps else step.choose(budget, quick=True)
        if keeps or found is not None:
            extra, work = found.extra if found else 0.0, tiling_efficiency(tiling)
            time = round(work * (1 + extra), 4)
            rows.append({"grid": [parts, parts], "efficiency": round(work, 4), "extra": round(extra, 4), "time": time})
        if keeps:
            break
    return rows


def rebuilding_table(part: dict[str, Any]) -> str:
    choice, largest = part["choice"], part["largest"]
    lines: list[str] = []
    if choice is None:
        lines.append(wrapped(f"no choice fits; {size(part['kept_all'])} are needed where everything is kept"))
    else:
        head = ("part", "kept", "rebuilt", "more time")
        rows = [(r["name"], size(r["kept"]), size(r["rebuilt"]), f"{100 * r['extra']:.2f} %") for r in choice["levels"]]
        lines.append(columns([head, *rows]))
        lines.append(
            wrapped(
                f"a step: {size(choice['peak'])}, {size(part['kept_all'])} where everything is kept; "
                f"{100 * choice['extra']:.2f} % more time, of which a better choice might save "
                f"{100 * choice['gap']:.2g} %"
            )
        )
    lines.append(wrapped(f"largest square context: {_side(largest['kept'])} kept, {_side(largest['rebuilt'])} rebuilt"))
    if part["grids"]:
        best = min(part["grids"], key=lambda row: row["time"])
        titles = ("grid", "E", "more time", "in all", "")
        lines.append(columns([titles, *(_cells(row, row is best) for row in part["grids"])]))
    return "\n".join(lines)


def _cells(row: dict[str, Any], best: bool) -> tuple[str, ...]:
    grid = " x ".join(map(str, row["grid"]))
    remark = ", ".join(filter(None, ["rebuilt" if row["extra"] else "all kept", "best" * best]))
    return grid, f"{row['efficiency']:.4f}", f"{100 * row['extra']:.2f} %", f"{row['time']:.4f}", remark


def _side(pixels: int | None) -> str:
    return "none" if pixels is None else f"{pixels} px"
