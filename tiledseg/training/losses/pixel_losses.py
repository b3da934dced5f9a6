"""Losses of single pixels, and the weights of their classes. All are 0 where a pixel counts nowhere."""

from __future__ import annotations

import torch
from torch.nn import functional

from tiledseg.models.sending import fixed

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
    """Of each pixel, image by image and row by row, times its class's weight, as torch's `cross_entropy`.

    With `smoothing` s the label is 1 - s + s/K for its class and s/K for each other of K classes (Szegedy et al., 2016,
    section 7); each class's part has its own weight, as in torch.
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
    """-w (1 - p)^gamma log p of each pixel, p being the probability of its class (Lin et al., 2017, equation 5)."""
    entropies_P = cross_entropies(logits_BKHW, target_BHW, ignore_index)
    losses_P = (-torch.expm1(-entropies_P)).clamp_min(_TINY) ** gamma * entropies_P
    if not weights:
        return losses_P
    return losses_P * _table(target_BHW, ignore_index, weights)[target_BHW.reshape(-1).long()].to(losses_P.dtype)


def weights_of(target_BHW: torch.Tensor, ignore_index: int, weights: tuple[float, ...]) -> torch.Tensor:
    """The sum of the weights of all valid pixels, their number where classes have none: a float64 scalar."""
    if not weights:
        return (target_BHW != ignore_index).sum(dtype=torch.float64)
    return _table(target_BHW, ignore_index, weights)[target_BHW.long()].sum()


def _table(target_BHW: torch.Tensor, ignore_index: int, weights: tuple[float, ...]) -> torch.Tensor:
    """The weight of every uint8 class number, float64."""
    counted = [*weights, *(0.0,) * (256 - len(weights))]
    counted[ignore_index] = 0.0
    return fixed(tuple(counted), torch.float64, target_BHW.device)


def _rows(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels as rows: the two-dim form of the loss has deterministic kernels on every device."""
    return logits_BKHW.permute(0, 2, 3, 1).reshape(-1, logits_BKHW.shape[1]), target_BHW.reshape(-1).long()


def _planes(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row a class, filled up to whole vectors of pixels: a kernel takes what is left of one pixel by pixel, by
    another exponential, and a loss would depend on the tile's size."""
    logits_KP, target_P = logits_BKHW.transpose(0, 1).flatten(1), target_BHW.flatten().long()
    spare = -len(target_P) % _VECTORS
    if spare:
        logits_KP, target_P = (functional.pad(each, (0, spare)) for each in (logits_KP, target_P))
    return logits_KP[None], target_P[None]
