"""Normalisation of a tensor by its own moments, exact to the rounding of its dtype: whole, or in blocks over ranks.

On the CPU torch's own kernels sum channels-last tensors in float32 (2.13). At a mean of ten deviations group norm is
off by 1.6e-3 and batch norm by 1e-4, and instance norm copies to another layout. Here all sums are float64, over pieces
that fit a cache. Blocks on any number of ranks give the same scale and shift as the whole image, to the last bit or the
one before. Only one multiplication and one addition are in float32 (float64 for float64).

In blocks, each rank measures its own pixels and scales its whole block. It puts count, mean and variance into its slot
of a small tensor. The sum over the ranks holds all slots, and every rank merges them in the same order (Chan et al.,
1979), which loses no digits to a large mean. Backward sums a small tensor too. It cannot deadlock: forward and backward
are one collective call each, of all ranks of the image, in the order of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from tiledseg.memory.second_run import noted
from tiledseg.units import norm_rows

CPU = torch.device("cpu")
Slices = tuple[slice, ...]
StatisticsNorm = nn.BatchNorm2d | nn.GroupNorm | nn.InstanceNorm2d


class Waits(Protocol):
    def wait(self) -> None: ...


class Ranks(Protocol):
    """The ranks that share an image: the methods of a communicator that norms need."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_sum(self, tensor: torch.Tensor) -> Waits: ...


class MomentSets(NamedTuple):
    """The sets of channels and samples that share a mean and variance: each of `groups` parts of a sample's channels,
    or (None) a channel over all samples. A channel's `times`, which follow one another, are in one set."""

    batch: int
    channels: int
    groups: int | None
    times: int = 1

    def gathered(self, v_BC: torch.Tensor) -> torch.Tensor:
        """Return values of shape (B, C) as a row for each set."""
        if self.groups is None:
            return v_BC.reshape(self.batch * self.times, -1).T
        sets = v_BC.reshape(self.batch, self.times, self.groups, -1)
        return sets.transpose(1, 2).reshape(self.batch * self.groups, -1)

    def spread(self, v_G: torch.Tensor) -> torch.Tensor:
        """Return each set's value for its samples and channels: shape (B, C)."""
        if self.groups is None:
            return v_G.repeat(self.times).expand(self.batch, -1)
        each = self.channels // (self.groups * self.times)
        sets = v_G.view(self.batch, 1, self.groups, 1).expand(-1, self.times, -1, each)
        return sets.reshape(self.batch, self.channels)


@dataclass(frozen=True)
class Statistics:
    """The mean and biased variance of each set, float64, and the number of its values."""

    mean_G: torch.Tensor
    variance_G: torch.Tensor
    count: torch.Tensor


@torch.no_grad()
def measure(x_BCHW: torch.Tensor, sharing: MomentSets) -> Statistics:
    """Return the statistics of at least one pixel."""
    if x_BCHW.device.type != "cpu":  # torch's kernel accumulates in float32 by Welford's rule, as its norms do
        variance, mean = torch.var_mean(at_least_single(x_BCHW), dim=(2, 3), correction=0)
        moments = mean.double(), variance.double()  # of each sample and channel over its pixels: shape (B, C)
    else:
        counts, means, variances = [], [], []
        for (rows_BCHW,) in _pieces(x_BCHW):
            pixels = rows_BCHW.shape[2] * rows_BCHW.shape[3]
            mean = rows_BCHW.sum((2, 3), keepdim=True) / pixels
            counts.append(float(pixels))
            means.append(mean)
            variances.append(rows_BCHW.sub_(mean).square_().sum((2, 3)) / pixels)
            del rows_BCHW  # frees it before the next piece
        weights = torch.tensor(counts, dtype=torch.float64)[:, None, None]
        moments = merge(weights, torch.stack(means)[..., 0, 0], torch.stack(variances))
    means_GP, variances_GP = map(sharing.gathered, moments)
    count = means_GP.new_full((1,), x_BCHW.shape[2] * x_BCHW.shape[3] * means_GP.shape[1])
    return Statistics(*merge(torch.ones_like(means_GP.T), means_GP.T, variances_GP.T), count)


def joined(parts: Sequence[Statistics]) -> Statistics:
    """Merge the statistics of several parts in order; a single part keeps its bits."""
    if len(parts) == 1:
        return parts[0]
    counts, means, variances = (torch.stack([getattr(p, k) for p in parts]) for k in ("count", "mean_G", "variance_G"))
    return Statistics(*merge(counts, means, variances), counts.sum(0))


def joined_over(
    parts: Sequence[Statistics], ranks: Ranks | None, sets: int = 0, device: torch.device = CPU
) -> Statistics:
    """Merge the statistics of the parts of all ranks. Collective. `sets`, `device`: for a rank without a part."""
    nothing = (torch.zeros(size, dtype=torch.float64, device=device) for size in (sets, sets, 1))
    own = joined(parts) if parts else Statistics(*nothing)
    if ranks is None or ranks.size == 1:
        return own
    row = torch.cat([own.count, own.mean_G, own.variance_G])
    slots = torch.zeros(ranks.size, len(row), dtype=torch.float64, device=row.device)
    slots[ranks.rank] = row
    means, variances = summed(slots, ranks)[:, 1:].chunk(2, dim=1)
    return joined([Statistics(*part) for part in zip(means, variances, slots[:, :1], strict=True)])


def summed(sums: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
    """Sum a tensor in place over several ranks, and return it. Collective."""
    if ranks is not None and ranks.size > 1:
        ranks.all_reduce_sum(sums).wait()
    return sums


def merge(counts: torch.Tensor, means: torch.Tensor, variances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and biased variance over all parts, which lie along dim 0."""
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    return mean, (counts * (variances + (means - mean).square())).sum(0) / total


class _Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias of each tensor, by the moments of all their `owned` parts."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_C: torch.Tensor | None,
        bias_C: torch.Tensor | None,
        found: Statistics,
        eps: float,
        sharings: Sequence[MomentSets],
        owned: Sequence[Slices | None],
        ranks: Ranks | None,
        dtype: torch.dtype,
        *tensors_BCHW: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        deviation_G = (found.variance_G + eps).rsqrt()
        scales_BC = [sharing.spread(deviation_G) * (1 if weight_C is None else weight_C) for sharing in sharings]
        results = []
        for x_BCHW, scale_BC, sharing in zip(tensors_BCHW, scales_BC, sharings, strict=True):
            shift_BC = -sharing.spread(found.mean_G) * scale_BC
            if bias_C is not None:
                shift_BC = shift_BC + bias_C
            if x_BCHW.device.type == "cpu" and sharing.groups is None and dtype == x_BCHW.dtype:
                # All samples share scale and shift: torch's batch norm with constants gives the same bits, faster.
                scale_C, shift_C = (v_BC[0].to(_wide(x_BCHW)) for v_BC in (scale_BC, shift_BC))
                zeros_C, ones_C = torch.zeros_like(scale_C), torch.ones_like(scale_C)
                results.append(torch.batch_norm(x_BCHW, scale_C, shift_C, zeros_C, ones_C, False, 0.0, 0.0, False))
                continue
            scale, shift = (_per_channel(v_BC, x_BCHW) for v_BC in (scale_BC, shift_BC))
            results.append(torch.addcmul(shift, at_least_single(x_BCHW), scale).to(dtype))
        ctx.sharings, ctx.owned, ctx.ranks, ctx.wants_bias = sharings, owned, ranks, bias_C is not None
        ctx.save_for_backward(weight_C, found.mean_G, deviation_G, found.count, *scales_BC, *tensors_BCHW)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients_BCHW: torch.Tensor) -> tuple[Any, ...]:
        weight_C, mean_G, deviation_G, count, *saved = ctx.saved_tensors
        sharings: Sequence[MomentSets] = ctx.sharings
        scales_BC, tensors_BCHW = saved[: len(sharings)], saved[len(sharings) :]
        every = list(zip(gradients_BCHW, tensors_BCHW, sharings, strict=True))
        sums = [_gradient_sums(g_BCHW, x_BCHW, sharing.spread(mean_G)) for g_BCHW, x_BCHW, sharing in every]
        inputs: list[torch.Tensor | None] = [None] * len(every)
        if any(ctx.needs_input_grad[8:]):
            parts = []  # the gradients of the mean and of the deviation of each set: shape (2, G)
            for (shifts_BC, by_scale_BC), scale_BC, sharing in zip(sums, scales_BC, sharings, strict=True):
                by_deviation_BC = by_scale_BC if weight_C is None else by_scale_BC * weight_C
                both = -scale_BC * shifts_BC, by_deviation_BC
                parts.append(torch.stack([sharing.gathered(v_BC).sum(1) for v_BC in both]))
            to_moments = summed(torch.stack(parts).sum(0), ctx.ranks)
            for index, (g_BCHW, x_BCHW, sharing) in enumerate(every):
                slopes = moment_slopes(to_moments, mean_G, deviation_G, count, sharing)
                inputs[index] = _input_gradient(g_BCHW, x_BCHW, scales_BC[index], *slopes, ctx.owned[index])
        normed = [
            (s_BC * sharing.spread(deviation_G)).sum(0) for (_, s_BC), sharing in zip(sums, sharings, strict=True)
        ]
        to_weight = None if weight_C is None else torch.stack(normed).sum(0).to(weight_C.dtype)
        to_bias = torch.stack([s_BC.sum(0) for s_BC, _ in sums]).sum(0) if ctx.wants_bias else None
        return to_weight, to_bias, *[None] * 6, *inputs


def moment_slopes(
    sums: torch.Tensor, mean_G: torch.Tensor, deviation_G: torch.Tensor, count: torch.Tensor, sharing: MomentSets
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (slope, level), each of shape (B, C): the moments add level + slope x to the gradient of each measured
    value x. `sums`: the gradients of mean and deviation, summed over all ranks; `deviation_G`: 1 / sqrt(variance +
    eps)."""
    to_mean_G, to_deviation_G = sums / count
    slope_G = -to_deviation_G * deviation_G**3  # 2 / N of the variance's gradient
    slope_BC = sharing.spread(slope_G)
    return slope_BC, sharing.spread(to_mean_G) - slope_BC * sharing.spread(mean_G)


def moment_gradient(
    x_BCHW: torch.Tensor, sums: torch.Tensor, found: Statistics, eps: float, sharing: MomentSets
) -> torch.Tensor:
    """Return the part of the gradient of x that comes through the moments `found`, measured over x and other values."""
    deviation_G = (found.variance_G + eps).rsqrt()
    slopes = moment_slopes(sums, found.mean_G, deviation_G, found.count, sharing)
    slope, level = (_per_channel(v, x_BCHW) for v in slopes)
    return torch.addcmul(level, at_least_single(x_BCHW), slope).to(x_BCHW.dtype)


def normed(
    norm: StatisticsNorm,
    tensors_BCHW: Sequence[torch.Tensor],
    owned: Sequence[Slices | None] = (None,),
    ranks: Ranks | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device = CPU,
    found: Statistics | None = None,
) -> tuple[torch.Tensor, ...]:
    """Normalise a tensor, or a rank's block of it, by `norm`: measure the `owned` pixels (None: all), normalise all.

    A batch norm may take several tensors, or none: those of all ranks share their statistics. Collective over `ranks`
    if given, backward too. Running statistics are updated as torch's. `dtype`: the results' (None: the tensors').
    `device`: of the statistics, without a tensor. `found`: statistics of the tensors and others, which are not measured
    again.

    Differentiable once, also through the statistics. Computed in float32 (float64 for float64); moments and sums of
    gradients are float64.
    """
    sharings = [sharing_of(norm, x_BCHW) for x_BCHW in tensors_BCHW]
    if found is None:

        def measured() -> Statistics:
            each = zip(tensors_BCHW, sharings, owned, strict=True)
            parts = [measure(x if part is None else x[part], sharing) for x, sharing, part in each]
            return joined_over(parts, ranks, getattr(norm, "num_features", 0), device)

        found = noted(measured)
        track(norm, found)
    if not tensors_BCHW:
        return ()
    kind = tensors_BCHW[0].device.type
    with torch.autocast("cpu" if kind == "meta" else kind, enabled=False):  # a rehearsal's tensors have no autocast
        times, both = getattr(norm, "times", 1), (norm.weight, norm.bias)
        weights = (each if times == 1 or each is None else each.repeat(times) for each in both)
        how = sharings, owned, ranks, dtype or tensors_BCHW[0].dtype
        made: tuple[torch.Tensor, ...] = _Normalised.apply(*weights, found, norm.eps, *how, *tensors_BCHW)
    return made


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


def _gradient_sums(
    g_BCHW: torch.Tensor, x_BCHW: torch.Tensor, mean_BC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over pixels of g and of g (x - mean), for each sample and channel, float64."""
    if x_BCHW.device.type != "cpu":
        centred_BCHW = at_least_single(x_BCHW) - _per_channel(mean_BC, x_BCHW)
        wide_BCHW = at_least_single(g_BCHW)
        return wide_BCHW.sum((2, 3)).double(), centred_BCHW.mul_(wide_BCHW).sum((2, 3)).double()
    shifts, scales = torch.zeros_like(mean_BC), torch.zeros_like(mean_BC)
    for g_rows, x_rows in _pieces(g_BCHW, x_BCHW):
        sums = g_rows.sum((2, 3))
        shifts += sums
        scales += g_rows.mul_(x_rows).sum((2, 3)) - mean_BC * sums
        del g_rows, x_rows  # frees them before the next piece
    return shifts, scales


def _input_gradient(
    g_BCHW: torch.Tensor,
    x_BCHW: torch.Tensor,
    scale_BC: torch.Tensor,
    slope_BC: torch.Tensor,
    level_BC: torch.Tensor,
    owned: Slices | None,
) -> torch.Tensor:
    """Return g scale, plus level + slope x (the part through the moments) on the owned part."""
    if owned is not None:
        scale, slope, level = (_per_channel(v, x_BCHW) for v in (scale_BC, slope_BC, level_BC))
        dx_BCHW = at_least_single(g_BCHW) * scale
        dx_BCHW[owned].add_(level).addcmul_(at_least_single(x_BCHW[owned]), slope)
        return dx_BCHW.to(x_BCHW.dtype)
    factors = torch.stack([v_BC.to(_wide(x_BCHW)) for v_BC in (scale_BC, slope_BC, level_BC)])
    scale, slope, level = factors.view(*factors.shape, 1, 1)
    if x_BCHW.dtype == level.dtype:
        return torch.addcmul(level, x_BCHW, slope).addcmul_(g_BCHW, scale)
    dx_BCHW = torch.empty_like(x_BCHW)
    for dx_rows, g_rows, x_rows in _rows(dx_BCHW, g_BCHW, x_BCHW):
        dx_rows.copy_(torch.addcmul(level, x_rows.float(), slope).addcmul_(at_least_single(g_rows), scale))
    return dx_BCHW


def _per_channel(v_BC: torch.Tensor, x_BCHW: torch.Tensor) -> torch.Tensor:
    """Return the values for broadcast over the pixels of x, in the dtype of its computation."""
    return v_BC.to(_wide(x_BCHW)).reshape(*v_BC.shape, 1, 1)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def at_least_single(x: torch.Tensor) -> torch.Tensor:
    """Return narrower values as float32, others unchanged."""
    return x.float() if x.element_size() < 4 else x


def _pieces(*tensors_BCHW: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    """Yield float64 copies of a few rows of each tensor at a time, in the same memory: hundreds of blocks, with small
    results between them, would fragment the heap."""
    copies: list[torch.Tensor] = []
    for parts in _rows(*tensors_BCHW):
        if not copies or copies[0].shape != parts[0].shape:
            copies.clear()
            copies = [torch.empty_like(part, dtype=torch.float64) for part in parts]
        yield [copy.copy_(part) for copy, part in zip(copies, parts, strict=True)]


def _rows(*tensors_BCHW: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of a few rows of each tensor at a time, as many as fit a cache."""
    batch, channels, height, width = tensors_BCHW[0].shape
    rows = norm_rows(batch * channels, height, width)
    return zip(*(t.split(rows, dim=2) for t in tensors_BCHW), strict=True)
