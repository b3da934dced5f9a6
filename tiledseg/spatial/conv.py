"""Convolutions of a rank's block: halo instead of padding, padding at the image's border only.

Neither communicates: what they read has been brought by the exchange before them. Weight gradients are this rank's
part; the sum over ranks is that of the undivided layer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tiledseg.errors import ConfigError
from tiledseg.geometry.layer import Convolution, Layer, TransposedConvolution
from tiledseg.spatial.place import Place


class SpatialConvolution:
    """A convolution with any kernel, stride, dilation, groups and zero padding (also `same` with even kernels)."""

    fill = 0.0

    def __init__(self, name: str, module: nn.Conv2d) -> None:
        if module.padding_mode != "zeros":
            raise ConfigError(
                f"layer '{name}' pads with '{module.padding_mode}', not zeros: it cannot be tiled exactly"
            )
        self._module = module
        self._row, self._col = _describe(name, module, 0), _describe(name, module, 1)
        self.descriptions: tuple[Layer, Layer] = self._row, self._col

    def __call__(self, x_BCHW: torch.Tensor, place: Place) -> torch.Tensor:
        m = self._module
        row, col = self._row, self._col
        # A dim that is not cut keeps the layer's own padding; of uneven padding the odd zero is put there first.
        extra = (col.extra if place.col.whole else 0, row.extra if place.row.whole else 0)
        if any(extra):
            x_BCHW = functional.pad(x_BCHW, (0, extra[0], 0, extra[1]))
        padding = (row.padding if place.row.whole else 0, col.padding if place.col.whole else 0)
        return functional.conv2d(x_BCHW, m.weight, m.bias, m.stride, padding, m.dilation, m.groups)


def _describe(name: str, module: nn.Conv2d, dim: int) -> Convolution:
    kernel, stride, dilation = (getattr(module, key)[dim] for key in ("kernel_size", "stride", "dilation"))
    before = after = 0
    if module.padding == "same":
        total = dilation * (kernel - 1)
        before, after = total // 2, total - total // 2
    elif not isinstance(module.padding, str):
        before = after = module.padding[dim]
    return Convolution(name, module.out_channels, kernel, stride, before, dilation, extra=after - before)


class SpatialTransposedConvolution:
    """A transposed convolution with any kernel, stride, padding, output padding, dilation and groups."""

    fill = 0.0  # inputs beyond the tensor add nothing but keep the outputs beside them, which have a bias only

    def __init__(self, name: str, module: nn.ConvTranspose2d) -> None:
        self._module = module
        row, col = (
            TransposedConvolution(
                name,
                module.out_channels,
                module.kernel_size[dim],
                stride=module.stride[dim],
                padding=_int(module.padding[dim]),
                output_padding=module.output_padding[dim],
                dilation=module.dilation[dim],
            )
            for dim in (0, 1)
        )
        self._dims = row, col
        self.descriptions: tuple[Layer, Layer] = row, col

    def __call__(self, x_BCHW: torch.Tensor, place: Place) -> torch.Tensor:
        m = self._module
        padding, output_padding, start = [0, 0], [0, 0], [0, 0]
        for dim, (layer, at) in enumerate(zip(self._dims, (place.row, place.col), strict=True)):
            if at.whole:
                padding[dim], output_padding[dim] = layer.padding, layer.output_padding
            else:
                start[dim] = at.read.start * layer.step - layer.padding
        y_BCHW = functional.conv_transpose2d(
            x_BCHW, m.weight, m.bias, m.stride, padding, output_padding, m.groups, m.dilation
        )
        return place.crop_given(y_BCHW, (start[0], start[1]))


def _int(padding: int | str) -> int:
    assert isinstance(padding, int), "torch takes numbers only as the padding of a transposed convolution"
    return padding
