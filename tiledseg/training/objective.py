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
        """(sum of losses, number of valid pixels), float64 scalars, of a network's outputs, float, on some pixels.

        `target_BHW`: integer classes of these and of `margin` pixels around them; -1 beyond the raster.
        """


@dataclass(frozen=True)
class ClassObjective:
    """The cross-entropy of classes; `ignore_index` where a pixel counts nowhere."""

    ignore_index: int
    margin: int = 0

    def sums(self, outputs_BKHW: tuple[torch.Tensor, ...], target_BHW: torch.Tensor) -> Sums:
        return cross_entropy_sums(outputs_BKHW[0], target_BHW, self.ignore_index)


def cross_entropy_sums(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int) -> Sums:
    """(sum of cross-entropies, number of valid pixels), both float64 scalars.

    `logits_BKHW` float; `target_BHW` integer classes, `ignore_index` where a pixel counts nowhere. The sum is taken in
    float64 so that the loss line does not depend on how the raster was cut.
    """
    losses_P = cross_entropies(logits_BKHW, target_BHW, ignore_index)
    return losses_P.sum(dtype=torch.float64), (target_BHW != ignore_index).sum(dtype=torch.float64)


def cross_entropies(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Of each pixel, image by image and row by row; 0 where it counts nowhere."""
    # Pixels as rows: the two-dim form of the loss has deterministic kernels on every device.
    logits_PK = logits_BKHW.permute(0, 2, 3, 1).reshape(-1, logits_BKHW.shape[1])
    target_P = target_BHW.reshape(-1).long()
    return functional.cross_entropy(logits_PK, target_P, ignore_index=ignore_index, reduction="none")
