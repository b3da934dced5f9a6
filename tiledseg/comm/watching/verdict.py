"""Who holds up a job, from what its ranks say of themselves: pure, so that every case can be tested on one rank."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from tiledseg.comm.watching.rank_names import name_ranks
from tiledseg.records import dataclass

# Shares of the deadline. Ranks notice a standstill at slightly different times; a rank whose word has not changed for
# so long, while the others' did, is stopped or gone, or holds the interpreter in a call that never returns.
STALE = 0.9
_ALL_STALE = 0.7
SILENT = 0.4
_GROUPS = 6
_WORDS = 160
_TIMES = 20
_GONE = "not answering, last in"


@dataclass(frozen=True)
class Report:
    """What a rank says of itself: `beat` counts its reports, `age` is the seconds without progress, `pace` the most of
    them in the steps before; None where it is in none, or knows too few."""

    rank: int
    host: str
    beat: int
    age: float
    waits: bool
    words: str
    ended: bool = False
    pace: float | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))


class Deadlines(NamedTuple):
    """Seconds without progress after which a job ends: `most`, and inside steps as few as `least`."""

    most: float
    least: float

    def of(self, reports: Iterable[Report]) -> float:
        """Inside steps twenty times the longest time without progress that any rank has met in steps before; `most`
        where one rank is in no step or does not know its pace. Pure: whoever reads the same reports has the same."""
        longest = 0.0
        for report in reports:
            if report.pace is None:
                return self.most
            longest = max(longest, report.pace)
        return min(self.most, max(self.least, _TIMES * longest))


def decode(text: bytes) -> Report:
    return Report(**json.loads(text))


@dataclass(frozen=True)
class Seen:
    """A report and for how many seconds the same one has been read again and again."""

    report: Report
    unchanged: float


def verdict(seen: Sequence[Seen], deadline: float) -> str | None:
    """One line that names the ranks which hold up the job and says what every rank is doing; None while one moves.

    Whoever answers and has made progress within the deadline keeps the job alive, whatever the others wait for.
    """
    silent = [one for one in seen if one.unchanged >= SILENT * deadline]
    answering = [one for one in seen if one.unchanged < SILENT * deadline]
    if any(one.report.age < _ALL_STALE * deadline for one in answering):
        return None
    busy = [one for one in answering if not one.report.waits]
    parts = _groups(silent, _GONE)
    parts += _groups(sorted(busy, key=lambda one: -one.report.age), "stuck in")
    if not parts:
        parts = ["every rank waits for another"]
    parts += _groups([one for one in answering if one.report.waits], "waiting in")
    more = [f"{len(parts) - _GROUPS} more groups"] if len(parts) > _GROUPS else []
    return (
        f"no rank has made progress for {deadline:.3g} s: {'; '.join([*parts[:_GROUPS], *more])}. Look at what the "
        "first ones do and at their machines, or raise parallel.deadline where one piece of work takes longer"
    )


def not_answering(reports: Sequence[Report]) -> str:
    """The ranks whose last reports these are, in words; empty where there are none."""
    return "; ".join(_groups([Seen(report, 0.0) for report in reports], _GONE)[:_GROUPS])


def _groups(seen: Sequence[Seen], how: str) -> list[str]:
    """Ranks that say the same together, in the order of their first."""
    groups: dict[str, list[Report]] = defaultdict(list)
    for one in seen:
        groups[one.report.words].append(one.report)
    return [f"{_who(reports)} {how}: {_short(words)}" for words, reports in groups.items()]


def _who(reports: Sequence[Report]) -> str:
    ranks = sorted(report.rank for report in reports)
    return f"rank {ranks[0]} on {reports[0].host}" if len(ranks) == 1 else name_ranks(ranks)


def _short(words: str) -> str:
    return words if len(words) <= _WORDS else words[:_WORDS] + "..."
