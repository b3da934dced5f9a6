"""The loss of a step: terms, each a function of sums over the valid pixels of the cores of the step's tiles.

Kept apart, sums add up over tiles and ranks to those of the whole raster; an average of averages would not. A tile
without a valid pixel gives zeros, not NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from tiledseg.models.sending import fixed

Outputs = tuple[torch.Tensor, ...]
SURE = 0.8  # of an edge


class Term(Protocol):
    """A loss that an objective adds to others. `weights`: of the classes, none where all are 1; `size`: of its sums;
    `margin`: pixels around a tile's core whose labels it looks at; `mean`: True if it is one sum over another, which
    depends on labels and `weights` alone."""

    @property
    def weights(self) -> tuple[float, ...]: ...

    @property
    def mean(self) -> bool: ...

    @property
    def size(self) -> int: ...

    @property
    def margin(self) -> int: ...

    @property
    def in_words(self) -> str:
        """The loss and its factor, for the labels of curves."""

    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        """Return the sums, float64, of a network's outputs, float, on some pixels.

        `target_BHW`: integer classes of these and of `margin` pixels around; -1 beyond the raster.
        """

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        """Return the loss of a step from its sums over all tiles, differentiable; None if no pixel counts."""


class MeanTerm:
    """A loss that is the sum of pixels' losses over the sum of their weights."""

    mean, size = True, 2

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        return totals[0] / totals[1] if bool(totals[1] > 0) else None


@dataclass(frozen=True)
class Objective:
    """The loss that a network is trained by: the sum of its terms."""

    terms: tuple[Term, ...]

    @property
    def single(self) -> bool:
        """True if the loss is one sum over another, which depends on labels alone."""
        return all(term.mean for term in self.terms) and len({term.weights for term in self.terms}) == 1

    @property
    def size(self) -> int:
        return 2 if self.single else sum(term.size for term in self.terms)

    @property
    def margin(self) -> int:
        return max(term.margin for term in self.terms)

    @property
    def in_words(self) -> str:
        return " + ".join(term.in_words for term in self.terms)

    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        """Return (sum of losses, sum of weights) of a `single` objective, else the sums of the first term, of the
        second, ...: see `Term`."""
        each = [term.sums(outputs_BKHW, inner(target_BHW, self.margin - term.margin)) for term in self.terms]
        if self.single and len(each) > 1:
            return torch.stack([torch.stack([sums[0] for sums in each]).sum(), each[0][1]])
        return each[0] if len(each) == 1 else torch.cat(each)

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        """Return the loss of a step from its sums over all tiles; None if no pixel counts. A term whose pixels do not
        count adds nothing."""
        if self.single:
            return self.terms[0].value(totals)
        parts = totals.split([term.size for term in self.terms])
        values = [term.value(part) for term, part in zip(self.terms, parts, strict=True)]
        counting = [value for value in values if value is not None]
        return torch.stack(counting).sum() if counting else None


def inner(values_BHW: torch.Tensor, margin: int) -> torch.Tensor:
    """Return the values without a margin."""
    height, width = values_BHW.shape[1:]
    return values_BHW[:, margin : height - margin, margin : width - margin]


def counted(factor: float, name: str) -> str:
    """Return the words for a loss with its factor."""
    return name if factor == 1 else f"{factor:g} {name}"


@dataclass(frozen=True)
class PixelTerm(MeanTerm):
    """The cross-entropy of single pixels, its labels smoothed; or the focal loss where there is a `gamma`.

    `ignore_index`: class of pixels that count nowhere. `attention`: further factor where the network is sure of an
    edge, which is its second output.
    """

    ignore_index: int
    factor: float = 1.0
    weights: tuple[float, ...] = ()
    gamma: float | None = None
    smoothing: float = 0.0
    attention: float = 0.0
    margin = 0

    @property
    def in_words(self) -> str:
        smoothed = f" (labels smoothed by {self.smoothing:g})" if self.smoothing else ""
        name = f"cross-entropy{smoothed}" if self.gamma is None else f"focal (gamma {self.gamma:g})"
        prefix = "class-weighted " if self.weights else ""
        terms = (self.factor, name), (self.attention, "attention")
        return " + ".join(counted(factor, prefix + name) for factor, name in terms if factor)

    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        logits_BKHW, factor = outputs_BKHW[0], self.factor
        if self.gamma is not None:
            losses_P = focal_losses(logits_BKHW, target_BHW, self.ignore_index, self.weights, self.gamma)
        else:
            losses_P = cross_entropies(logits_BKHW, target_BHW, self.ignore_index, self.weights, self.smoothing)
        if self.attention:
            sure_P = torch.sigmoid(outputs_BKHW[1].detach().reshape(-1)) > SURE
            losses_P, factor = losses_P * (self.factor + self.attention * sure_P), 1.0
        total = losses_P.sum(dtype=torch.float64)
        weight = weights_of(target_BHW, self.ignore_index, self.weights)
        return torch.stack([total if factor == 1 else factor * total, weight])


def cross_entropy_sums(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return (sum of cross-entropies, number of valid pixels), float64."""
    return PixelTerm(ignore_index).sums((logits_BKHW,), target_BHW)


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
    if by_planes:
        logits, target = _planes(logits_BKHW, target_BHW)
    else:  # rows: the two-dim form of the loss has deterministic kernels on every device
        logits = logits_BKHW.permute(0, 2, 3, 1).reshape(-1, logits_BKHW.shape[1])
        target = target_BHW.reshape(-1).long()
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
    of_class = [*weights, *(0.0,) * (256 - len(weights))]
    of_class[ignore_index] = 0.0
    return fixed(tuple(of_class), torch.float64, target_BHW.device)


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


@dataclass(frozen=True)
class OverlapTerm:
    """A loss of the overlap of classes: ratios of sums over all valid pixels of a step, as if it were one image.

    Let T be the pixels of class k, P the sum of its probabilities, and I that sum over its pixels. The Tversky index of
    k (Salehi et al., 2017) is I / (I + alpha (P - I) + beta (T - I)). With alpha = beta = 1/2 it is Dice's, 2 I / (P +
    T) (Milletari et al., 2016, with plain sums). The loss is 1 - the weighted mean of the indices of the classes that
    the step has pixels of. A ratio's gradient needs the sums of the whole step, which `StepLoss` takes first. Given
    these the loss is linear in each pixel's part, so tiles and ranks add up to the gradient of the whole.
    """

    ignore_index: int
    classes: int
    factor: float = 1.0
    alpha: float = DICE
    beta: float = DICE
    weights: tuple[float, ...] = ()
    margin, mean = 0, False

    @property
    def size(self) -> int:
        return 3 * self.classes

    @property
    def in_words(self) -> str:
        name = "Dice" if self.alpha == self.beta == DICE else f"Tversky ({self.alpha:g}, {self.beta:g})"
        return counted(self.factor, f"class-weighted {name}" if self.weights else name)

    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        """Return I, P and T of all classes."""
        logits_PK = outputs_BKHW[0].permute(0, 2, 3, 1).reshape(-1, self.classes)
        target_P = target_BHW.reshape(-1).long()
        shares_PK = logits_PK.softmax(1) * (target_P != self.ignore_index)[:, None]
        labels_PK = target_P[:, None] == torch.arange(self.classes, device=target_P.device)
        each = shares_PK * labels_PK, shares_PK, labels_PK
        return torch.cat([values_PK.sum(0, dtype=torch.float64) for values_PK in each])

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        inside_K, shares_K, labels_K = totals.view(3, self.classes)
        present_K = labels_K.detach() > 0
        weights_K = present_K * labels_K.new_tensor(self.weights or (1.0,) * self.classes)
        if not bool(weights_K.sum() > 0):
            return None
        below_K = inside_K + self.alpha * (shares_K - inside_K) + self.beta * (labels_K - inside_K)
        index_K = inside_K / torch.where(present_K, below_K, torch.ones_like(below_K))
        return self.factor * (1 - (weights_K * index_K).sum() / weights_K.sum())
