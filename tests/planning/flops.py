"""torch's counter of floating-point operations, with the two kernels of oneDNN that it does not know."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    transposed = torch.ops.mkldnn._convolution_transpose_pointwise
    return FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.mkldnn_convolution: _convolution, transposed: _transposed}
    )


def _convolution(x: Sequence[int], weight: Sequence[int], *rest: object, out_shape: Sequence[int], **_: object) -> int:
    """Two for each weight that an output value sees: shapes (B, C, H, W), (K, C, rows, cols) and (B, K, H', W')."""
    return 2 * math.prod(out_shape) * math.prod(weight[1:])


def _transposed(x: Sequence[int], weight: Sequence[int], *rest: object, **_: object) -> int:
    """Two for each weight that an input value meets: shapes (B, C, H, W) and (C, K, rows, cols)."""
    return 2 * math.prod(x) * math.prod(weight[1:])
