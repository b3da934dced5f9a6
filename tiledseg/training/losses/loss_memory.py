"""What a loss needs of the memory beyond the usual one of its network: measured of the loss itself, on a small tile.

The plan counts a network's usual loss (cross-entropy; where a network gives edges, theirs) by what is known of it.
Others differ in what autograd keeps of them, and in what they make on the way: a distance to every class, say. Both
grow with the pixels, so a run on a few of them tells the rest, but for a loss that looks at labels around a tile: of a
small tile these weigh more than of a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiledseg.geometry.memory_words import LossBytes
from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.training.losses.objective import Objective, Ratios

_SIDE = 192  # of the tile: 40 ms for the largest loss of 8 classes


def further_bytes(objective: Objective, usual: Objective, channels: Sequence[int], precision: str) -> LossBytes:
    """Of each pixel, what `objective` needs more than `usual` (a negative number: less). `channels`: of the network's
    outputs."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    ours, theirs = (_measured(each, channels, dtype) for each in (objective, usual))
    return LossBytes(ours.kept - theirs.kept, ours.peak - theirs.peak)


def _measured(objective: Objective, channels: Sequence[int], dtype: torch.dtype) -> LossBytes:
    """Of each pixel: what is there when its sums are known, and at the worst moment until its gradients are, them
    included. An output counts as long as the loss keeps it, labels as they are read do not."""
    margin, pixels = objective.margin, _SIDE * _SIDE
    side = _SIDE + 2 * margin
    leaves = [torch.zeros(1, count, _SIDE, _SIDE, dtype=dtype) for count in channels]
    leaves = [leaf.contiguous(memory_format=torch.channels_last).requires_grad_() for leaf in leaves]
    target_BHW = torch.zeros(1, side, side, dtype=torch.int16 if margin else torch.uint8)
    with torch.enable_grad(), AllocationMeter([*leaves, target_BHW]) as meter:
        outputs = [leaf.clone() for leaf in leaves]
        sums = objective.sums(tuple(outputs), target_BHW)
        loss = torch.cat([part.reshape(-1) for part in sums]).sum() if isinstance(objective, Ratios) else sums[0]
        del sums, outputs
        kept, forward = meter.bytes, meter.peak
        meter.peak = kept
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    del gradients
    return LossBytes(kept / pixels, max(forward, meter.peak) / pixels)
