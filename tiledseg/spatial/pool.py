"""Pooling of a rank's block: windows that lie across an edge belong to one rank, which has the pixels they need."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.resampling import AveragePool, MaxPool, Pool
from tiledseg.models.layers.block import BlockPlace, DimPlace
from tiledseg.models.layers.pooling import max_pool, pair
from tiledseg.models.sending import sent
from tiledseg.spatial.place import SpatialLayer


class SpatialMaxPool(SpatialLayer):
    """Max pooling with any kernel, stride, padding and dilation. Its padding is minus infinity, not zero."""

    fill = float("-inf")

    def __init__(self, name: str, module: nn.MaxPool2d) -> None:
        _refuse_ceil(name, module.ceil_mode)
        if module.return_indices:
            raise ConfigError(
                f"layer '{name}' returns indices, which would be those of a block; set return_indices off, or take "
                "MaxIndices"
            )
        kernel, stride, padding = pair(module.kernel_size), pair(module.stride), pair(module.padding)
        dilation = pair(module.dilation)
        row, col = (MaxPool(kernel[d], stride[d], padding[d], dilation[d]) for d in (0, 1))
        self.descriptions = row, col
        self._sizes = kernel, stride, padding, dilation

    def __call__(self, place: BlockPlace, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        kernel, stride, padding, dilation = self._sizes
        return max_pool(x_BCHW, (kernel, stride, place.own_padding(padding), dilation))


class SpatialAveragePool(SpatialLayer):
    """Average pooling with any kernel, stride and padding, which counts as zeros or not at all."""

    def __init__(self, name: str, module: nn.AvgPool2d) -> None:
        _refuse_ceil(name, module.ceil_mode)
        kernel, stride, padding = pair(module.kernel_size), pair(module.stride), pair(module.padding)
        self._row, self._col = (AveragePool(kernel[d], stride[d], padding[d]) for d in (0, 1))
        self.descriptions = self._row, self._col
        self._sizes = kernel, stride, padding
        self._divisor = module.divisor_override
        self._counts_inside_only = not module.count_include_pad and max(padding) > 0 and self._divisor is None

    def __call__(self, place: BlockPlace, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        kernel, stride, padding = self._sizes
        divisor = 1 if self._counts_inside_only else self._divisor
        y_BCHW = functional.avg_pool2d(
            x_BCHW, kernel, stride, place.own_padding(padding), count_include_pad=True, divisor_override=divisor
        )
        if not self._counts_inside_only:
            return y_BCHW
        dims = (self._row, place.row), (self._col, place.col)
        rows_H, cols_W = (sent(_inside(pool, dim), y_BCHW.device).to(y_BCHW.dtype) for pool, dim in dims)
        return y_BCHW / (rows_H[:, None] * cols_W[None, :])


def _inside(pool: Pool, place: DimPlace) -> torch.Tensor:
    """Count the positions of each given window lie within the tensor."""
    whole = Interval(0, place.sizes[0])
    windows = (pool.required_input(Interval(o, o + 1)) for o in range(place.given.start, place.given.stop))
    return torch.tensor([window.clip(whole).size for window in windows], dtype=torch.float64)


def _refuse_ceil(name: str, ceil_mode: bool) -> None:
    if ceil_mode:
        raise ConfigError(
            f"layer '{name}' pools with ceil_mode, whose last windows hang over the image; set it to False"
        )
