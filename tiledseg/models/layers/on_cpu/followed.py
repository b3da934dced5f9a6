"""Whether somebody follows every operation of this thread, to count them or their bytes."""

from __future__ import annotations

import torch


def is_followed() -> bool:
    """By a dispatch mode, say torch's FlopCounterMode. What a layer computes in another way, or in another thread, is
    then computed as it is described: outputs have the same bits, gradients of weights are sums in another order."""
    followers: int = torch._C._len_torch_dispatch_stack()
    return followers > 0
