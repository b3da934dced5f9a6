"""What a convolution is told besides its tensors, and torch's gradients of one so told."""

from __future__ import annotations

from typing import NamedTuple

import torch

Pair = tuple[int, ...]


class How(NamedTuple):
    """As torch's `conv2d` is told, or `conv_transpose2d`; in one group."""

    stride: Pair
    padding: Pair
    dilation: Pair
    transposed: bool = False

    @property
    def dense(self) -> bool:
        """Whether every pixel of the input is read by pixels beside each other."""
        return self.stride == self.dilation == (1, 1)


def gradients(
    g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, weight: torch.Tensor, how: How, wanted: list[bool]
) -> tuple[torch.Tensor, ...]:
    """torch's, of input, weight and bias, of a convolution that is not transposed."""
    options = list(how.stride), list(how.padding), list(how.dilation), False, [0, 0], 1
    made: tuple[torch.Tensor, ...] = torch.ops.aten.convolution_backward(g_BCHW, x_BCHW, weight, None, *options, wanted)
    return made
