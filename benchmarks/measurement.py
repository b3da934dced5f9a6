"""What the programs beside their peers share: steps timed between barriers, and the end where a peer is absent."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from benchmarks.launching import NOT_RUNNABLE


@dataclass(frozen=True)
class Spent:
    """What the timed steps have taken: seconds by the clock, and CPU seconds of all threads, the system's apart."""

    seconds: tuple[float, ...]
    user: tuple[float, ...]
    system: tuple[float, ...]

    @staticmethod
    def together(parts: Sequence[Spent]) -> Spent:
        """That of all ranks: their CPU seconds together, by the clock of the first."""
        user = map(sum, zip(*(part.user for part in parts), strict=True))
        system = map(sum, zip(*(part.system for part in parts), strict=True))
        return Spent(parts[0].seconds, tuple(user), tuple(system))

    def to_dict(self) -> dict[str, list[float]]:
        """Rounded to tenths of milliseconds, under the names of the line."""
        named = {"seconds": self.seconds, "user_seconds": self.user, "system_seconds": self.system}
        return {name: [round(value, 4) for value in values] for name, values in named.items()}


def measure(step: Callable[[], object], barrier: Callable[[], object], repeat: int, warm_up: int = 1) -> Spent:
    """Of this process, of each `step` between two barriers, after the warm-up steps: the clock waits for all ranks."""
    for _ in range(warm_up):
        step()
    stamps: list[tuple[float, ...]] = []
    for _ in range(repeat):
        barrier()
        begun = _now()
        step()
        barrier()
        stamps.append(tuple(end - begin for begin, end in zip(begun, _now(), strict=True)))
    return Spent(*(tuple(stamp[kind] for stamp in stamps) for kind in range(3)))


def _now() -> tuple[float, float, float]:
    """Seconds: of the clock, of this process as user and in the system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_utime, used.ru_stime


def short(value: float) -> float:
    """Three digits."""
    return float(f"{value:.2e}")


def not_runnable(reason: object) -> NoReturn:
    """Ends the program with exit code 3 and one line on standard error."""
    print(f"not runnable: {str(reason).splitlines()[0]}", file=sys.stderr, flush=True)
    sys.exit(NOT_RUNNABLE)
