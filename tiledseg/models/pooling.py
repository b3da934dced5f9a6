"""Where maxima lie, and putting values back there: indices that do not depend on how an image is cut.

torch's indices count the pixels of the tensor at hand, so those of a block are others than those of the image, and take
8 bytes each. Here an index counts the positions of its own window, row by row, in one byte.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tiledseg.geometry import resampling as geometry
from tiledseg.geometry.layer import Layer
from tiledseg.models.block import BlockModule, Place
from tiledseg.models.normalise import Ranks

Pair = tuple[int, int]


class MaxIndices(BlockModule):
    """The position of each maximum in its window, uint8; of equal values the first, as torch's pooling takes it.

    A window that reaches over the image's border counts its positions there too. A block's windows are the image's.
    """

    fill = float("-inf")

    def __init__(self, kernel: int, stride: int, padding: int, dilation: int) -> None:
        super().__init__()
        self.sizes = kernel, stride, padding, dilation

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self._found(x_BCHW, (self.sizes[2],) * 2)

    @property
    def description(self) -> Layer:
        return geometry.MaxIndices(*self.sizes)

    def on_block(self, place: Place, ranks: Ranks, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        return self._found(x_BCHW, place.own_padding((self.sizes[2],) * 2))

    def _found(self, x_BCHW: torch.Tensor, padding: Pair) -> torch.Tensor:
        kernel, stride, _, dilation = self.sizes
        return max_indices(x_BCHW, kernel, stride, padding, dilation)


def max_indices(x_BCHW: torch.Tensor, kernel: int, stride: int, padding: Pair, dilation: int) -> torch.Tensor:
    """See `MaxIndices`; `padding` (row, col)."""
    with torch.no_grad():
        found_BCHW = functional.max_pool2d(x_BCHW, kernel, stride, padding, dilation, return_indices=True)[1]
        rows_H, cols_W = (
            torch.arange(size, device=x_BCHW.device) * stride - before
            for size, before in zip(found_BCHW.shape[2:], padding, strict=True)
        )
        row = (found_BCHW // x_BCHW.shape[3] - rows_H[:, None]) // dilation
        col = (found_BCHW % x_BCHW.shape[3] - cols_W) // dilation
        return (row * kernel + col).to(torch.uint8).contiguous(memory_format=torch.channels_last)


class MaxUnpool(BlockModule):
    """Each value at its index in its window of kernel x kernel outputs, zeros elsewhere."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x_BCHW: torch.Tensor, indices_BCHW: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Unpooled.apply(x_BCHW, indices_BCHW, self.kernel)
        return result

    @property
    def description(self) -> Layer:
        return geometry.MaxUnpool(self.kernel)

    def on_block(self, place: Place, ranks: Ranks, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        return place.crop_given(self(x_BCHW, *others_BCHW), self.kernel)


class _Unpooled(torch.autograd.Function):
    """Keeps the indices only. Backward picks each value's gradient from its place."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: torch.Tensor, indices_BCHW: torch.Tensor, kernel: int) -> torch.Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(indices_BCHW)
        batch, channels, height, width = x_BCHW.shape
        y_BCHW = torch.empty(
            (batch, channels, height * kernel, width * kernel),
            dtype=x_BCHW.dtype,
            device=x_BCHW.device,
            memory_format=torch.channels_last,
        )
        for place, part in _places(y_BCHW, kernel):
            part.copy_(torch.where(indices_BCHW == place, x_BCHW, x_BCHW.new_zeros(())))
        return y_BCHW

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BCHW: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (indices_BCHW,) = ctx.saved_tensors
        dx_BCHW = torch.zeros_like(indices_BCHW, dtype=g_BCHW.dtype)
        for place, part in _places(g_BCHW, ctx.kernel):
            torch.where(indices_BCHW == place, part, dx_BCHW, out=dx_BCHW)
        return dx_BCHW, None, None


def _places(y_BCHW: torch.Tensor, kernel: int) -> list[tuple[int, torch.Tensor]]:
    """For each position in a window, the pixels there of all windows, as a view."""
    return [(place, y_BCHW[:, :, place // kernel :: kernel, place % kernel :: kernel]) for place in range(kernel**2)]
