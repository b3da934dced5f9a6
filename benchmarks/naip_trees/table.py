"""The table of all results in a folder."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.naip_trees.maps import WAYS
from benchmarks.naip_trees.runs import HELD_OUT, HELD_OUT_MAPS, OTHER_CITY, SECONDS, read_result
from benchmarks.spread import markdown

_HEAD = ("row", "seeds", "steps", "weights", "Mpx", "seconds", "held-out blocks")
_MAPPED = {HELD_OUT_MAPS: "held-out", OTHER_CITY: "other city"}


def of_folder(out: Path, report: bool) -> str:
    """A line a row: mean and deviation, over its seeds, of the IoU of trees; with `report` also on the other city."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(out.glob("*/*/result.json")):
        rows.setdefault(file.parent.parent.name, []).append(read_result(file.parent))
    shown = [key for key in _MAPPED if any(key in each for of in rows.values() for each in of)]
    shown = [key for key in shown if report or key != OTHER_CITY]
    head = (*_HEAD, *(f"{_MAPPED[key]}, {way}" for key in shown for way in WAYS))
    return markdown(head, [(name, *_cells(results, shown)) for name, results in rows.items()])


def _cells(results: Sequence[dict[str, Any]], shown: Sequence[str]) -> list[str]:
    pixels = statistics.mean(each["pixels"] for each in results) / 1e6
    seconds = statistics.mean(each[SECONDS] for each in results)
    maps = [[each[key][way] for each in results if way in each.get(key, {})] for key in shown for way in WAYS]
    sizes = [_all(results, key) for key in ("steps", "parameters")]
    scores = [spread(values) for values in ([each[HELD_OUT] for each in results if HELD_OUT in each], *maps)]
    return [str(len(results)), *sizes, f"{pixels:.0f}", f"{seconds:.0f}", *scores]


def _all(results: Sequence[dict[str, Any]], key: str) -> str:
    return ", ".join(sorted({str(each[key]) for each in results}))


def spread(values: Sequence[float]) -> str:
    """`mean +- deviation` (of a sample); the value where there is one, - where there is none."""
    if len(values) < 2:
        return "-" if not values else f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} +- {statistics.stdev(values):.3f}"
