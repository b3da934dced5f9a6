"""Torch's modules over ranks: the geometry of each, and the computation of a rank's block of its output.

`KINDS` is the one table of them; a layer not in it cannot be exact, and is refused. (A module of ours says both itself:
`models.layers.block`.) Twins share weights and buffers with the network, under its names, so optimizers and checkpoints
do not depend on how the image is spread.

A twin computes with a halo in place of padding, except at the image's border. It does not communicate, since the
exchange before it brings its input; only `SpatialConvolution.overlapped` includes the exchange. For a norm, each rank
measures its own pixels and one sum joins them: `models.normalise` says why it cannot deadlock. Gradients of weights are
this rank's part; summed over ranks they are the undivided layer's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.comm.mesh import Axes
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.layers import resampling
from tiledseg.geometry.layers.convolutions import ONE_TIME, Convolution, TransposedConvolution
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Activation, Mark, Norm, ZeroAtZero
from tiledseg.geometry.sharing.decomposition import BlockExchange
from tiledseg.memory.device import sent
from tiledseg.models.dropout import ChannelDropout, LeafDepth
from tiledseg.models.layers.block import BlockModule, BlockPlace, computes_blocks
from tiledseg.models.layers.convolution import (
    ChosenConvolution,
    OneDnnTransposed,
    SteadyConvolution,
    TorchConvolution,
    convolve_transposed,
)
from tiledseg.models.layers.pixelwise import Computed
from tiledseg.models.layers.pooling import AveragePoolModule, MaxPoolModule, average_pool, max_pool, pair
from tiledseg.models.layers.resampling import UpsampleModule, upsample
from tiledseg.models.layers.times import TimesBatchNorm, TimesConvolution, TimesGroupNorm, TimesTransposed
from tiledseg.models.network import GraphNetwork
from tiledseg.models.norm import BatchNorm, GroupNorm, InstanceNorm, PixelNorm
from tiledseg.models.normalise import Ranks, Statistics, each_time, normed, takes_statistics
from tiledseg.spatial.halo_exchange import OverlappedConvolution


class SpatialLayer:
    """The twin of a torch module of one input: `rows` and `cols` describe it along rows and columns. Windows hold
    `fill` beyond the tensor's ends."""

    fill = 0.0

    def __init__(self, module: Any) -> None:
        self.module = module
        self.rows, self.cols = self.along(0), self.along(1)

    def along(self, dim: int) -> Any:
        """Describe the module along rows (0) or columns (1). Raises ConfigError if it cannot be exact in blocks."""
        return Layer()

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the outputs `place.given` from the window `place.read`. `ranks`: those of the image, for a norm."""
        made_BCHW: torch.Tensor = self.module(x_BCHW)
        return made_BCHW


# Layers whose output pixels depend on one input pixel each. Torch differentiates activations by their output, so they
# can overwrite their input.
_ACTIVATIONS = nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU
_ZERO_AT_ZERO = nn.PReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Hardswish, ChannelDropout, LeafDepth
POINTWISE: dict[type[nn.Module], Layer] = {
    **dict.fromkeys(_ACTIVATIONS, Activation()),
    **dict.fromkeys(_ZERO_AT_ZERO, ZeroAtZero()),
    **dict.fromkeys((nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardsigmoid, PixelNorm), Layer()),
    nn.Identity: Mark(),
}


class _Pointwise(SpatialLayer):
    def along(self, dim: int) -> Layer:
        return POINTWISE[type(self.module)]


class _Upsample(SpatialLayer):
    """Upsampling by whole factors: nearest is local, bilinear reads one coarse pixel around a block, bicubic two. At
    the image's ends torch's interpolation itself repeats the last pixel."""

    def along(self, dim: int) -> resampling.Upsample:
        mode, scale = self.module.mode, self.module.scale_factor
        if mode not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
            raise ConfigError(f"upsamples '{mode}'; give nearest, bilinear or bicubic")
        return resampling.Upsample(mode.removesuffix("-exact"), int(scale[dim] if isinstance(scale, tuple) else scale))

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        factors = self.rows.factor, self.cols.factor
        return place.crop_given(upsample(x_BCHW, factors, self.module.mode), self.rows, self.cols)


class _PixelShuffle(SpatialLayer):
    def along(self, dim: int) -> resampling.PixelShuffle:
        return resampling.PixelShuffle(self.module.upscale_factor)

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        return place.crop_given(self.module(x_BCHW), self.rows, self.cols)


class _PixelUnshuffle(SpatialLayer):
    def along(self, dim: int) -> resampling.PixelUnshuffle:
        return resampling.PixelUnshuffle(self.module.downscale_factor)


def _window(module: nn.MaxPool2d | nn.AvgPool2d, dim: int) -> list[int]:
    """Return kernel, stride, padding and dilation along a dim."""
    if module.ceil_mode:
        raise ConfigError("pools with ceil_mode, whose last windows hang over the image; set it to False")
    sizes = module.kernel_size, module.stride, module.padding, getattr(module, "dilation", 1)
    return [pair(size)[dim] for size in sizes]


class _MaxPool(SpatialLayer):
    """Max pooling with any kernel, stride, padding (minus infinity) and dilation. A window across an edge of ranks
    belongs to one rank, which reads all its pixels."""

    fill = float("-inf")

    def along(self, dim: int) -> resampling.MaxPool:
        return resampling.MaxPool(*_window(self.module, dim))

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        kernel, stride, padding, dilation = zip(self.rows.sizes, self.cols.sizes, strict=True)
        return max_pool(x_BCHW, (kernel, stride, place.own_padding(padding), dilation))


class _AveragePool(SpatialLayer):
    """Average pooling with any kernel, stride and padding, counted as zeros or left out."""

    def along(self, dim: int) -> resampling.AveragePool:
        return resampling.AveragePool(*_window(self.module, dim))

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        m, (kernel, stride, padding, _) = self.module, zip(self.rows.sizes, self.cols.sizes, strict=True)
        inside_only = not m.count_include_pad and max(padding) > 0 and m.divisor_override is None
        divisor = 1 if inside_only else m.divisor_override
        y_BCHW = average_pool(x_BCHW, kernel, stride, place.own_padding(padding), divisor_override=divisor)
        if not inside_only:
            return y_BCHW
        counts = []  # positions of each window that lie within the tensor
        for pool, dim in ((self.rows, place.row), (self.cols, place.col)):
            windows = (pool.required_input(Interval(o, o + 1)) for o in range(dim.given.start, dim.given.stop))
            inside = [window.clip(Interval(0, dim.sizes[0])).size for window in windows]
            counts.append(sent(torch.tensor(inside, dtype=torch.float64), y_BCHW.device).to(y_BCHW.dtype))
        return y_BCHW / (counts[0][:, None] * counts[1][None, :])


class SpatialConvolution(SpatialLayer):
    """A convolution with any kernel, stride, dilation, groups and zero padding (also `same` with even kernels)."""

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module)
        # The module's own kernel: on one rank the twin gives the same bits.
        self._convolve = module.compute if isinstance(module, ChosenConvolution) else functional.conv2d

    def along(self, dim: int) -> Convolution:
        m = self.module
        kernel, stride, dilation = m.kernel_size[dim], m.stride[dim], m.dilation[dim]
        before = after = 0
        if m.padding == "same":
            before, after = dilation * (kernel - 1) // 2, -(-dilation * (kernel - 1) // 2)
        elif not isinstance(m.padding, str):
            before = after = m.padding[dim]
        sizes = m.out_channels, kernel, stride, before, dilation
        more = after - before, m.groups, _across(m, dim), getattr(m, "times", ONE_TIME)
        return Convolution(*sizes, m.bias is not None, *more)

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        m, row, col = self.module, self.rows, self.cols
        # A dim that is not cut keeps the layer's own padding. The odd zero of uneven padding is added here.
        extra = (col.extra if place.col.whole else 0, row.extra if place.row.whole else 0)
        if any(extra):
            x_BCHW = functional.pad(x_BCHW, (0, extra[0], 0, extra[1]))
        padding = place.own_padding((row.padding, col.padding))
        return self._convolve(x_BCHW, m.weight, m.bias, m.stride, padding, m.dilation, m.groups)

    def can_overlap(self, place: BlockPlace) -> bool:
        """Return True if `overlapped` can compute it: not with times, nor with uneven padding along an uncut dim."""
        uneven = (place.row.whole and self.rows.extra) or (place.col.whole and self.cols.extra)
        return not uneven and not isinstance(self.module, TimesConvolution)

    def overlapped(self, x_BCHW: torch.Tensor, place: BlockPlace, axes: Axes, exchange: BlockExchange) -> torch.Tensor:
        """Compute the layer on this rank's own block `x_BCHW`, with the halo exchange overlapped by the interior. The
        result differs only by the order of sums. Collective over the ranks of the image."""
        m = self.module
        kind = x_BCHW.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_BCHW.dtype
        bias = None if m.bias is None else m.bias.to(dtype)
        padding = place.own_padding((self.rows.padding, self.cols.padding))
        options = (m.stride[0], m.stride[1]), padding, (m.dilation[0], m.dilation[1]), m.groups
        given = axes, exchange, (self.rows, self.cols), place, self._convolve, options
        return OverlappedConvolution.apply(x_BCHW.to(dtype), m.weight.to(dtype), bias, *given)


def _across(module: nn.Conv2d | nn.ConvTranspose2d, dim: int) -> int | None:
    """Return the kernel along the other dim, or None if it is the same."""
    return None if module.kernel_size[0] == module.kernel_size[1] else module.kernel_size[1 - dim]


class _TransposedConvolution(SpatialLayer):
    """A transposed convolution with any kernel, stride, padding, output padding, dilation and groups. Zeros beyond the
    tensor's ends add nothing, but give the outputs there, which are the bias alone."""

    def along(self, dim: int) -> TransposedConvolution:
        m = self.module
        sizes = m.stride[dim], m.padding[dim], m.output_padding[dim], m.dilation[dim], m.groups
        more = _across(m, dim), getattr(m, "times", ONE_TIME)
        return TransposedConvolution(m.out_channels, m.kernel_size[dim], m.bias is not None, *sizes, *more)

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        m: Any = self.module
        convolve: Any = functional.conv_transpose2d
        if isinstance(m, OneDnnTransposed):
            convolve = convolve_transposed
        elif isinstance(m, TimesTransposed):
            convolve = m.compute
        own, more = place.own_padding(m.padding), place.own_padding(m.output_padding)
        y_BCHW = convolve(x_BCHW, m.weight, m.bias, m.stride, own, more, m.groups, m.dilation)
        return place.crop_given(y_BCHW, self.rows, self.cols)


_NO_PIXEL = slice(None), slice(None), slice(0, 0), slice(0, 0)


class SpatialNorm(SpatialLayer):
    """Instance or group norm: statistics of each sample, and channel or group of channels."""

    def along(self, dim: int) -> Norm:
        m = self.module
        affine, times = m.weight is not None, getattr(m, "times", 1)
        if isinstance(m, nn.GroupNorm):
            return Norm("group", m.num_groups * (times if each_time(m) else 1), affine, times=times)
        if m.track_running_stats:
            raise ConfigError("keeps running statistics of instances; set track_running_stats=False")
        return Norm("instance", 1, affine)

    def on_block(self, place: BlockPlace, ranks: Ranks, x_BCHW: torch.Tensor) -> torch.Tensor:
        if place.is_whole or not self.measures:
            return super().on_block(place, ranks, x_BCHW)
        return normed(self.module, [x_BCHW], [place.owned(x_BCHW)], ranks, self._dtype(x_BCHW))[0]

    @property
    def measures(self) -> bool:
        """True if the layer takes statistics of its input in the present mode."""
        return True

    def of(self, found: Statistics, x_BCHW: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Normalise any window by known statistics. Backward, `ranks` sum the gradients of the statistics, whose part
        in the gradient of x is left to `models.normalise.moment_gradient`."""
        return normed(self.module, [x_BCHW], [_NO_PIXEL], ranks, self._dtype(x_BCHW), found=found)[0]

    def _dtype(self, x_BCHW: torch.Tensor) -> torch.dtype:
        """Return the dtype of torch's result: autocast makes a group norm float32 on a GPU, bfloat16 on a CPU."""
        device = x_BCHW.device
        if not isinstance(self.module, nn.GroupNorm) or not torch.is_autocast_enabled(device.type):
            return x_BCHW.dtype
        return _group_norm_dtype(device, x_BCHW.dtype, torch.get_autocast_dtype(device.type))


class SpatialBatchNorm(SpatialNorm):
    """Batch norm. In training its statistics, and the running ones (unbiased variance), cover the whole batch."""

    def along(self, dim: int) -> Norm:
        m = self.module
        running, still = m.running_mean is not None, getattr(m, "still", False)
        return Norm("batch", 1, m.weight is not None, running, still, getattr(m, "times", 1))

    @property
    def measures(self) -> bool:
        return takes_statistics(self.module)


@functools.cache
def _group_norm_dtype(device: torch.device, dtype: torch.dtype, autocast_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of torch's group norm under autocast, found by running it on two values."""
    with torch.autocast(device.type, autocast_dtype):
        return functional.group_norm(torch.zeros(1, 1, 1, 2, dtype=dtype, device=device), 1).dtype


# Keys are exact types: a subclass may compute anything.
KINDS: dict[type[nn.Module], type[SpatialLayer]] = {
    **dict.fromkeys(POINTWISE, _Pointwise),
    **dict.fromkeys((nn.Conv2d, SteadyConvolution, TorchConvolution, TimesConvolution), SpatialConvolution),
    **dict.fromkeys((nn.ConvTranspose2d, OneDnnTransposed, TimesTransposed), _TransposedConvolution),
    **dict.fromkeys((nn.MaxPool2d, MaxPoolModule), _MaxPool),
    **dict.fromkeys((nn.AvgPool2d, AveragePoolModule), _AveragePool),
    **dict.fromkeys((nn.Upsample, UpsampleModule, nn.UpsamplingNearest2d), _Upsample),
    nn.PixelShuffle: _PixelShuffle,
    nn.PixelUnshuffle: _PixelUnshuffle,
    **dict.fromkeys((nn.BatchNorm2d, BatchNorm, TimesBatchNorm), SpatialBatchNorm),
    **dict.fromkeys((nn.GroupNorm, GroupNorm, TimesGroupNorm, nn.InstanceNorm2d, InstanceNorm), SpatialNorm),
}


def spatial_layer(name: str, module: nn.Module) -> SpatialLayer | BlockModule:
    """Return the twin of a torch module, or a module of ours itself. Raises ConfigError, with the layer's name and the
    reason, if blocks would not be exact."""
    if computes_blocks(module):
        return module
    kind = type(module).__bases__[1] if isinstance(module, Computed) else type(module)
    try:
        if kind in KINDS:
            return KINDS[kind](module)
    except ConfigError as refusal:
        raise ConfigError(f"layer '{name}' {refusal}") from None
    what = f"layer '{name}' ({kind.__name__}) is not known to give the same result on a part of the image"
    raise ConfigError(f"{what}; use parallel.halo read")


def spatial_layers(network: GraphNetwork) -> tuple[SpatialLayer | BlockModule, ...]:
    """Return the layers of a network that compute blocks."""
    named = zip(network.graph.names[1:], network.layers.values(), strict=True)
    return tuple(spatial_layer(name, module) for name, module in named)
