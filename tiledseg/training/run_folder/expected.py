"""How long a run is going to take, said before its first step; nothing that has not been measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tiledseg.execution.progress import duration

_STEPS = 20  # of the run so far that its rate is taken from
_ONCE_MORE = 4 / 3  # forward twice: a backward pass takes two forward passes' time


def expected_time(planned: float | None, looks_first: bool, lines: Sequence[Mapping[str, Any]], left: int) -> str:
    """A sentence on a run that has `left` steps to go; empty where there are none.

    `planned`: seconds of a step's passes, by times of layers and messages that were measured on this machine, which
    with stages go forward once more where the loss `looks_first`; `lines`: of metrics of the steps done.
    """
    if not left:
        return ""
    steps = f"{left} steps" if left > 1 else "1 step"
    if planned is not None:
        seconds = planned * (_ONCE_MORE if looks_first else 1)
        return (
            f"predicted: {in_words(seconds)} a step, {duration(seconds * left)} for {steps}, by the measured times of "
            "layers and messages; reading and validation come besides"
        )
    done = [line["seconds"] for line in lines if "seconds" in line][-_STEPS:]
    if done:
        seconds = median(done)
        return (
            f"the last {len(done)} steps took {in_words(seconds)} each (median): at that rate "
            f"{duration(seconds * left)} for {steps} left"
        )
    return f"no time is predicted for {steps}: no rate is known before the first"


def in_words(seconds: float) -> str:
    """A step's time, three digits."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
