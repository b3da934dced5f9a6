"""Convolutions of a rank's block: halo instead of padding, padding at the image's border only.

The exchange before them has brought their input, so they do not communicate; but `overlapped` has the exchange within.
Weight gradients are this rank's part; their sum over the ranks is the undivided layer's.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import conv2d

from tiledseg.errors import ConfigError
from tiledseg.geometry.layers.convolutions import Convolution, TransposedConvolution
from tiledseg.geometry.sharing.decomposition import BlockExchange
from tiledseg.models.layers.block import BlockPlace
from tiledseg.models.layers.convolution import ChosenConvolution, OneDnnTransposed, convolve_transposed
from tiledseg.spatial.halo_exchange import HaloExchanger
from tiledseg.spatial.overlap import OverlapJob, OverlappedConvolution
from tiledseg.spatial.place import SpatialLayer


class SpatialConvolution(SpatialLayer):
    """A convolution with any kernel, stride, dilation, groups and zero padding (also `same` with even kernels)."""

    def __init__(self, name: str, module: nn.Conv2d) -> None:
        if module.padding_mode != "zeros":
            raise ConfigError(
                f"layer '{name}' pads with '{module.padding_mode}', not zeros, which is a node of its own: trace it"
            )
        self._module = module
        # The kernel of the module: on one rank its twin is itself, to the last bit.
        self._convolve = module.compute if isinstance(module, ChosenConvolution) else conv2d
        self._row, self._col = _describe(module, 0), _describe(module, 1)
        self.descriptions = self._row, self._col

    def can_overlap(self, place: BlockPlace) -> bool:
        """Return True if `overlapped` serves here: it has no way to put uneven padding beside a dim that is not cut."""
        return not ((place.row.whole and self._row.extra) or (place.col.whole and self._col.extra))

    def overlapped(
        self,
        x_BCHW: torch.Tensor,
        place: BlockPlace,
        exchanger: HaloExchanger,
        exchange: BlockExchange,
    ) -> torch.Tensor:
        """Compute the layer on this rank's own block `x_BCHW`, halo exchange included, which travels while the interior
        is computed. The same result but for the order of sums. Collective over the ranks of the image."""
        m = self._module
        kind = x_BCHW.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BCHW.dtype
        bias = None if m.bias is None else m.bias.to(dtype)
        padding = place.own_padding((self._row.padding, self._col.padding))
        options = (m.stride[0], m.stride[1]), padding, (m.dilation[0], m.dilation[1]), m.groups
        job = OverlapJob(exchanger, exchange, (self._row, self._col), place, self._convolve, options)
        result: torch.Tensor = OverlappedConvolution.apply(x_BCHW.to(dtype), m.weight.to(dtype), bias, job)
        return result

    def __call__(self, place: BlockPlace, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        m = self._module
        row, col = self._row, self._col
        # A dim that is not cut keeps the layer's own padding; of uneven padding the odd zero is put there first.
        extra = (col.extra if place.col.whole else 0, row.extra if place.row.whole else 0)
        if any(extra):
            x_BCHW = functional.pad(x_BCHW, (0, extra[0], 0, extra[1]))
        padding = place.own_padding((row.padding, col.padding))
        return self._convolve(x_BCHW, m.weight, m.bias, m.stride, padding, m.dilation, m.groups)


def _describe(module: nn.Conv2d, dim: int) -> Convolution:
    kernel, stride, dilation = (getattr(module, key)[dim] for key in ("kernel_size", "stride", "dilation"))
    before = after = 0
    if module.padding == "same":
        total = dilation * (kernel - 1)
        before, after = total // 2, total - total // 2
    elif not isinstance(module.padding, str):
        before = after = module.padding[dim]
    return Convolution(
        module.out_channels,
        kernel,
        stride,
        before,
        dilation,
        module.bias is not None,
        after - before,
        module.groups,
        _across(module, dim),
    )


def _across(module: nn.Conv2d | nn.ConvTranspose2d, dim: int) -> int | None:
    """Return the kernel along the other dim, where it differs."""
    return None if module.kernel_size[0] == module.kernel_size[1] else module.kernel_size[1 - dim]


class SpatialTransposedConvolution(SpatialLayer):
    """A transposed convolution with any kernel, stride, padding, output padding, dilation and groups."""

    fill = 0.0  # inputs beyond the tensor add nothing but keep the outputs beside them, which have a bias only

    def __init__(self, name: str, module: nn.ConvTranspose2d) -> None:
        self._module = module
        own = isinstance(module, OneDnnTransposed)
        self._convolve = convolve_transposed if own else functional.conv_transpose2d
        row, col = (
            TransposedConvolution(
                module.out_channels,
                module.kernel_size[dim],
                module.bias is not None,
                stride=module.stride[dim],
                padding=_int(module.padding[dim]),
                output_padding=module.output_padding[dim],
                dilation=module.dilation[dim],
                groups=module.groups,
                across=_across(module, dim),
            )
            for dim in (0, 1)
        )
        self._dims = row, col
        self.descriptions = row, col

    def __call__(self, place: BlockPlace, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        m = self._module
        padding, output_padding, start = [0, 0], [0, 0], [0, 0]
        for dim, (layer, at) in enumerate(zip(self._dims, (place.row, place.col), strict=True)):
            if at.whole:
                padding[dim], output_padding[dim] = layer.padding, layer.output_padding
            else:
                start[dim] = at.read.start * layer.step - layer.padding
        how = m.stride, tuple(padding), tuple(output_padding), m.groups, m.dilation
        y_BCHW = self._convolve(x_BCHW, m.weight, m.bias, *how)
        return place.crop(y_BCHW, (start[0], start[1]))


def _int(padding: int | str) -> int:
    assert isinstance(padding, int), "torch takes numbers only as the padding of a transposed convolution"
    return padding
