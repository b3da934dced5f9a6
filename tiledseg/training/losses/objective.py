"""The loss of a step, from sums over the valid pixels of the cores of its tiles.

Kept apart, sums add up over tiles and ranks to those of the whole raster; an average of averages would not. A tile
without a valid pixel gives zeros, not NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch.nn import functional

from tiledseg.models.sending import fixed

Sums = tuple[torch.Tensor, ...]


class Objective(Protocol):
    """The loss that a network is trained by."""

    @property
    def margin(self) -> int:
        """Pixels around a tile's core whose labels it looks at."""

    @property
    def in_words(self) -> str:
        """The terms and their factors, for the labels of curves."""

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        """Return (sum of losses, sum of weights, ...), float64, of a network's outputs, float, on some pixels; the
        first two are scalars.

        The loss of a step is the one over the other, of all its tiles, unless it is a `Ratios`. Without class weights a
        valid pixel has weight 1. `target_BHW`: integer classes of these and of `margin` pixels around; -1 beyond the
        raster.
        """


@runtime_checkable
class Ratios(Objective, Protocol):
    """An objective whose loss is no single sum over another."""

    @property
    def size(self) -> int:
        """The number of values that `sums` returns."""

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        """Return the loss of a step from the values of `sums`, float64, summed over its tiles; differentiable. None if
        the step has no pixel that counts."""


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
    """Return the words for a term of a loss with its factor."""
    return name if factor == 1 else f"{factor:g} {name}"


def class_weighted(terms: str, weights: Sequence[float]) -> str:
    """Return the words for terms of a loss in which classes have weights, or have none."""
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
    """Return (sum of w * loss, sum of w), both float64 scalars: w is the weight of a valid pixel's class, or 1.

    `logits_BKHW` float; `target_BHW` integer classes, `ignore_index` where a pixel counts nowhere. The sum is taken in
    float64 so that the loss line does not depend on how the raster was cut.
    """
    parts, terms = [], terms or PixelTerms()
    if terms.cross_entropy:
        losses_P = cross_entropies(logits_BKHW, target_BHW, ignore_index, weights, terms.smoothing)
        parts.append((terms.cross_entropy, losses_P))
    if terms.focal:
        parts.append((terms.focal, focal_losses(logits_BKHW, target_BHW, ignore_index, weights, terms.gamma)))
    total = logits_BKHW.new_zeros((), dtype=torch.float64)
    for factor, losses_P in parts:
        summed = losses_P.sum(dtype=torch.float64)
        total = total + (summed if factor == 1 else factor * summed)
    return total, weights_of(target_BHW, ignore_index, weights)


def cross_entropy_sums(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int) -> Sums:
    """Return (sum of cross-entropies, number of valid pixels): see `pixel_sums`."""
    return pixel_sums(logits_BKHW, target_BHW, ignore_index)


_FEW = 8  # classes up to which a CPU is two to six times as fast by planes (2.13)
_VECTORS = 64  # pixels
_TINY = 1e-30  # under a power below 1: at 0 its slope would be infinite


def cross_entropies(
    logits_BKHW: torch.Tensor,
    target_BHW: torch.Tensor,
    ignore_index: int,
    weights: tuple[float, ...] = (),
    smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross-entropy of each pixel, row by row, times its class's weight, as torch's `cross_entropy`.

    With `smoothing` s the label is 1 - s + s/K for its class and s/K for each other of K classes (Szegedy et al., 2016,
    section 7). Each class's part has its own weight, as in torch.
    """
    by_planes = logits_BKHW.device.type == "cpu" and logits_BKHW.shape[1] <= _FEW
    logits, target = (_planes if by_planes else _rows)(logits_BKHW, target_BHW)
    weights_K = fixed(weights, logits.dtype, logits.device) if weights else None
    losses = functional.cross_entropy(
        logits, target, weights_K, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
    )
    return losses.reshape(-1)[: target_BHW.numel()]


def focal_losses(
    logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int, weights: tuple[float, ...], gamma: float
) -> torch.Tensor:
    """Return -w (1 - p)^gamma log p of each pixel, p: the probability of its class (Lin et al., 2017, equation 5)."""
    entropies_P = cross_entropies(logits_BKHW, target_BHW, ignore_index)
    losses_P = (-torch.expm1(-entropies_P)).clamp_min(_TINY) ** gamma * entropies_P
    if not weights:
        return losses_P
    return losses_P * _table(target_BHW, ignore_index, weights)[target_BHW.reshape(-1).long()].to(losses_P.dtype)


def weights_of(target_BHW: torch.Tensor, ignore_index: int, weights: tuple[float, ...]) -> torch.Tensor:
    """Sum the weights of all valid pixels, or count them if classes have no weights: a float64 scalar."""
    if not weights:
        return (target_BHW != ignore_index).sum(dtype=torch.float64)
    return _table(target_BHW, ignore_index, weights)[target_BHW.long()].sum()


def _table(target_BHW: torch.Tensor, ignore_index: int, weights: tuple[float, ...]) -> torch.Tensor:
    """Return the weight of every uint8 class number, float64."""
    counted = [*weights, *(0.0,) * (256 - len(weights))]
    counted[ignore_index] = 0.0
    return fixed(tuple(counted), torch.float64, target_BHW.device)


def _rows(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels as rows: the two-dim form of the loss has deterministic kernels on every device."""
    return logits_BKHW.permute(0, 2, 3, 1).reshape(-1, logits_BKHW.shape[1]), target_BHW.reshape(-1).long()


def _planes(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row a class, filled up to whole vectors of pixels: a kernel computes the rest by another exponential,
    and a loss would depend on the tile's size."""
    logits_KP, target_P = logits_BKHW.transpose(0, 1).flatten(1), target_BHW.flatten().long()
    spare = -len(target_P) % _VECTORS
    if spare:
        logits_KP, target_P = (functional.pad(each, (0, spare)) for each in (logits_KP, target_P))
    return logits_KP[None], target_P[None]


DICE = 0.5
"""Both weights of the Tversky index with which it is Dice's."""


class Tversky(NamedTuple):
    """A term of the loss: how much it counts, and the weights of pixels wrongly in a class, and wrongly not in it."""

    factor: float
    alpha: float
    beta: float

    @property
    def in_words(self) -> str:
        return "Dice" if self.alpha == self.beta == DICE else f"Tversky ({self.alpha:g}, {self.beta:g})"


@dataclass(frozen=True)
class OverlapObjective:
    """Losses of the overlap of classes, `overlaps`, beside those of single pixels, `pixelwise`, whose class weights
    hold for both. They are ratios of sums over all valid pixels of a step, as if it were one image.

    Let T be the pixels of class k, P the sum of its probabilities, and I that sum over its pixels. The Tversky index of
    k (Salehi et al., 2017) is I / (I + alpha (P - I) + beta (T - I)). With alpha = beta = 1/2 it is Dice's, 2 I / (P +
    T) (Milletari et al., 2016, with plain sums). The loss is 1 - the weighted mean of the indices of the classes that
    the step has pixels of. A ratio's gradient needs the sums of the whole step, which `StepLoss` takes first. Given
    these the loss is linear in each pixel's part, so tiles and ranks add up to the gradient of the whole.
    """

    pixelwise: ClassObjective
    classes: int
    overlaps: tuple[Tversky, ...]

    @property
    def margin(self) -> int:
        return self.pixelwise.margin

    @property
    def in_words(self) -> str:
        pixels = [self.pixelwise.terms.in_words] if self.pixelwise.terms.in_words else []
        terms = " + ".join([*pixels, *(counted(o.factor, o.in_words) for o in self.overlaps)])
        return class_weighted(terms, self.pixelwise.weights)

    @property
    def size(self) -> int:
        return 2 + 3 * self.classes

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        """Return (sum of losses, sum of weights, I_K, P_K, T_K)."""
        logits_PK = outputs_BKHW[0].permute(0, 2, 3, 1).reshape(-1, self.classes)
        target_P = target_BHW.reshape(-1).long()
        valid_P = target_P != self.pixelwise.ignore_index
        shares_PK = logits_PK.softmax(1) * valid_P[:, None]
        labels_PK = target_P[:, None] == torch.arange(self.classes, device=target_P.device)
        return (
            *self.pixelwise.sums(outputs_BKHW, target_BHW),
            (shares_PK * labels_PK).sum(0, dtype=torch.float64),
            shares_PK.sum(0, dtype=torch.float64),
            labels_PK.sum(0, dtype=torch.float64),
        )

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        loss, weight = totals[:2]
        inside_K, shares_K, labels_K = totals[2:].view(3, self.classes)
        present_K = labels_K.detach() > 0
        weights_K = present_K * labels_K.new_tensor(self.pixelwise.weights or (1.0,) * self.classes)
        if not bool(weights_K.sum() > 0):
            return None
        total = loss / weight if bool(weight > 0) else loss
        for factor, alpha, beta in self.overlaps:
            below_K = inside_K + alpha * (shares_K - inside_K) + beta * (labels_K - inside_K)
            index_K = inside_K / torch.where(present_K, below_K, torch.ones_like(below_K))
            total = total + factor * (1 - (weights_K * index_K).sum() / weights_K.sum())
        return total
