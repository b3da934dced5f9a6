"""The all-reduce of gradients, overlapped with the backward pass.

Gradients are gathered in a few flat buckets, last layer first. A bucket is summed over the ranks while the layers
before it are still being differentiated. Sums over tiles and ranks are float64 (`wide`): their order, which depends on
the number of ranks, then changes the 16th digit only, and a float32 run prints the same losses on any number of ranks.
The cost is 8 bytes a weight, and twice the bytes of the all-reduce (docs/decisions/0003).

If one backward pass covers several batches, autograd would sum a weight's gradients in the weight's own dtype. So each
batch gets a `use` of the weight, whose gradient arrives separately.

No deadlock: every rank starts the sums of all buckets in the same order each step, also a rank without a tile, with
zeros. In mode `layer`, halos and sums of norms come between them, at the same places on all ranks of an image
(docs/explanation/communication.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tiledseg.comm.collectives import Communicator, Work

CPU = torch.device("cpu")
BUCKET_BYTES = 8 << 20  # large enough for the network's full bandwidth, small enough to overlap with backward


class GradientReducer:
    """A sum of the gradients of `parameters` over tiles and over the ranks of a communicator.

    Each step: `zero()`; backward for each tile of this rank, with `overlap()` before the last; `finish()`; scale or
    clip the buckets; `deliver()` puts them into `.grad`. `wide`: sum in float64, else in the parameters' own dtype.
    Parameters without gradients (frozen, or of other stages) are left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], communicator: Communicator, wide: bool = True) -> None:
        self._communicator = communicator
        self._parameters = [p for p in parameters if p.requires_grad]
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self.buckets: list[torch.Tensor] = []
        for members in _group(list(reversed(self._parameters)), BUCKET_BYTES):
            self._add_bucket(members, torch.float64 if wide else members[0].dtype)
        self._missing = Counter(self._bucket_of.values())  # gradients, by bucket
        self._next = 0
        self._works: list[Work] = []
        self._last: set[nn.Parameter] = set()
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._parameters]

    def _add_bucket(self, members: list[nn.Parameter], dtype: torch.dtype) -> None:
        flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=members[0].device)
        start = 0
        for parameter in members:
            # Same memory order as the parameter (channels-last or not), so adding a gradient reads both sequentially;
            # dense even if the parameter is a view.
            strides = torch.empty_like(parameter, device="meta").stride()
            self._sums[parameter] = flat.as_strided(parameter.size(), strides, start)
            self._bucket_of[parameter] = len(self.buckets)
            start += parameter.numel()
        self.buckets.append(flat)

    def zero(self) -> None:
        """Set all sums to zero, at the start of a step."""
        for flat in self.buckets:
            flat.zero_()
        for parameter in self._parameters:
            parameter.grad = None
        self._missing = Counter(self._bucket_of.values())
        self._next = 0
        self._works = []
        self._last = set()

    def use(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the parameter's values (in `dtype`, if given) as a tensor whose gradient is added to the sums alone,
        in its own dtype. Create it right before its use, so that autograd delivers its gradient soon."""
        return _Use.apply(parameter, self._sums[parameter].add_, dtype or parameter.dtype)

    def overlap(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Announce that the next gradient of each of `parameters` (None: all) is its last of the step, so that the sum
        of a full bucket can start."""
        self._last.update(self._parameters if parameters is None else parameters)

    def finish(self) -> None:
        """Start the remaining sums, and wait until every bucket holds the sum over all ranks."""
        while self._next < len(self.buckets):
            self._start_next()
        for work in self._works:
            work.wait()
        self._last = set()

    def total(self) -> torch.Tensor:
        """Return the sum of all numbers of the gradient, a float64 on its device: finite only if all numbers are."""
        sums = [flat.sum(dtype=torch.float64) for flat in self.buckets]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)

    def deliver(self) -> None:
        """Set every parameter's `.grad` from its bucket."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return  # the gradient arrived by a `use`
        self._sums[parameter].add_(parameter.grad)
        parameter.grad = None  # so autograd assigns the next tile's, and does not add in the narrow dtype
        if parameter not in self._last:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        # Start buckets in order, whichever is full first: collectives must have one order on every rank.
        while self._next < len(self.buckets) and self._missing[self._next] == 0:
            self._start_next()

    def _start_next(self) -> None:
        self._works.append(self._communicator.all_reduce_sum(self.buckets[self._next]))
        self._next += 1


class _Use(torch.autograd.Function):
    """The operation of `GradientReducer.use`."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, add: Callable[[torch.Tensor], object], dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.add = add
        return parameter.detach() if dtype == parameter.dtype else parameter.to(dtype)  # both keep the strides

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.add(gradient)
        return None, None, None


def sum_gradients(parameters: Iterable[nn.Parameter], communicator: Communicator) -> None:
    """Sum each parameter's `.grad` over ranks in float64; it stays None if no rank has one. Collective.

    For loops that use `.grad` as torch sets it, which a `GradientReducer` would clear.
    """
    trained = [p for p in parameters if p.requires_grad]
    if communicator.size == 1 or not trained:
        return
    counts = torch.tensor([float(p.grad is not None) for p in trained], dtype=torch.float64, device=trained[0].device)
    own = ((torch.zeros_like(p) if p.grad is None else p.grad).double().flatten() for p in trained)
    flat = torch.cat([counts, *own])
    communicator.all_reduce_sum(flat).wait()
    counts, *sums = flat.split([len(trained), *(p.numel() for p in trained)])
    for parameter, count, total in zip(trained, counts.tolist(), sums, strict=True):
        if count:
            parameter.grad = total.view(parameter.shape).to(parameter.dtype)


def scale_gradients(reducer: GradientReducer, factor: float | torch.Tensor) -> None:
    for flat in reducer.buckets:
        flat.mul_(factor)


def clip_gradients(
    reducer: GradientReducer, largest_norm: float, stages: Communicator, device: torch.device = CPU
) -> None:
    """Scale the whole gradient down to `largest_norm` if it is longer (L2 norm in float64).

    `stages`: communicator of the ranks that hold the network's parts; all of them call it. `device`: of the sums, also
    on a rank without weights.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for flat in reducer.buckets:
        squares += flat.double().square().sum()
    stages.all_reduce_sum(squares).wait()
    norm = squares.sqrt()
    scale_gradients(reducer, torch.where(norm > largest_norm, largest_norm / norm, 1.0))  # the host does not wait


def _group(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Cut a list of parameters into runs of one dtype and device of about `limit` bytes each."""
    groups: list[list[nn.Parameter]] = []
    held = 0
    for parameter in parameters:
        last = groups[-1][0] if groups else None
        if last is None or held >= limit or (last.dtype, last.device) != (parameter.dtype, parameter.device):
            groups.append([])
            held = 0
        groups[-1].append(parameter)
        held += parameter.numel() * parameter.element_size()
    return groups
