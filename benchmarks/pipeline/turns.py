"""Contestants taking turns: each one's lines, its gradients held against the serial ones before its times count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.launching import NotRunnableError, run_job
from benchmarks.pipeline.contestants import SERIAL, Contestant
from tiledseg.errors import CommunicationError, TiledsegError

ROUNDING = {"float32": 1e-6, "float64": 1e-12}
SLACK = 2.0  # times what the serial run itself differs by from the serial run in float64

Line = dict[str, Any]


@dataclass(frozen=True)
class Turns:
    """How a turn is run: the workload's flags, the shared balance, how many turns, how long a job may take, and
    variables of everyone's environment."""

    flags: tuple[str, ...]
    balance: tuple[int, ...]
    count: int
    limit: float
    reference: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Entry:
    """The lines of a contestant, one a turn, or the reason why there are none."""

    contestant: Contestant
    lines: list[Line] = field(default_factory=list)
    reason: str | None = None


def take_turns(everyone: Sequence[Contestant], turns: Turns) -> dict[str, Entry]:
    """By name. Every other turn goes backwards, so that nobody always follows the same one.

    A peer that has failed once is not asked again. Raises TiledsegError where one of ours fails, or where its gradients
    differ by more than `bound`.
    """
    found = {contestant.name: Entry(contestant) for contestant in everyone}
    for turn in range(turns.count):
        for contestant in everyone if turn % 2 == 0 else reversed(everyone):
            entry = found[contestant.name]
            if entry.reason is None:
                _take_turn(entry, turns)
    for entry in found.values():
        check(entry, found)
    return found


def find_balance(contestant: Contestant, turns: Turns) -> tuple[int, ...]:
    """The automatic one, of a job that times nothing."""
    flags = (*turns.flags, "--repeat", "0", "--warm-up", "0")
    return tuple(run_job(contestant.command(flags, None, turns.reference), turns.limit, turns.environment)["chunks"])


def check(entry: Entry, found: dict[str, Entry]) -> None:
    """Refuses times of other gradients: raises TiledsegError for one of ours, leaves a reason at a peer."""
    if entry.reason is not None:
        return
    bound = bound_of(entry, found)
    for line in entry.lines:
        differs = line["gradients_differ_by"]
        if not differs <= bound:
            said = f"gradients differ from the serial float64 run by {differs:.1e}, more than {bound:.1e}"
            if entry.contestant.is_ours:
                raise TiledsegError(f"{entry.contestant.name}: {said}")
            entry.reason = said


def bound_of(entry: Entry, found: dict[str, Entry]) -> float:
    """What rounding may do: twice what it does to one process in the same layout."""
    serial = [
        line["gradients_differ_by"]
        for other in found.values()
        if other.contestant.program == SERIAL and other.contestant.layout == entry.contestant.layout
        for line in other.lines
    ]
    return max(ROUNDING[entry.lines[0]["dtype"]], SLACK * max(serial, default=0.0))


def _take_turn(entry: Entry, turns: Turns) -> None:
    contestant = entry.contestant
    command = contestant.command(turns.flags, turns.balance, turns.reference)
    try:
        entry.lines.append(run_job(command, turns.limit, {**turns.environment, **contestant.environment()}))
    except NotRunnableError as error:
        entry.reason = f"not runnable: {error}"
    except CommunicationError as error:
        if contestant.is_ours:
            raise
        entry.reason = f"failed: {error}"
