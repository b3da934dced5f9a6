"""The loss of a step, from sums over the valid pixels of the cores of its tiles.

Kept apart, sums add up over tiles and ranks to those of the whole raster; an average of averages would not. A tile
without a valid pixel gives zeros, not NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Protocol, runtime_checkable

import torch

from tiledseg.records import dataclass
from tiledseg.training.losses.pixel_losses import cross_entropies, focal_losses, weights_of

Sums = tuple[torch.Tensor, ...]


class Objective(Protocol):
    """What a network is trained for."""

    @property
    def margin(self) -> int:
        """Pixels around a tile's core whose labels it looks at."""

    @property
    def in_words(self) -> str:
        """Its terms and what each counts, for the labels of curves."""

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        """(sum of losses, sum of weights, ...), float64, of a network's outputs, float, on some pixels; the first
        two are scalars.

        The loss of a step is the one over the other, of all its tiles, unless it is a `Ratios`. Without class weights a
        valid pixel has weight 1. `target_BHW`: integer classes of these and of `margin` pixels around them; -1 beyond
        the raster.
        """


@runtime_checkable
class Ratios(Objective, Protocol):
    """An objective whose loss is no single sum over another."""

    @property
    def size(self) -> int:
        """How many numbers `sums` gives."""

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        """The loss of a step, of all numbers that `sums` gives, float64, summed over its tiles; differentiable. None
        where the step has no pixel that counts."""


@dataclass(frozen=True)
class PixelTerms:
    """Losses of single pixels and what each counts; `gamma` of the focal loss, `smoothing` of the cross-entropy."""

    cross_entropy: float = 1.0
    focal: float = 0.0
    gamma: float = 2.0
    smoothing: float = 0.0

    @property
    def in_words(self) -> str:
        smoothed = f" (labels smoothed by {self.smoothing:g})" if self.smoothing else ""
        terms = ((self.cross_entropy, f"cross-entropy{smoothed}"), (self.focal, f"focal (gamma {self.gamma:g})"))
        return " + ".join(counted(factor, name) for factor, name in terms if factor)


@dataclass(frozen=True)
class ClassObjective:
    """Losses of classes, pixel by pixel; `ignore_index` where a pixel counts nowhere; `weights` of the classes, all 1
    where there are none."""

    ignore_index: int
    margin: int = 0
    weights: tuple[float, ...] = ()
    terms: PixelTerms = field(default_factory=PixelTerms)

    @property
    def in_words(self) -> str:
        return class_weighted(self.terms.in_words, self.weights)

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        return pixel_sums(outputs_BKHW[0], target_BHW, self.ignore_index, self.weights, self.terms)


def counted(factor: float, name: str) -> str:
    """A term of a loss and what it counts."""
    return name if factor == 1 else f"{factor:g} {name}"


def class_weighted(terms: str, weights: Sequence[float]) -> str:
    """Terms of a loss in which classes have weights, or have none."""
    if not weights:
        return terms
    return f"class-weighted ({terms})" if " + " in terms else f"class-weighted {terms}"


def pixel_sums(
    logits_BKHW: torch.Tensor,
    target_BHW: torch.Tensor,
    ignore_index: int,
    weights: tuple[float, ...] = (),
    terms: PixelTerms | None = None,
) -> Sums:
    """(sum of w * loss, sum of w), both float64 scalars: w is the weight of a valid pixel's class, or 1.

    `logits_BKHW` float; `target_BHW` integer classes, `ignore_index` where a pixel counts nowhere. The sum is taken in
    float64 so that the loss line does not depend on how the raster was cut.
    """
    found, terms = [], terms or PixelTerms()
    if terms.cross_entropy:
        losses_P = cross_entropies(logits_BKHW, target_BHW, ignore_index, weights, terms.smoothing)
        found.append((terms.cross_entropy, losses_P))
    if terms.focal:
        found.append((terms.focal, focal_losses(logits_BKHW, target_BHW, ignore_index, weights, terms.gamma)))
    total = logits_BKHW.new_zeros((), dtype=torch.float64)
    for factor, losses_P in found:
        summed = losses_P.sum(dtype=torch.float64)
        total = total + (summed if factor == 1 else factor * summed)
    return total, weights_of(target_BHW, ignore_index, weights)


def cross_entropy_sums(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int) -> Sums:
    """(sum of cross-entropies, number of valid pixels): see `pixel_sums`."""
    return pixel_sums(logits_BKHW, target_BHW, ignore_index)
