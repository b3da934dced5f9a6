"""Norms whose statistics are those of the whole image: each rank measures the pixels it owns, one sum joins them.

Each rank puts count, mean and squared deviations of its block into its own slot of a small tensor; the sum over the
ranks of the image then holds all slots, and all ranks merge them in the same order (Chan et al., 1979), which loses no
digits to a large mean. The sum is its own adjoint, so the backward pass is exact too. It cannot deadlock: it is one
collective call of all ranks of the image, in the order of the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.comm.axes import Axes
from tiledseg.comm.collectives import Communicator
from tiledseg.errors import ConfigError
from tiledseg.geometry.layer import Layer, Norm
from tiledseg.spatial.place import Place


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks of a communicator, on every rank. Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        ctx.communicator = communicator
        total = x.detach().clone()
        communicator.all_reduce_sum(total).wait()
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = gradient.detach().clone()
        ctx.communicator.all_reduce_sum(total).wait()
        return total, None


def whole_moments(x_GP: torch.Tensor, communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each row over the values of all ranks, and their number; float64, differentiable.

    `x_GP`: this rank's values, one row a group; ranks may have different numbers of them, and each has at least one.
    Collective.
    """
    variance_G, mean_G = torch.var_mean(x_GP, dim=1, correction=0)
    count = torch.full((1,), x_GP.shape[1], dtype=torch.float64, device=x_GP.device)
    own = torch.cat([count, mean_G.double(), variance_G.double()])
    slots = torch.cat([own if r == communicator.rank else torch.zeros_like(own) for r in range(communicator.size)])
    slots_RS: torch.Tensor = SumOverRanks.apply(slots, communicator).view(communicator.size, -1)
    counts_R1 = slots_RS[:, :1].detach()
    means_RG, variances_RG = slots_RS[:, 1:].chunk(2, dim=1)
    total = counts_R1.sum()
    mean = (counts_R1 * means_RG).sum(0) / total
    variance = (counts_R1 * (variances_RG + (means_RG - mean).square())).sum(0) / total
    return mean, variance, total


class _WholeImageNorm:
    """What the norms share: owned pixels are measured, the whole block is scaled and shifted."""

    fill = 0.0

    def __init__(self, name: str, kind: str, module: nn.Module, axes: Axes) -> None:
        self.module: Any = module
        self.axes = axes
        self.descriptions: tuple[Layer, Layer] = Norm(name, kind), Norm(name, kind)

    def _owned(self, x_BCHW: torch.Tensor, place: Place) -> torch.Tensor:
        row, col = (at.owned.relative_to(at.read.start) for at in (place.row, place.col))
        return x_BCHW[:, :, row.slice, col.slice]

    def _scaled(self, x_BCHW: torch.Tensor, mean_BC: torch.Tensor, variance_BC: torch.Tensor) -> torch.Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias as one multiplication and one addition."""
        scale_BC = (variance_BC + self.module.eps).rsqrt()
        if self.module.weight is not None:
            scale_BC = scale_BC * self.module.weight
        shift_BC = -mean_BC * scale_BC
        if self.module.bias is not None:
            shift_BC = shift_BC + self.module.bias
        scale_BC11, shift_BC11 = (v.to(x_BCHW.dtype)[:, :, None, None] for v in (scale_BC, shift_BC))
        return torch.addcmul(shift_BC11, x_BCHW, scale_BC11)


class SpatialBatchNorm(_WholeImageNorm):
    """Batch norm; while training its statistics, and the running ones (variance unbiased), are the whole batch's."""

    def __init__(self, name: str, module: nn.BatchNorm2d, axes: Axes) -> None:
        super().__init__(name, "batch", module, axes)

    def __call__(self, x_BCHW: torch.Tensor, place: Place) -> torch.Tensor:
        m = self.module
        if not m.training and m.running_mean is not None:
            return functional.batch_norm(x_BCHW, m.running_mean, m.running_var, m.weight, m.bias, False, 0.0, m.eps)
        if place.is_whole:
            return m(x_BCHW)
        channels = x_BCHW.shape[1]
        x_CP = self._owned(x_BCHW, place).transpose(0, 1).reshape(channels, -1)
        mean_C, variance_C, count = whole_moments(x_CP, self.axes.image)
        if m.training and m.track_running_stats:
            self._track(mean_C.detach(), variance_C.detach() * (count / (count - 1)))
        return self._scaled(x_BCHW, mean_C[None], variance_C[None])

    def _track(self, mean_C: torch.Tensor, variance_C: torch.Tensor) -> None:
        m = self.module
        m.num_batches_tracked.add_(1)
        momentum = m.momentum if m.momentum is not None else 1 / int(m.num_batches_tracked)
        for buffer, value in ((m.running_mean, mean_C), (m.running_var, variance_C)):
            buffer.mul_(1 - momentum).add_(value.to(buffer.dtype), alpha=momentum)


class SpatialGroupNorm(_WholeImageNorm):
    """Group norm: statistics of each sample and group of channels."""

    def __init__(self, name: str, module: nn.GroupNorm, axes: Axes) -> None:
        super().__init__(name, "group", module, axes)
        self._groups: Callable[[int], int] = lambda channels: module.num_groups

    def __call__(self, x_BCHW: torch.Tensor, place: Place) -> torch.Tensor:
        if place.is_whole:
            whole: torch.Tensor = self.module(x_BCHW)
            return whole
        batch, channels = x_BCHW.shape[:2]
        groups = self._groups(channels)
        x_GP = self._owned(x_BCHW, place).reshape(batch * groups, -1)
        mean_G, variance_G, _ = whole_moments(x_GP, self.axes.image)
        mean_BC, variance_BC = (
            v.view(batch, groups, 1).expand(-1, -1, channels // groups).reshape(batch, channels)
            for v in (mean_G, variance_G)
        )
        return self._scaled(x_BCHW, mean_BC, variance_BC)


class SpatialInstanceNorm(SpatialGroupNorm):
    """Instance norm: statistics of each sample and channel."""

    def __init__(self, name: str, module: nn.InstanceNorm2d, axes: Axes) -> None:
        if module.track_running_stats:
            raise ConfigError(f"layer '{name}' keeps running statistics of instances; set track_running_stats=False")
        _WholeImageNorm.__init__(self, name, "instance", module, axes)
        self._groups = lambda channels: channels
