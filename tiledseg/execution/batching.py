"""Up to where several tiles at once are faster than one by one: what only a device can tell."""

from __future__ import annotations

import torch

# Pixels of a batch. Of a CPU measured by `python -m benchmarks.batches` (docs/plan.md); of a GPU assumed.
_PAYING = {"cpu": 1 << 16, "cuda": 1 << 20}


def batch_pixels(device: torch.device) -> int:
    """The most pixels of a batch of tiles, halos included, that is faster than its tiles one by one; 0: none is."""
    return _PAYING.get(device.type, 0)
