"""Lists of ranks in words that stay short on 1200 of them. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

_RUNS = 6


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-2, 5", or, where there are many runs, "ranks 0, 2, 4, 6, 8, 10 and 594 more". Pure.

    `ranks` ascend and hold at least one.
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = _runs(ranks)
    shown = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs[:_RUNS])
    left = sum(last - first + 1 for first, last in runs[_RUNS:])
    return f"ranks {shown} and {left} more" if left else f"ranks {shown}"


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of ranks that follow each other."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs
