"""The ranks that hold up a job, from the reports of all: pure, so one rank can test every case. Standard library
only."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

# Shares of the deadline. Ranks notice a standstill at slightly different times; a rank whose word has not changed for
# so long, while the others' did, is stopped or gone, or holds the interpreter in a call that never returns.
STALE = 0.9
_ALL_STALE = 0.7
SILENT = 0.4
_GROUPS = _RUNS = 6
_WORDS = 160
_GONE = "not answering, last in"


class Report(NamedTuple):
    """A rank's heartbeat. `beat` counts its reports; `age`: seconds without progress."""

    rank: int
    host: str
    beat: int
    age: float
    waits: bool
    words: str
    ended: bool = False

    def encode(self) -> str:
        return json.dumps(self)


def decode(text: bytes) -> Report:
    return Report(*json.loads(text))


class SeenReport(NamedTuple):
    """A report, and for how many seconds the same one has been read again and again."""

    report: Report
    unchanged: float


def verdict(seen: Sequence[SeenReport], deadline: float) -> str | None:
    """Return one line that names the ranks which hold up the job, with the work of every rank; None while one moves.

    A rank that answers and has made progress within the deadline keeps the job alive, however long the others wait.
    """
    silent = [one.report for one in seen if one.unchanged >= SILENT * deadline]
    answering = [one.report for one in seen if one.unchanged < SILENT * deadline]
    if any(report.age < _ALL_STALE * deadline for report in answering):
        return None
    busy = sorted((report for report in answering if not report.waits), key=lambda report: -report.age)
    parts = [*_groups(silent, _GONE), *_groups(busy, "stuck in")] or ["every rank waits for another"]
    parts += _groups([report for report in answering if report.waits], "waiting in")
    more = [f"{len(parts) - _GROUPS} more groups"] if len(parts) > _GROUPS else []
    return (
        f"no rank has made progress for {deadline:.3g} s: {'; '.join([*parts[:_GROUPS], *more])}. Look at what the "
        "first ones do and at their machines, or raise parallel.deadline where one piece of work takes longer"
    )


def not_answering(reports: Sequence[Report]) -> str:
    """Return the ranks whose last reports these are, in words; empty where there are none."""
    return "; ".join(_groups(reports, _GONE)[:_GROUPS])


def _groups(reports: Sequence[Report], how: str) -> list[str]:
    """Return the ranks that say the same together, in the order of their first."""
    groups: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        groups[report.words].append(report)
    return [f"{_who(each)} {how}: {words[:_WORDS]}{'...' * (len(words) > _WORDS)}" for words, each in groups.items()]


def _who(reports: Sequence[Report]) -> str:
    ranks = sorted(report.rank for report in reports)
    return f"rank {ranks[0]} on {reports[0].host}" if len(ranks) == 1 else name_ranks(ranks)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0-2, 5", or, of many runs, "ranks 0, 2, 4, 6, 8, 10 and 594 more".

    `ranks` ascend and hold at least one.
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    shown = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs[:_RUNS])
    left = sum(last - first + 1 for first, last in runs[_RUNS:])
    return f"ranks {shown} and {left} more" if left else f"ranks {shown}"
