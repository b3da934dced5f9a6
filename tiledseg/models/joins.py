"""Modules of several inputs that cover the same pixels, once cropped; on a rank's block they are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Join(nn.Module):
    """Crops each input by its number of pixels a side, and joins them."""

    def __init__(self, crops: Sequence[int]) -> None:
        super().__init__()
        self.crops = tuple(crops)

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return self.join([_cropped(x_BCHW, crop) for x_BCHW, crop in zip(inputs_BCHW, self.crops, strict=True)])

    def join(self, inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
        """Of inputs that cover the same pixels."""
        raise NotImplementedError


class Concatenate(Join):
    def join(self, inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(inputs_BCHW, dim=1)


class Add(Join):
    def join(self, inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
        total = inputs_BCHW[0]
        for x_BCHW in inputs_BCHW[1:]:
            total = total + x_BCHW
        return total


class Multiply(Join):
    def join(self, inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
        one_BCHW, other_BCHW = inputs_BCHW
        return one_BCHW * other_BCHW


def _cropped(x_BCHW: torch.Tensor, crop: int) -> torch.Tensor:
    return x_BCHW[:, :, crop:-crop, crop:-crop] if crop else x_BCHW
