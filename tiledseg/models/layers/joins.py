"""Modules of several inputs that cover the same pixels, once cropped; on a block what is cropped is not brought."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch

from tiledseg.geometry.layers import joins as geometry
from tiledseg.models.layers.block import BlockModule, BlockPlace, cropped
from tiledseg.models.normalise import Ranks


class JoinModule(BlockModule):
    """Crops each input by its number of pixels a side, and joins them by `join`, which `kind` describes."""

    kind: type[geometry.Join]
    join: Callable[..., torch.Tensor]

    def __init__(self, crops: Sequence[int]) -> None:
        super().__init__(self.kind(tuple(crops)))
        self.crops = tuple(crops)

    def forward(self, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return self.join([_cropped(x_BCHW, crop) for x_BCHW, crop in zip(inputs_BCHW, self.crops, strict=True)])

    def on_block(self, place: BlockPlace, ranks: Ranks, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return self.join(inputs_BCHW)


class ConcatenateModule(JoinModule):
    """Concatenates channels."""

    kind, join = geometry.Concatenate, staticmethod(partial(torch.cat, dim=1))


class AddModule(JoinModule):
    """Adds, from the first input to the last."""

    kind, join = geometry.Add, staticmethod(partial(reduce, operator.add))


class MultiplyModule(JoinModule):
    """Multiplies two inputs."""

    kind, join = geometry.Multiply, staticmethod(partial(reduce, operator.mul))


def _cropped(x_BCHW: torch.Tensor, crop: int) -> torch.Tensor:
    return cropped(x_BCHW, slice(crop, -crop), slice(crop, -crop)) if crop else x_BCHW
