"""The table of the cases by kind, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.faults.case import Result

HEADS = (
    *("kind", "cases", "of several ranks", "by mpirun", "ended in time", "cause named", "ended whole under the fault"),
    *("losses equal", "lost steps", "recovery of one rank", "of several", "by mpirun", "longest end"),
)


def table(results: Sequence[Result]) -> str:
    """A row a kind and one of all; lost steps and seconds of recovery as median / most."""
    kinds = list(dict.fromkeys(result.kind for result in results))
    rows = [_row(kind, [result for result in results if result.kind == kind]) for kind in kinds]
    lines = [HEADS, ["---"] * len(HEADS), *rows, _row("all", results)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(name: str, results: Sequence[Result]) -> list[str]:
    counts = [
        len(results),
        sum(result.ranks > 1 for result in results),
        sum(result.mpirun for result in results),
        sum(result.in_time for result in results),
        sum(result.named for result in results),
        sum(result.missed for result in results),
        sum(result.equal for result in results),
    ]
    lost = _spread([result.lost for result in results if result.lost is not None], "{:g}")
    seconds = [
        _spread([r.recovery for r in results if r.recovery is not None and (r.ranks > 1, r.mpirun) == how], "{:.1f} s")
        for how in ((False, False), (True, False), (True, True))
    ]
    return [name, *map(str, counts), lost, *seconds, f"{max(result.seconds for result in results):.1f} s"]


def _spread(values: Sequence[float], shape: str) -> str:
    return " / ".join(shape.format(value) for value in (statistics.median(values), max(values))) if values else "-"
