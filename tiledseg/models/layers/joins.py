"""Modules of several inputs that cover the same pixels, once cropped; on a block what is cropped is not brought."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiledseg.geometry.layers import joins as geometry
from tiledseg.geometry.layers.layer import Layer
from tiledseg.models.layers.block import BlockModule, BlockPlace, cropped
from tiledseg.models.normalise import Ranks


class JoinModule(BlockModule):
    """Crops each input by its number of pixels a side, and joins them."""

    kind: type[geometry.Join]

    def __init__(self, crops: Sequence[int]) -> None:
        super().__init__()
        self.crops = tuple(crops)

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return self.join([_cropped(x_BCHW, crop) for x_BCHW, crop in zip(inputs_BCHW, self.crops, strict=True)])

    @property
    def description(self) -> Layer:
        return self.kind(self.crops)

    def on_block(
        self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor
    ) -> torch.Tensor:
        return self.join([x_BCHW, *others_BCHW])

    def join(self, inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
        """Of inputs that cover the same pixels."""
        raise NotImplementedError


class ConcatenateModule(JoinModule):
    kind = geometry.Concatenate

    def join(self, inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(inputs_BCHW, dim=1)


class AddModule(JoinModule):
    kind = geometry.Add

    def join(self, inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
        total = inputs_BCHW[0]
        for x_BCHW in inputs_BCHW[1:]:
            total = total + x_BCHW
        return total


class MultiplyModule(JoinModule):
    kind = geometry.Multiply

    def join(self, inputs_BCHW: list[torch.Tensor]) -> torch.Tensor:
        one_BCHW, other_BCHW = inputs_BCHW
        return one_BCHW * other_BCHW


def _cropped(x_BCHW: torch.Tensor, crop: int) -> torch.Tensor:
    return cropped(x_BCHW, slice(crop, -crop), slice(crop, -crop)) if crop else x_BCHW
