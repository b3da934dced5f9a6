"""One all-reduce of gradients a step, started while the backward pass still runs.

Gradients are gathered in a few flat buckets, last layer first. A bucket is summed over the ranks while the layers
before it are still being differentiated. Sums over tiles and ranks are taken in float64 (`wide`): their order, which
the number of ranks decides, then changes the 16th digit alone, and a float32 run gives the same loss line on any number
of ranks. It costs 8 bytes a weight, and twice the bytes of the all-reduce (docs/decisions/0003).

Where one backward pass goes through several batches, autograd would add up a weight's gradients in the weight's own
dtype. There each batch is given a `use` of the weight, whose gradient comes by itself.

Deadlock cannot arise: every rank starts the sums of all buckets in the same order each step; a rank without a tile
starts them too, with zeros. In mode `layer` halos and sums of norms come between them, at the same places on all ranks
of an image (docs/explanation/communication.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.point_to_point import Work

CPU = torch.device("cpu")
BUCKET_BYTES = 8 << 20  # large enough to reach the network's bandwidth, small enough that several overlap with backward


class GradientReducer:
    """A sum of the gradients of `parameters` over tiles and over the ranks of a communicator.

    Use, each step: `zero()`; backward for each tile of this rank, after `overlap()` for the last; `finish()`; scale or
    clip the buckets; `deliver()` puts them into `.grad`. `wide`: sum in float64, else in the parameters' own dtype.
    Parameters that want no gradient (those of other stages) are left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], communicator: Communicator, wide: bool = True) -> None:
        self._communicator = communicator
        self._parameters = [p for p in parameters if p.requires_grad]
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self.buckets: list[torch.Tensor] = []
        for members in _group(list(reversed(self._parameters)), BUCKET_BYTES):
            self._add_bucket(members, torch.float64 if wide else members[0].dtype)
        self._missing = [0] * len(self.buckets)
        self._next = 0
        self._works: list[Work] = []
        self._last: set[nn.Parameter] = set()
        self._handles = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._parameters]

    def _add_bucket(self, members: list[nn.Parameter], dtype: torch.dtype) -> None:
        flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=members[0].device)
        start = 0
        for parameter in members:
            # Same order in memory as the parameter (channels-last or not), so that adding a gradient walks both in
            # order; dense, also where the parameter is a part of a tensor.
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
        self._missing = [0] * len(self.buckets)
        for index in self._bucket_of.values():
            self._missing[index] += 1
        self._next = 0
        self._works = []
        self._last = set()

    def use(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the parameter's values (in `dtype`, if given) as a tensor whose gradient is added to the sums by
        itself, in its own dtype, and to nothing else. Make it right before its use: autograd then hands its gradient
        over soon."""
        used: torch.Tensor = _Use.apply(parameter, self._sums[parameter].add_, dtype or parameter.dtype)
        return used

    def overlap(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Start sums of full buckets: the next gradient of each of `parameters` (None: all) is its last of the step."""
        self._last.update(self._parameters if parameters is None else parameters)

    def finish(self) -> None:
        """Start what has not been started and wait until every bucket holds the sum over all ranks."""
        while self._next < len(self.buckets):
            self._start_next()
        for work in self._works:
            work.wait()
        self._last = set()

    def total(self) -> torch.Tensor:
        """Return the sum of all numbers of the gradient, a float64 on its device: finite only where all are."""
        sums = [flat.sum(dtype=torch.float64) for flat in self.buckets]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)

    def deliver(self) -> None:
        """Give every parameter its gradient: what its bucket holds now."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)

    def close(self) -> None:
        """Take the hooks off the parameters again."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return  # it has come by a use
        self._sums[parameter].add_(parameter.grad)
        parameter.grad = None  # the next tile's is then assigned, not added in the narrow dtype
        if parameter not in self._last:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        # In order only, whichever bucket is full first: the order of collectives must be the same on every rank.
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
        return parameter.detach() if dtype == parameter.dtype else parameter.to(dtype)  # strides as they are

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.add(gradient)
        return None, None, None


def sum_gradients(parameters: Iterable[nn.Parameter], communicator: Communicator) -> None:
    """Sum each parameter's gradient over ranks, in float64, in its place; None stays where no rank has one.

    For a loop that has its gradients in `.grad`, as torch left them: a `GradientReducer` would take them away on their
    way there. Collective.
    """
    wanted = [p for p in parameters if p.requires_grad]
    if communicator.size == 1 or not wanted:
        return
    there = torch.tensor([float(p.grad is not None) for p in wanted], dtype=torch.float64, device=wanted[0].device)
    flat = torch.cat([there, *((torch.zeros_like(p) if p.grad is None else p.grad).double().flatten() for p in wanted)])
    communicator.all_reduce_sum(flat).wait()
    there, *sums = flat.split([len(wanted), *(p.numel() for p in wanted)])
    for parameter, count, total in zip(wanted, there.tolist(), sums, strict=True):
        if count:
            parameter.grad = total.view(parameter.shape).to(parameter.dtype)


def scale_gradients(reducer: GradientReducer, factor: float | torch.Tensor) -> None:
    """Multiply every gradient by `factor`."""
    for flat in reducer.buckets:
        flat.mul_(factor)


def clip_gradients(
    reducer: GradientReducer, largest_norm: float, stages: Communicator, device: torch.device = CPU
) -> None:
    """Scale the whole gradient down to `largest_norm` where it is longer (L2 norm, taken in float64).

    `stages` joins the ranks that hold the parts of the network, one each; all of them call it. `device`: where
    the sums lie, also on a rank without weights.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for flat in reducer.buckets:
        squares += flat.double().square().sum()
    stages.all_reduce_sum(squares).wait()
    norm = squares.sqrt()
    scale_gradients(reducer, torch.where(norm > largest_norm, largest_norm / norm, 1.0))  # the host does not ask


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
