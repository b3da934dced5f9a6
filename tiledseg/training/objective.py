"""The loss, as two sums: of losses and of weights, over the valid pixels of a tile's core.

Kept apart, sums add up over tiles and ranks to those of the whole raster; an average of averages would not. A tile
without a valid pixel gives (0, 0), not NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

Sums = tuple[torch.Tensor, torch.Tensor]


class Objective(Protocol):
    """What a network is trained for."""

    @property
    def margin(self) -> int:
        """Pixels around a tile's core whose labels it looks at."""

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        """(sum of losses, sum of weights), float64 scalars, of a network's outputs, float, on some pixels.

        The loss of a step is the one over the other, of all its tiles. Without class weights a valid pixel has
        weight 1. `target_BHW`: integer classes of these and of `margin` pixels around them; -1 beyond the raster.
        """


@dataclass(frozen=True)
class ClassObjective:
    """The cross-entropy of classes; `ignore_index` where a pixel counts nowhere; `weights` of the classes, all 1 where
    there are none."""

    ignore_index: int
    margin: int = 0
    weights: tuple[float, ...] = ()

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        return cross_entropy_sums(outputs_BKHW[0], target_BHW, self.ignore_index, self.weights)


def cross_entropy_sums(
    logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int, weights: tuple[float, ...] = ()
) -> Sums:
    """(sum of w * cross-entropy, sum of w), both float64 scalars: w is the weight of a valid pixel's class, or 1.

    `logits_BKHW` float; `target_BHW` integer classes, `ignore_index` where a pixel counts nowhere. The sum is taken in
    float64 so that the loss line does not depend on how the raster was cut.
    """
    losses_P = cross_entropies(logits_BKHW, target_BHW, ignore_index, weights)
    return losses_P.sum(dtype=torch.float64), weights_of(target_BHW, ignore_index, weights)


def cross_entropies(
    logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int, weights: tuple[float, ...] = ()
) -> torch.Tensor:
    """Of each pixel, image by image and row by row, times its class's weight; 0 where it counts nowhere."""
    # Pixels as rows: the two-dim form of the loss has deterministic kernels on every device.
    logits_PK = logits_BKHW.permute(0, 2, 3, 1).reshape(-1, logits_BKHW.shape[1])
    target_P = target_BHW.reshape(-1).long()
    weights_K = logits_PK.new_tensor(weights) if weights else None
    return functional.cross_entropy(logits_PK, target_P, weights_K, ignore_index=ignore_index, reduction="none")


def weights_of(target_BHW: torch.Tensor, ignore_index: int, weights: tuple[float, ...]) -> torch.Tensor:
    """The sum of the weights of all valid pixels, their number where classes have none: a float64 scalar."""
    if not weights:
        return (target_BHW != ignore_index).sum(dtype=torch.float64)
    table = torch.zeros(256, dtype=torch.float64, device=target_BHW.device)
    table[: len(weights)] = table.new_tensor(weights)
    table[ignore_index] = 0.0
    return table[target_BHW.long()].sum()
