"""Norms whose statistics are those of the whole image: each rank measures the pixels it owns, one sum joins them.

`models.normalise` says how, and why it cannot deadlock.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiledseg.comm.collectives import Communicator
from tiledseg.errors import ConfigError
from tiledseg.geometry.layers.pixelwise import Norm
from tiledseg.models.layers.block import BlockPlace
from tiledseg.models.norm import (
    StatisticsNorm,
    no_gradients,
    normed,
    normed_together,
    sharing_of,
    takes_statistics,
)
from tiledseg.models.normalise import NormScope, Ranks, Statistics, measure, moment_gradient, normalise
from tiledseg.spatial.twins import SpatialLayer

_NO_PIXEL = slice(None), slice(None), slice(0, 0), slice(0, 0)


class SpatialNorm(SpatialLayer):
    """Instance or group norm: statistics of each sample, and channel or group of channels."""

    def __init__(self, name: str, module: StatisticsNorm, ranks: Ranks) -> None:
        self.module: Any = module
        self.ranks = ranks
        affine = module.weight is not None
        if isinstance(module, nn.GroupNorm):
            described = Norm("group", module.num_groups, affine)
        elif isinstance(module, nn.InstanceNorm2d):
            if module.track_running_stats:
                raise ConfigError(
                    f"layer '{name}' keeps running statistics of instances; set track_running_stats=False"
                )
            described = Norm("instance", 1, affine)
        else:
            described = Norm("batch", 1, affine, module.running_mean is not None, getattr(module, "still", False))
        super().__init__(self._normed, described)

    def _normed(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        if place.is_whole:
            whole: torch.Tensor = self.module(x_BCHW)
            return whole
        return normed(self.module, x_BCHW, place.owned(x_BCHW), self.ranks, self._dtype(x_BCHW))

    @property
    def measures(self) -> bool:
        """Return True if it takes statistics of its input now."""
        return True

    def measured(self, x_BCHW: torch.Tensor) -> Statistics:
        """Return the statistics of a block, without any halo. No communication."""
        return measure(x_BCHW, sharing_of(self.module, x_BCHW))

    def of(self, found: Statistics, x_BCHW: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Normalise by statistics that are known, on any window. Backward `ranks` sum what goes to these; its way
        through them to x is left to `moment_gradient`."""
        how = NormScope(sharing_of(self.module, x_BCHW), _NO_PIXEL, self._dtype(x_BCHW), ranks)
        return normalise([x_BCHW], self.module, found, [how])[0]

    def moment_gradient(self, found: Statistics, sums: torch.Tensor, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return what goes to the gradient of a block through the statistics, by the sums of all blocks."""
        return moment_gradient(x_BCHW, sums, found, self.module.eps, sharing_of(self.module, x_BCHW))

    def _dtype(self, x_BCHW: torch.Tensor) -> torch.dtype:
        """Return the dtype of torch's own norm here: autocast computes a group norm in float32 on a GPU, in bfloat16 on
        a CPU."""
        device = x_BCHW.device
        if not isinstance(self.module, nn.GroupNorm) or not torch.is_autocast_enabled(device.type):
            return x_BCHW.dtype
        return _group_norm_dtype(device, x_BCHW.dtype, torch.get_autocast_dtype(device.type))


class SpatialBatchNorm(SpatialNorm):
    """Batch norm; while training its statistics, and the running ones (variance unbiased), are the whole batch's."""

    @property
    def measures(self) -> bool:
        return takes_statistics(self.module)

    def _normed(self, place: BlockPlace, x_BCHW: torch.Tensor) -> torch.Tensor:
        m = self.module
        if takes_statistics(m):
            return super()._normed(place, x_BCHW)
        return functional.batch_norm(x_BCHW, m.running_mean, m.running_var, m.weight, m.bias, False, 0.0, m.eps)

    def together(
        self, blocks: Sequence[tuple[BlockPlace, torch.Tensor]], ranks: Communicator, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Run the layer on this rank's blocks of several images; its statistics are those of all images of all `ranks`.
        Collective over these; a rank may have none, and calls `no_gradients` backward. On `device` it then sums zeros.
        """
        return normed_together(self.module, [(x, place.owned(x)) for place, x in blocks], ranks, device)

    def no_gradients(self, ranks: Communicator, device: torch.device) -> None:
        """Run the backward pass of `together` on a rank that had no image. Collective."""
        no_gradients(self.module, ranks, device)


@functools.cache
def _group_norm_dtype(device: torch.device, dtype: torch.dtype, autocast_dtype: torch.dtype) -> torch.dtype:
    """Ask torch, with two values."""
    with torch.autocast(device.type, autocast_dtype):
        return functional.group_norm(torch.zeros(1, 1, 1, 2, dtype=dtype, device=device), 1).dtype
