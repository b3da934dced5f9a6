"""Why one run takes less time than another: the terms of the cost model that differ."""

from __future__ import annotations

from tiledseg.planning.cost_model.step_time import StepTime
from tiledseg.planning.search.price import Priced

TERMS = {
    "forward": "computing forward",
    "backward": "computing backward",
    "loss": "the loss",
    "reading": "reading",
    "gradients": "adding up gradients",
    "update": "the optimizer",
    "copies": "copies of exchanges",
    "again": "computing once more, and the store",
    "messages": "messages",
    "norms": "sums of norms",
    "all_reduce": "the all-reduce",
    "waiting": "waiting in the pipeline",
}
_LEAST = 0.02  # of the difference of both: terms that make up less of it are not named


def differences(one: StepTime, other: StepTime) -> list[tuple[str, float]]:
    """The terms in words with the seconds that `one` takes more of each, the largest difference first."""
    found = [(TERMS[name], mine - theirs) for name, mine, theirs in zip(TERMS, one, other, strict=True)]
    return sorted(((name, more) for name, more in found if more), key=lambda each: -abs(each[1]))


def explained(winner: Priced, other: Priced) -> str:
    """One line: both, and which terms make the difference."""
    apart = other.seconds - winner.seconds
    named = [
        f"{'+' if more > 0 else '-'}{1000 * abs(more):.4g} ms of {name}"
        for name, more in differences(winner.time, other.time)
        if abs(more) >= _LEAST * max(apart, 1e-9)
    ][:4]
    less = f"{100 * apart / other.seconds:.2g} % less than"
    return (
        f"{winner.in_words} takes {1000 * winner.seconds:.4g} ms a step, {less} {other.in_words} "
        f"({1000 * other.seconds:.4g} ms): {', '.join(named) or 'no term differs'}"
    )
