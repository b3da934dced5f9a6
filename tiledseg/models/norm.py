"""The norms of networks: torch's modules, computed on the CPU by `normalise`.

On a GPU torch's own kernels run: they accumulate by Welford's rule in float32 and are faster there. Under torch.compile
torch's norms run too, since it writes kernels itself. An image of one pixel goes to torch, which raises its own error.
"""

from __future__ import annotations

import torch
from torch import nn

from tiledseg.memory.second_run import noted
from tiledseg.models.normalise import MomentSets, NormScope, Ranks, Slices, Statistics, measure, normalise


class PixelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class InstanceNorm(nn.InstanceNorm2d):
    """Instance norm, without running statistics. For channels first torch's kernel is faster, but misreads a
    channels-last gradient (2.13, one image), which is therefore made contiguous."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _is_own(input) and input.is_contiguous(memory_format=torch.channels_last):
            return normed(self, input)
        made = super().forward(input)
        if made.requires_grad and not torch.compiler.is_compiling():
            made.register_hook(torch.Tensor.contiguous)
        return made


class GroupNorm(nn.GroupNorm):
    """Group norm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return normed(self, input) if _is_own(input) else super().forward(input)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm; in evaluation torch's. `in_place_of`: the user's own norm, whose mode it always shares. `still`: it
    stays in evaluation, with constant running statistics."""

    in_place_of: tuple[nn.Module, ...] = ()
    own_mode: bool
    still = False

    @property
    def training(self) -> bool:
        return self.in_place_of[0].training and not self.still if self.in_place_of else self.own_mode

    @training.setter
    def training(self, mode: bool) -> None:
        # torch 2.8 compiles a look into `__dict__` as this property.
        self.own_mode = self.__dict__["training"] = mode and not self.still
        for norm in self.in_place_of:
            norm.training = mode

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not takes_statistics(self) or not _is_own(input):
            return super().forward(input)
        return normed(self, input)


StatisticsNorm = nn.BatchNorm2d | nn.GroupNorm | nn.InstanceNorm2d


def normed(
    norm: StatisticsNorm,
    x_BCHW: torch.Tensor,
    owned: Slices | None = None,
    ranks: Ranks | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalise a tensor, or a rank's block of it, by `norm`: measure the `owned` pixels, normalise all.

    Collective over `ranks` if given, backward too. Running statistics are updated as torch's. `dtype`: the result's
    (None: the tensor's).
    """
    sharing = sharing_of(norm, x_BCHW)
    found = noted(lambda: measure(x_BCHW if owned is None else x_BCHW[owned], sharing, ranks))
    track(norm, found)
    how = NormScope(sharing, owned, dtype or x_BCHW.dtype, ranks)
    return normalise([x_BCHW], norm, found, [how])[0]


def sharing_of(norm: StatisticsNorm, x_BCHW: torch.Tensor) -> MomentSets:
    """Return the sets of values of a tensor, or a block, that share a mean and variance."""
    batch, channels = x_BCHW.shape[:2]
    times: int = getattr(norm, "times", 1)
    if isinstance(norm, nn.BatchNorm2d):
        return MomentSets(batch, channels, None, times)
    groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else channels
    of_times = (groups * times,) if each_time(norm) else (groups, times)
    return MomentSets(batch, channels, *of_times)


def each_time(norm: StatisticsNorm) -> bool:
    """Return True if the norm measures each time by itself."""
    return bool(getattr(norm, "each", False))


def takes_statistics(norm: nn.BatchNorm2d) -> bool:
    """Return True if a batch norm measures its input in the present mode."""
    return norm.training or norm.running_mean is None


def _is_own(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.shape[2] * x.shape[3] > 1 and not torch.compiler.is_compiling()


@torch.no_grad()
def track(norm: StatisticsNorm, found: Statistics) -> None:
    """Update the running mean and (unbiased) variance of a batch norm in training, if it tracks them."""
    if not (isinstance(norm, nn.BatchNorm2d) and norm.training and norm.track_running_stats):
        return
    assert norm.running_mean is not None, "it tracks a mean"
    assert norm.running_var is not None, "it tracks a variance"
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    momentum = norm.momentum if norm.momentum is not None else 1 / int(norm.num_batches_tracked or 1)
    unbiased = found.variance_G * (found.count / (found.count - 1))
    for buffer, value in ((norm.running_mean, found.mean_G), (norm.running_var, unbiased)):
        buffer.mul_(1 - momentum).add_(value.to(buffer.dtype), alpha=momentum)
