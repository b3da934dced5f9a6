"""Twins of layers, which compute a rank's block: with a halo in place of padding, except at the image's border.

A twin does not communicate, since the exchange before it brings its input; only `SpatialConvolution.overlapped`
includes the exchange. For a norm, each rank measures its own pixels and one sum joins them: `models.normalise` says why
it cannot deadlock. Gradients of weights are this rank's part; summed over ranks they are the undivided layer's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.comm.mesh import Axes
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers.convolutions import ONE_TIME, Convolution, TransposedConvolution
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Activation, Mark, Norm, ZeroAtZero
from tiledseg.geometry.layers.resampling import AveragePool, MaxPool, Upsample
from tiledseg.geometry.sharing.decomposition import BlockExchange
from tiledseg.memory.device import sent
from tiledseg.models.dropout import ChannelDropout, LeafDepth
from tiledseg.models.layers.block import BlockPlace
from tiledseg.models.layers.convolution import ChosenConvolution, OneDnnTransposed, convolve_transposed
from tiledseg.models.layers.pooling import average_pool, max_pool, pair
from tiledseg.models.layers.resampling import upsample
from tiledseg.models.layers.times import TimesConvolution, TimesTransposed
from tiledseg.models.norm import PixelNorm, StatisticsNorm, each_time, normed, sharing_of, takes_statistics
from tiledseg.models.normalise import NormScope, Ranks, Statistics, normalise
from tiledseg.spatial.halo_exchange import OverlapJob, OverlappedConvolution

# Layers whose output pixels depend on one input pixel each. IN_PLACE: zero at zero, and torch differentiates them by
# their output, so they can overwrite their input.
IN_PLACE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU)
ZERO_AT_ZERO = (nn.PReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Hardswish, ChannelDropout, LeafDepth)
POINTWISE = (*IN_PLACE, *ZERO_AT_ZERO, nn.Identity, nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardsigmoid, PixelNorm)


class SpatialLayer:
    """A layer that computes a rank's part of the undivided layer's output.

    `compute` returns the outputs `place.given` from the windows of its inputs (`place.read` of the first). `fill`: the
    value beyond the tensor's ends. `descriptions`: the geometry along rows and columns.
    """

    def __init__(self, compute: Callable[..., torch.Tensor], *described: Layer, fill: float = 0.0) -> None:
        self._compute, self.descriptions, self.fill = compute, (described[0], described[-1]), fill

    def __call__(self, place: BlockPlace, *inputs_BCHW: torch.Tensor) -> torch.Tensor:
        return self._compute(place, *inputs_BCHW)


def pointwise_twin(name: str, module: nn.Module) -> SpatialLayer:
    described: Layer = Layer()
    if isinstance(module, nn.Identity):
        described = Mark()
    elif isinstance(module, IN_PLACE):
        described = Activation()
    elif isinstance(module, ZERO_AT_ZERO):
        described = ZeroAtZero()
    return SpatialLayer(lambda place, x_BCHW: module(x_BCHW), described)


def upsample_twin(name: str, module: nn.Upsample) -> SpatialLayer:
    """Return a twin that upsamples by whole factors: nearest is local, bilinear reads one coarse pixel around a block,
    bicubic two. At the image's ends torch's interpolation itself repeats the last pixel."""
    mode = module.mode
    if mode not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        raise ConfigError(f"layer '{name}' upsamples '{mode}'; give nearest, bilinear or bicubic")
    scale: Any = module.scale_factor
    rows, cols = map(int, scale if isinstance(scale, tuple) else (scale, scale))
    return SpatialLayer(
        lambda place, x_BCHW: place.crop_given(upsample(x_BCHW, (rows, cols), mode), (rows, cols)),
        *(Upsample(mode.removesuffix("-exact"), factor) for factor in (rows, cols)),
    )


def max_pool_twin(name: str, module: nn.MaxPool2d) -> SpatialLayer:
    """Return a twin that pools with any kernel, stride, padding (minus infinity) and dilation. A window across an edge
    of ranks belongs to one rank, which reads all its pixels."""
    _refuse_ceil(name, module.ceil_mode)
    sizes = pair(module.kernel_size), pair(module.stride), pair(module.padding), pair(module.dilation)
    kernel, stride, padding, dilation = sizes

    def compute(place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        return max_pool(x_BCHW, (kernel, stride, place.own_padding(padding), dilation))

    return SpatialLayer(compute, *(MaxPool(*dim) for dim in zip(*sizes, strict=True)), fill=float("-inf"))


def average_pool_twin(name: str, module: nn.AvgPool2d) -> SpatialLayer:
    """Return a twin that averages with any kernel, stride and padding, counted as zeros or left out."""
    _refuse_ceil(name, module.ceil_mode)
    sizes = pair(module.kernel_size), pair(module.stride), pair(module.padding)
    kernel, stride, padding = sizes
    row, col = (AveragePool(*dim) for dim in zip(*sizes, strict=True))
    inside_only = not module.count_include_pad and max(padding) > 0 and module.divisor_override is None
    divisor = 1 if inside_only else module.divisor_override

    def compute(place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = average_pool(x_BCHW, kernel, stride, place.own_padding(padding), divisor_override=divisor)
        if not inside_only:
            return y_BCHW
        counts = []  # positions of each window that lie within the tensor
        for pool, dim in ((row, place.row), (col, place.col)):
            windows = (pool.required_input(Interval(o, o + 1)) for o in range(dim.given.start, dim.given.stop))
            inside = [window.clip(Interval(0, dim.sizes[0])).size for window in windows]
            counts.append(sent(torch.tensor(inside, dtype=torch.float64), y_BCHW.device).to(y_BCHW.dtype))
        return y_BCHW / (counts[0][:, None] * counts[1][None, :])

    return SpatialLayer(compute, row, col)


def _refuse_ceil(name: str, ceil_mode: bool) -> None:
    if ceil_mode:
        raise ConfigError(
            f"layer '{name}' pools with ceil_mode, whose last windows hang over the image; set it to False"
        )


class SpatialConvolution(SpatialLayer):
    """A convolution with any kernel, stride, dilation, groups and zero padding (also `same` with even kernels)."""

    def __init__(self, name: str, module: nn.Conv2d) -> None:
        self._module = module
        # The module's own kernel: on one rank the twin gives the same bits.
        self._convolve = module.compute if isinstance(module, ChosenConvolution) else functional.conv2d
        self._row, self._col = (_convolution_along(module, dim) for dim in (0, 1))
        super().__init__(self._convolved, self._row, self._col)

    def _convolved(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        m, row, col = self._module, self._row, self._col
        # A dim that is not cut keeps the layer's own padding. The odd zero of uneven padding is added here.
        extra = (col.extra if place.col.whole else 0, row.extra if place.row.whole else 0)
        if any(extra):
            x_BCHW = functional.pad(x_BCHW, (0, extra[0], 0, extra[1]))
        padding = place.own_padding((row.padding, col.padding))
        return self._convolve(x_BCHW, m.weight, m.bias, m.stride, padding, m.dilation, m.groups)

    def can_overlap(self, place: BlockPlace) -> bool:
        """Return True if `overlapped` can compute it: not with times, nor with uneven padding along an uncut dim."""
        uneven = (place.row.whole and self._row.extra) or (place.col.whole and self._col.extra)
        return not uneven and not isinstance(self._module, TimesConvolution)

    def overlapped(self, x_BCHW: torch.Tensor, place: BlockPlace, axes: Axes, exchange: BlockExchange) -> torch.Tensor:
        """Compute the layer on this rank's own block `x_BCHW`, with the halo exchange overlapped by the interior. The
        result differs only by the order of sums. Collective over the ranks of the image."""
        m = self._module
        kind = x_BCHW.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BCHW.dtype
        bias = None if m.bias is None else m.bias.to(dtype)
        padding = place.own_padding((self._row.padding, self._col.padding))
        options = (m.stride[0], m.stride[1]), padding, (m.dilation[0], m.dilation[1]), m.groups
        job = OverlapJob(axes, exchange, (self._row, self._col), place, self._convolve, options)
        return OverlappedConvolution.apply(x_BCHW.to(dtype), m.weight.to(dtype), bias, job)


def _convolution_along(module: nn.Conv2d, dim: int) -> Convolution:
    kernel, stride, dilation = (getattr(module, key)[dim] for key in ("kernel_size", "stride", "dilation"))
    before = after = 0
    if module.padding == "same":
        before, after = dilation * (kernel - 1) // 2, -(-dilation * (kernel - 1) // 2)
    elif not isinstance(module.padding, str):
        before = after = module.padding[dim]
    sizes = module.out_channels, kernel, stride, before, dilation
    more = after - before, module.groups, _across(module, dim), getattr(module, "times", ONE_TIME)
    return Convolution(*sizes, module.bias is not None, *more)


def _across(module: nn.Conv2d | nn.ConvTranspose2d, dim: int) -> int | None:
    """Return the kernel along the other dim, or None if it is the same."""
    return None if module.kernel_size[0] == module.kernel_size[1] else module.kernel_size[1 - dim]


def transposed_twin(name: str, module: nn.ConvTranspose2d) -> SpatialLayer:
    """Return the twin of a transposed convolution with any kernel, stride, padding, output padding, dilation and
    groups. Zeros beyond the tensor's ends add nothing, but give the outputs there, which are the bias alone."""
    m = module
    convolve = convolve_transposed if isinstance(m, OneDnnTransposed) else functional.conv_transpose2d
    if isinstance(m, TimesTransposed):
        convolve = m.compute
    padding = (int(m.padding[0]), int(m.padding[1]))
    dims = [
        TransposedConvolution(
            m.out_channels,
            m.kernel_size[dim],
            m.bias is not None,
            m.stride[dim],
            padding[dim],
            m.output_padding[dim],
            m.dilation[dim],
            m.groups,
            _across(m, dim),
            getattr(m, "times", ONE_TIME),
        )
        for dim in (0, 1)
    ]

    def compute(place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        starts = [
            0 if at.whole else at.read.start * layer.step - layer.padding
            for layer, at in zip(dims, (place.row, place.col), strict=True)
        ]
        own, more = place.own_padding(padding), place.own_padding((m.output_padding[0], m.output_padding[1]))
        y_BCHW = convolve(x_BCHW, m.weight, m.bias, m.stride, own, more, m.groups, m.dilation)
        return place.crop(y_BCHW, (starts[0], starts[1]))

    return SpatialLayer(compute, *dims)


_NO_PIXEL = slice(None), slice(None), slice(0, 0), slice(0, 0)


class SpatialNorm(SpatialLayer):
    """Instance or group norm: statistics of each sample, and channel or group of channels."""

    def __init__(self, name: str, module: StatisticsNorm, ranks: Ranks) -> None:
        self.module: Any = module
        self.ranks = ranks
        affine = module.weight is not None
        if isinstance(module, nn.GroupNorm):
            times = getattr(module, "times", 1)
            described = Norm("group", module.num_groups * (times if each_time(module) else 1), affine, times=times)
        elif isinstance(module, nn.InstanceNorm2d):
            if module.track_running_stats:
                raise ConfigError(
                    f"layer '{name}' keeps running statistics of instances; set track_running_stats=False"
                )
            described = Norm("instance", 1, affine)
        else:
            still, times = getattr(module, "still", False), getattr(module, "times", 1)
            described = Norm("batch", 1, affine, module.running_mean is not None, still, times)
        super().__init__(self._normed, described)

    def _normed(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        if place.is_whole:
            return self.module(x_BCHW)
        return normed(self.module, x_BCHW, place.owned(x_BCHW), self.ranks, self._dtype(x_BCHW))

    @property
    def measures(self) -> bool:
        """True if the layer takes statistics of its input in the present mode."""
        return True

    def of(self, found: Statistics, x_BCHW: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Normalise any window by known statistics. Backward, `ranks` sum the gradients of the statistics, whose part
        in the gradient of x is left to `models.normalise.moment_gradient`."""
        how = NormScope(sharing_of(self.module, x_BCHW), _NO_PIXEL, self._dtype(x_BCHW), ranks)
        return normalise([x_BCHW], self.module, found, [how])[0]

    def _dtype(self, x_BCHW: torch.Tensor) -> torch.dtype:
        """Return the dtype of torch's result: autocast makes a group norm float32 on a GPU, bfloat16 on a CPU."""
        device = x_BCHW.device
        if not isinstance(self.module, nn.GroupNorm) or not torch.is_autocast_enabled(device.type):
            return x_BCHW.dtype
        return _group_norm_dtype(device, x_BCHW.dtype, torch.get_autocast_dtype(device.type))


class SpatialBatchNorm(SpatialNorm):
    """Batch norm. In training its statistics, and the running ones (unbiased variance), cover the whole batch."""

    @property
    def measures(self) -> bool:
        return takes_statistics(self.module)

    def _normed(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        if takes_statistics(self.module):
            return super()._normed(place, x_BCHW)
        return self.module(x_BCHW)


@functools.cache
def _group_norm_dtype(device: torch.device, dtype: torch.dtype, autocast_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of torch's group norm under autocast, found by running it on two values."""
    with torch.autocast(device.type, autocast_dtype):
        return functional.group_norm(torch.zeros(1, 1, 1, 2, dtype=dtype, device=device), 1).dtype
