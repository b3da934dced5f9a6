"""The seconds of a step by what takes them, on the rank that takes longest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

_TOGETHER = "copies", "messages", "norms", "all_reduce", "waiting"


class StepTime(NamedTuple):
    """The seconds of a step. `forward`, `backward`: of layers. `loss`: of the loss. `reading`: rasters, and preparing
    them for the network. `gradients`: adding up those of tiles. `update`: the optimizer. `copies`: of exchanges, into
    windows and out of them. `again`: computing once more, and waiting for a store, where memory is short. `messages`:
    of halos. `norms`: statistics that ranks sum. `all_reduce`: of gradients, the part that no computing hides.
    `waiting`: of a pipeline's ranks, for each other."""

    forward: float = 0.0
    backward: float = 0.0
    loss: float = 0.0
    reading: float = 0.0
    gradients: float = 0.0
    update: float = 0.0
    copies: float = 0.0
    again: float = 0.0
    messages: float = 0.0
    norms: float = 0.0
    all_reduce: float = 0.0
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        """Add up all parts."""
        return sum(self)

    def plus(self, other: StepTime) -> StepTime:
        return StepTime(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> StepTime:
        return StepTime(*(factor * part for part in self))

    def longer(self, factor: float) -> StepTime:
        """Lengthen what a rank computes alone, where so many threads share a core. The parts that ranks do together are
        known by the clock."""
        return self.times(factor)._replace(**{name: getattr(self, name) for name in _TOGETHER})


NO_TIME = StepTime()


def sum_of(times: Iterable[StepTime]) -> StepTime:
    """Add up times, one after the other."""
    return reduce(StepTime.plus, times, NO_TIME)
