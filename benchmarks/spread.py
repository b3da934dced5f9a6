"""Medians with their spread, and tables of them in markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Of several measurements of one thing."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} - {self.most:.3g})"


def ratios(values: Sequence[float], bases: Sequence[float]) -> Spread:
    """values / bases of neighbouring passes, pair by pair."""
    return Spread.of([value / base for value, base in zip(values, bases, strict=True)])


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
