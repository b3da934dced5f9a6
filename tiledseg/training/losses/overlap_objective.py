"""Losses of the overlap of classes: ratios of sums over all valid pixels of a step, as if it were one image.

Of class k let T be its pixels, P the sum of its probabilities, and I that sum over its pixels. Then

- Tversky (Salehi et al., 2017): the index of k is I / (I + alpha (P - I) + beta (T - I));
- Dice (Milletari et al., 2016, with plain sums): alpha = beta = 1/2, so 2 I / (P + T).

The loss is 1 - the mean of the indices of the classes that the step has pixels of, by their weights. Classes without a
pixel are left out, so no constant is added to keep a ratio from 0 / 0.

A ratio's gradient needs the sums of the whole step: `Ratios` are asked for them first (`step_loss`). Given these, the
loss is linear in what a single pixel adds, so tiles and ranks add up to the gradient of the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiledseg.records import dataclass
from tiledseg.training.losses.objective import ClassObjective, Sums, class_weighted, counted

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
    """`overlaps`, and the losses of single pixels in `pixelwise` beside them. Weights of classes are those of
    `pixelwise`."""

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
        """(sum of losses, sum of weights, I_K, P_K, T_K)."""
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
