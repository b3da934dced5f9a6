"""A part of a tensor, whose gradient comes back in the tensor's own layout.

torch gives the gradient of a slice in rows of channels, whatever lies in memory: zeros, and a copy that turns it over,
once for each dim; and the layers before it go on so. By strides it is one copy into zeros that lie as the tensor does:
16 channels of 400 x 400 px, channels last, 0.6 ms in place of 11.5.
"""

from __future__ import annotations

import torch


def cropped(x_BCHW: torch.Tensor, rows: slice, cols: slice) -> torch.Tensor:
    """A view of these rows and columns, or the tensor itself where that is all; values and gradient are those of
    the slices."""
    part_BCHW = x_BCHW[:, :, rows, cols]
    if part_BCHW.shape == x_BCHW.shape:
        return x_BCHW
    if not (torch.is_grad_enabled() and x_BCHW.requires_grad) or torch.compiler.is_compiling():
        return part_BCHW  # of an exported network too, whose format has no strides
    return x_BCHW.as_strided(part_BCHW.shape, part_BCHW.stride(), part_BCHW.storage_offset())
