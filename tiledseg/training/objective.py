"""The loss of a step: terms, each a function of sums over the valid pixels of the cores of the step's tiles.

Sums over tiles and ranks add up to the sums over the whole raster; an average of averages would not. A tile without a
valid pixel gives zeros, not NaN.

A network with edge outputs is trained by the loss of G-SCNN (Takikawa et al., 2019, section 3.3): four terms, each a
sum over pixels:

- the cross-entropy of the classes;
- `factor` times the cross-entropy of the edges. An edge pixel weighs `balance`, any other 1 - `balance`;
- `attention` times the cross-entropy of the classes, at pixels whose edge probability exceeds 0.8;
- `dual` times |z - z'| / sqrt(2), summed over classes: z is the length of the gradient of the smoothed
  probabilities, z' that of the labels.

Each term is divided by the number of valid pixels of the step; with class weights, the first and the third by the sum
of these pixels' weights. The published code divides by numbers that are known only after all tiles, too late for the
gradients. Terms that read neighbours are exact over tiles: gradients of probabilities are an output of the network's
graph, with a halo like any other. Gradients of labels use the labels around a tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.nn import functional

from tiledseg.architecture.gated_scnn import GRADIENTS, REACH
from tiledseg.memory.device import fixed, sent

Outputs = tuple[torch.Tensor, ...]
SURE = 0.8
"""Edge probability above which a pixel counts for `attention`."""
DICE = 0.5
"""The value of alpha and beta that turns the Tversky index into the Dice index."""
_FEW = 8  # most classes for which a CPU is two to six times as fast with one plane a class (torch 2.13)
_VECTORS = 64  # pixels
_TINY = 1e-30  # least base of the focal power: the slope of a power below 1 is infinite at 0
_LEAST = 1e-6  # added under the root: the slope of the root is infinite at 0


@dataclass(frozen=True)
class Term(ABC):
    """A loss of an objective. If `mean` is true, it is the sum of the pixels' losses over the sum of their weights.

    `ignore_index`: class of pixels that never count; `weights`: one for each class, empty if all are 1. `size`: number
    of its sums; `margin`: width in pixels of the border around a tile's core whose labels it reads.
    """

    ignore_index: int
    factor: float = 1.0
    weights: tuple[float, ...] = ()
    mean = True

    @property
    def size(self) -> int:
        return 2

    @property
    def margin(self) -> int:
        return 0

    @property
    @abstractmethod
    def in_words(self) -> str:
        """The loss and its factor, for the labels of curves."""

    @abstractmethod
    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        """Return the term's sums (float64) over the pixels of a network's outputs.

        `target_BHW`: integer classes of these pixels and of the margin around; -1 beyond the raster.
        """

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        """Return the loss of a step from its sums over all tiles, differentiable; None if no pixel counts."""
        return totals[0] / totals[1] if bool(totals[1] > 0) else None


@dataclass(frozen=True)
class Objective:
    """The loss that a network is trained by: the sum of its terms."""

    terms: tuple[Term, ...]

    @property
    def single(self) -> bool:
        """True if the loss is a ratio of two sums whose denominator depends on labels alone."""
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
        """Return (sum of losses, sum of weights) of a `single` objective, else the sums of each term: see `Term`."""
        each = [term.sums(outputs_BKHW, inner(target_BHW, self.margin - term.margin)) for term in self.terms]
        if self.single and len(each) > 1:
            return torch.stack([torch.stack([sums[0] for sums in each]).sum(), each[0][1]])
        return each[0] if len(each) == 1 else torch.cat(each)

    def value(self, totals: torch.Tensor) -> torch.Tensor | None:
        """Return the loss of a step from its sums over all tiles; None if no pixel counts."""
        if self.single:
            return self.terms[0].value(totals)
        parts = totals.split([term.size for term in self.terms])
        values = [term.value(part) for term, part in zip(self.terms, parts, strict=True)]
        counting = [value for value in values if value is not None]
        return torch.stack(counting).sum() if counting else None


def inner(values_BHW: torch.Tensor, margin: int) -> torch.Tensor:
    """Return the values inside a margin of so many pixels."""
    height, width = values_BHW.shape[1:]
    return values_BHW[:, margin : height - margin, margin : width - margin]


def with_factor(factor: float, name: str) -> str:
    """Return a loss's name with its factor, for the labels of curves."""
    return name if factor == 1 else f"{factor:g} {name}"


@dataclass(frozen=True)
class PixelTerm(Term):
    """The cross-entropy of each pixel, with label smoothing; with a `gamma`, the focal loss.

    `attention`: factor added where the edge probability, the network's second output, exceeds `SURE`.
    """

    gamma: float | None = None
    smoothing: float = 0.0
    attention: float = 0.0

    @property
    def in_words(self) -> str:
        smoothed = f" (labels smoothed by {self.smoothing:g})" if self.smoothing else ""
        name = f"cross-entropy{smoothed}" if self.gamma is None else f"focal (gamma {self.gamma:g})"
        prefix = "class-weighted " if self.weights else ""
        terms = (self.factor, name), (self.attention, "attention")
        return " + ".join(with_factor(factor, prefix + name) for factor, name in terms if factor)

    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        """Return the sum of losses and the sum of weights. The focal loss is -w (1 - p)^gamma log p, with p the
        probability of a pixel's class (Lin et al., 2017, equation 5)."""
        logits_BKHW, factor = outputs_BKHW[0], self.factor
        weight_BHW = None
        if self.weights:
            table = [*self.weights, *(0.0,) * (256 - len(self.weights))]  # a weight for each uint8 value
            table[self.ignore_index] = 0.0
            weight_BHW = fixed(tuple(table), torch.float64, target_BHW.device)[target_BHW.long()]
        if self.gamma is None:
            losses_P = cross_entropies(logits_BKHW, target_BHW, self.ignore_index, self.weights, self.smoothing)
        else:
            entropies_P = cross_entropies(logits_BKHW, target_BHW, self.ignore_index)
            losses_P = (-torch.expm1(-entropies_P)).clamp_min(_TINY) ** self.gamma * entropies_P
            if weight_BHW is not None:
                losses_P = losses_P * weight_BHW.reshape(-1).to(losses_P.dtype)
        if self.attention:
            sure_P = torch.sigmoid(outputs_BKHW[1].detach().reshape(-1)) > SURE
            losses_P, factor = losses_P * (self.factor + self.attention * sure_P), 1.0
        total = losses_P.sum(dtype=torch.float64)
        counts = target_BHW != self.ignore_index if weight_BHW is None else weight_BHW
        return torch.stack([total if factor == 1 else factor * total, counts.sum(dtype=torch.float64)])


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
    if logits_BKHW.device.type == "cpu" and logits_BKHW.shape[1] <= _FEW:
        # One row a class, padded to whole vectors: the kernel uses another exponential for the remainder, and the loss
        # would depend on the tile's size.
        logits, target = logits_BKHW.transpose(0, 1).flatten(1), target_BHW.flatten().long()
        spare = -len(target) % _VECTORS
        if spare:
            logits, target = (functional.pad(each, (0, spare)) for each in (logits, target))
        logits, target = logits[None], target[None]
    else:  # rows: the two-dim form of the loss has deterministic kernels on every device
        logits = logits_BKHW.permute(0, 2, 3, 1).reshape(-1, logits_BKHW.shape[1])
        target = target_BHW.reshape(-1).long()
    weights_K = fixed(weights, logits.dtype, logits.device) if weights else None
    losses = functional.cross_entropy(
        logits, target, weights_K, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
    )
    return losses.reshape(-1)[: target_BHW.numel()]


@dataclass(frozen=True)
class OverlapTerm(Term):
    """A loss of the overlap of classes: ratios of sums over all valid pixels of a step, as if it were one image.

    Let T be the pixels of class k, P the sum of its probabilities, and I that sum over its pixels. The Tversky index of
    k (Salehi et al., 2017) is I / (I + alpha (P - I) + beta (T - I)). With alpha = beta = 1/2 it is the Dice index,
    2 I / (P + T) (Milletari et al., 2016, with plain sums). The loss is 1 - the weighted mean of the indices over the
    classes that have pixels in the step. A ratio's gradient needs the sums of the whole step, which `StepLoss` computes
    first. Then the loss is linear in each pixel's part, so gradients of tiles and ranks add up to that of the whole.
    """

    classes: int = 0
    alpha: float = DICE
    beta: float = DICE
    mean = False

    @property
    def size(self) -> int:
        return 3 * self.classes

    @property
    def in_words(self) -> str:
        name = "Dice" if self.alpha == self.beta == DICE else f"Tversky ({self.alpha:g}, {self.beta:g})"
        return with_factor(self.factor, f"class-weighted {name}" if self.weights else name)

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


@dataclass(frozen=True)
class EdgesTerm(Term):
    """The edge terms of G-SCNN. `radius`: a pixel is an edge if another class lies within so many pixels."""

    factor: float = 20.0
    balance: float = 0.9
    radius: int = 2
    dual: float = 1.0

    @property
    def margin(self) -> int:
        return max(self.radius, REACH)

    @property
    def in_words(self) -> str:
        return " + ".join(with_factor(f, name) for f, name in ((self.factor, "edges"), (self.dual, "dual")) if f)

    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        _, edges_BCHW, gradients_BCHW = outputs_BKHW
        valid_P = (inner(target_BHW, self.margin) != self.ignore_index).reshape(-1)
        scores_P = edges_BCHW.reshape(-1)
        edge_P = edges_of(target_BHW, self.radius, self.ignore_index, self.margin).reshape(-1)
        weights_P = torch.where(edge_P, self.balance, 1 - self.balance) * valid_P
        bce_P = functional.binary_cross_entropy_with_logits(scores_P, edge_P.to(scores_P.dtype), reduction="none")
        dual_P = _dual(gradients_BCHW, target_BHW, self.ignore_index, self.margin).reshape(-1)
        losses_P = self.factor * weights_P.to(scores_P.dtype) * bce_P + self.dual * dual_P
        return torch.stack([losses_P.sum(dtype=torch.float64), valid_P.sum(dtype=torch.float64)])


def edges_of(target_BHW: torch.Tensor, radius: int, ignore_index: int, margin: int) -> torch.Tensor:
    """Return a mask of the valid pixels with another class within `radius`; the margin is cut off."""
    valid_BHW = (target_BHW >= 0) & (target_BHW != ignore_index)
    height, width = (size - 2 * margin for size in target_BHW.shape[1:])
    own_BHW, edges_BHW = inner(target_BHW, margin), inner(torch.zeros_like(valid_BHW), margin)
    for row in range(-radius, radius + 1):
        for col in range(-radius, radius + 1):
            if row**2 + col**2 <= radius**2:
                top, left = margin + row, margin + col
                part = slice(None), slice(top, top + height), slice(left, left + width)
                edges_BHW = edges_BHW | (valid_BHW[part] & (target_BHW[part] != own_BHW))
    return edges_BHW & inner(valid_BHW, margin)


def _dual(gradients_BCHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int, margin: int) -> torch.Tensor:
    """Return |z - z'| / sqrt(2), summed over classes; 0 where the filters cover a pixel without a class."""
    near_BHW = inner(target_BHW, margin - REACH)
    classes, dtype = gradients_BCHW.shape[1] // len(GRADIENTS), gradients_BCHW.dtype
    filters = sent(torch.tensor(GRADIENTS, dtype=dtype), gradients_BCHW.device)[:, None].repeat(classes, 1, 1, 1)
    # Beyond the raster there is no class: zeros, as around the probabilities.
    labels_BKHW = torch.stack([near_BHW == k for k in range(classes)], 1).to(dtype)
    known_BCHW = functional.max_pool2d((near_BHW == ignore_index).to(dtype)[:, None], 2 * REACH + 1, 1) == 0
    labels_BCHW = functional.conv2d(labels_BKHW, filters, groups=classes)
    differences_BKHW = (_lengths(gradients_BCHW) - _lengths(labels_BCHW)).abs()
    return differences_BKHW.sum(1) / 2**0.5 * known_BCHW[:, 0]


def _lengths(gradients_BCHW: torch.Tensor) -> torch.Tensor:
    """Return the root of the sum of squares of a class's two channels, by column and by row."""
    return (gradients_BCHW.unflatten(1, (-1, 2)).square().sum(2) + _LEAST).sqrt()


@dataclass(frozen=True)
class BoundaryTerm(Term):
    """The boundary loss (Kervadec et al., 2019, equation 5): probabilities times signed distances to the classes.

    A pixel's loss is the sum over classes of p_k phi_k. phi_k is the distance in pixels to the nearest pixel of class
    k. For the pixel's own class, phi_k is 1 minus the distance to the nearest pixel of another class, as in the
    published code, so the loss may be negative. Distances are cut at `radius`: a margin of that width around a tile
    makes them exact. A pixel without a label, or beyond the raster, has no class. The step's loss is the mean over its
    valid pixels; class weights do not enter.
    """

    radius: int = 8

    @property
    def margin(self) -> int:
        return self.radius

    @property
    def in_words(self) -> str:
        return with_factor(self.factor, "boundary")

    def sums(self, outputs_BKHW: Outputs, target_BHW: torch.Tensor) -> torch.Tensor:
        shares_BKHW = outputs_BKHW[0].softmax(1)
        phi_BKHW = signed_distances(target_BHW, shares_BKHW.shape[1], self.radius, self.ignore_index)
        valid_BHW = inner(target_BHW, self.radius) != self.ignore_index
        losses_BHW = (shares_BKHW * phi_BKHW.to(shares_BKHW.dtype)).sum(1) * valid_BHW
        return torch.stack([self.factor * losses_BHW.sum(dtype=torch.float64), valid_BHW.sum(dtype=torch.float64)])


def signed_distances(target_BHW: torch.Tensor, classes: int, radius: int, ignore_index: int) -> torch.Tensor:
    """Return phi_k (float32, shape (B, K, H, W)) of each pixel inside a margin of `radius`, cut at `radius`.
    `target_BHW`: negative classes lie beyond the raster. Values of pixels without a label have no meaning."""
    numbers_K = torch.arange(classes, device=target_BHW.device).view(-1, 1, 1)
    here_BKHW = (target_BHW[:, None] == numbers_K) & (target_BHW != ignore_index)[:, None]
    squares_BKHW = torch.where(here_BKHW, 0, radius**2).to(torch.int16)
    for dim in (3, 2):  # squared distances within rows, then over columns: exact Euclidean distances
        size = squares_BKHW.shape[dim] - 2 * radius
        least_BKHW = squares_BKHW.narrow(dim, radius, size).clone()
        for way in range(1, radius + 1):
            for at in (radius - way, radius + way):
                torch.minimum(least_BKHW, squares_BKHW.narrow(dim, at, size) + way**2, out=least_BKHW)
        squares_BKHW = least_BKHW
    distances_BKHW = squares_BKHW.to(torch.float32).sqrt()
    own_BKHW = here_BKHW[:, :, radius:-radius, radius:-radius]
    to_others_BHW = torch.where(own_BKHW, float(radius), distances_BKHW).amin(1)
    return torch.where(own_BKHW, 1 - to_others_BHW[:, None], distances_BKHW)
