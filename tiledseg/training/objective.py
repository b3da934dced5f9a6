"""The loss, as two sums: of losses and of weights, over the valid pixels of a tile's core.

Kept apart, sums add up over tiles and ranks to those of the whole raster; an average of averages would not. A tile
without a valid pixel gives (0, 0), not NaN.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def cross_entropy_sums(
    logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of cross-entropies, number of valid pixels), both float64 scalars.

    `logits_BKHW` float; `target_BHW` integer classes, `ignore_index` where a pixel counts nowhere. The sum is taken in
    float64 so that the loss line does not depend on how the raster was cut.
    """
    # Pixels as rows: the two-dim form of the loss has deterministic kernels on every device.
    logits_PK = logits_BKHW.permute(0, 2, 3, 1).reshape(-1, logits_BKHW.shape[1])
    target_P = target_BHW.reshape(-1).long()
    losses_P = functional.cross_entropy(logits_PK, target_P, ignore_index=ignore_index, reduction="none")
    return losses_P.sum(dtype=torch.float64), (target_P != ignore_index).sum(dtype=torch.float64)
