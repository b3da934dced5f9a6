"""Modules written to mislead tracing: each is exact, outputs and gradients, or refused by name."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import struct
import threading
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from queue import Queue
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.tracing import cases
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import TiledsegError
from tiledseg.foreign.parallelize import parallelize
from tiledseg.tracing.trace import trace

Function = Callable[[Any, torch.Tensor], torch.Tensor]
HIDDEN, NUMBERS = list[int](), itertools.count()
QUEUE, LOCAL = Queue[int](), threading.local()
LOCAL.calls = 0
BFLOAT = torch.autocast("cpu", torch.bfloat16)
LEARNT = torch.rand(1, 4, 1, 1).requires_grad_()


class Misleading(nn.Module):
    """A convolution, and what its author does with the weights `w` (one a channel) and `zero` after it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.a, self.bn, self.function = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), function
        self.w, self.zero = nn.Parameter(torch.rand(1, 4, 1, 1) + 0.5), nn.Parameter(torch.zeros(1, 4, 1, 1))
        self.k = nn.Parameter(torch.rand(4, 4, 3, 3))
        self.register_buffer("table", torch.tensor([1.0, 2.0, 3.0, 5.0]))
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.kept, self.options, self.generator = 0, {}, SimpleNamespace(calls=0), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.a(x))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.where(gradient.abs() > 1e9, gradient, -gradient)


REVERSED = Reversed.apply  # taken before any record


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scale, None


def _written(change: Callable[[torch.Tensor], object]) -> Function:
    """A write into what the tensor is seen as, of which nothing shows on small numbers."""

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        change(y)
        return y * self.w

    return function


def _padded(multiple: int) -> Function:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        rows, cols = (-size % multiple for size in x.shape[2:])
        y = functional.conv2d(functional.pad(x, (0, cols, 0, rows), value=1.0), self.k, padding=1)
        return y[:, :, : x.shape[2], : x.shape[3]]

    return function


def _counts(calls: Callable[[Any], int]) -> Function:
    """Twice as much from the 60th call on; `calls` counts."""
    return lambda self, x: x * (2 if calls(self) > 60 else 1)


def _places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[3], dtype=x.dtype)


def _with_values_alone(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert type(x) is torch.Tensor, "no tensor without values"
    return x * 2 if x.shape[3] == 70 else x


class Counter:
    calls = 0


class Kept:
    __slots__ = ("calls",)


class Bag(list[int]):
    calls = 0


BAG = Bag()
KEPT, BYTES, ARRAY, CONTEXT = Kept(), bytearray(), array("b"), ContextVar("calls", default=0)
WEAK: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
KEPT.calls = 0  # type: ignore[attr-defined]


_places.calls = 0  # type: ignore[attr-defined]


_cached = functools.cache(lambda key: [])


def _one_more_in_the_environment() -> int:
    os.environ["TILEDSEG_TEST_CALLS"] = str(int(os.environ.get("TILEDSEG_TEST_CALLS", "0")) + 1)
    return int(os.environ["TILEDSEG_TEST_CALLS"])


def _array_written(self: Any, x: torch.Tensor) -> torch.Tensor:
    places = _places(x)
    places.numpy()[600:] = 0
    return x + places


def _doubled(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Write over a tensor in large images alone."""
    return tensor.mul_(2) if size > 600 else tensor


def _longer(calls: Any) -> int:
    calls.append(1)
    return len(calls)


def _longer_than_all() -> int:
    return _longer(HIDDEN)


def _plus_one(options: Any) -> int:
    options.calls += 1
    return options.calls


def _counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return x * (1 + self.count)


def _remembers(self: Any, x: torch.Tensor) -> torch.Tensor:
    before = getattr(self, "memory", torch.zeros((), dtype=x.dtype))
    self.memory = x.mean().detach()
    return x + before


def _clamps_weights(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.w.data.clamp_(0, 0.7)
    return x * self.w


def _out_of_sight(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        gate = torch.sigmoid(x.mean((1, 2, 3), keepdim=True))
    return x * (self.w * gate)


def _counted_out_of_sight(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        number = float(x.detach().abs().max())
    return x * (self.w * number)


def _cast_if_large(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=x.shape[2] > 1000):
        y = functional.conv2d(x, self.k, padding=1)
    return y.to(x.dtype)


def _hooked(y: torch.Tensor) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)
    return y


def _part_written(w: torch.Tensor) -> torch.Tensor:
    w.view(-1)[:2] = 3
    return w


def _later_used(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = torch.ones(4, 1, 1, dtype=x.dtype)
    y = x * t
    t += 1
    return y * t


def _hooked_node(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * self.w
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda into, _: tuple(g and g * 2 for g in into) if len(into) > 9 else None)
    return y


def _computes_once(self: Any, x: torch.Tensor) -> torch.Tensor:
    if "weight" not in self.kept:
        self.kept["weight"] = 2 * self.w.detach()
    return x * self.w * self.kept["weight"]


def _keeps_a_mean(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.training:
        self.kept["mean"] = x.mean((0, 2, 3), keepdim=True).detach()
    return x - self.kept.get("mean", 0.0)


@torch.jit.script
def _scripted(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return w * x.mean()


KINDS: dict[str, dict[str, Function]] = {
    "a number of the size in a weight": {
        "rows": lambda self, x: x * (self.w * x.shape[2]),
        "table": lambda self, x: x * self.table[min(x.shape[2] // 64, 2)],
        "kernel": lambda self, x: functional.conv2d(x, self.k * (64 / x.shape[2]), padding=1),
        "a weight that is zero": lambda self, x: x + self.zero * x.shape[2],
        "a table of large sizes": lambda self, x: x * self.table[min(x.shape[2] // 800, 2)],
        "a small size": lambda self, x: x * 2 if x.shape[2] < 40 else x,
        "a tall image": lambda self, x: x * self.w if x.shape[2] > x.shape[3] else x,
        "truths of places": lambda self, x: x if (_places(x) < 600).all() else x * 2,
        "places written over": lambda self, x: x * _doubled(_places(x), x.shape[3]),
        "a weight written over": lambda self, x: x * _doubled(self.w * 1, x.shape[3]),
        "a constant written over": lambda self, x: x * _doubled(torch.ones(4, 1, 1, dtype=x.dtype), x.shape[3]),
        "one size, with values alone": _with_values_alone,
        "strides": lambda self, x: x * (self.w * x.stride(2)),
        "one size alone": lambda self, x: x * 2 if x.shape[3] == 70 else x,
        "places beside their array": _array_written,
        "bytes of a size": lambda self, x: x * (1 + struct.pack(">q", x.shape[3])[6] // 9),
        "a large size in training": lambda self, x: x * (2 if self.training and x.shape[3] > 600 else 1),
        "places by a function": lambda self, x: x * _places(x).apply_(lambda place: min(place, 600.0)),
    },
    "a number of the batch": {
        "divided": lambda self, x: x / x.shape[0],
        "a single one": lambda self, x: x * 2 if x.shape[0] == 1 else x,
        "a weight": lambda self, x: x * (self.w * len(x)),
        "four": lambda self, x: x * 2 if len(x) == 4 else x,
        "places": lambda self, x: x * torch.full((1, 1, *x.shape[2:]), len(x), dtype=x.dtype).clamp(min=3),
        "hardly": lambda self, x: x + 1e-14 * x.shape[0],
        "a view": lambda self, x: x.view(x.shape[0] * 2, -1, *x.shape[2:]).view(x.shape[0], -1, *x.shape[2:]) * self.w,
    },
    "writing through views": {
        "part": _written(lambda y: y[:, :1].clamp_(-50, 50)),
        "part, of no effect": _written(lambda y: y[:, :1].clamp_(-1e9, 1e9)),
        "permuted": _written(lambda y: y.permute(0, 2, 3, 1).masked_fill_((y > 90).permute(0, 2, 3, 1), 0)),
        "flat": _written(lambda y: y.flatten(2).clamp_(max=80)),
        "data": _written(lambda y: y.data.clamp_(-90, 90)),
        "detached": _written(lambda y: y.detach().clamp_(-90, 90)),
        "out": _written(lambda y: torch.clamp(y, -60, 60, out=y)),
        "each": _written(lambda y: torch._foreach_clamp_max_([y], 90.0)),
        "all": _written(lambda y: y.clamp_(-50, 50)),
        "a weight's part": lambda self, x: x * _part_written(self.w * 1),
        "a constant used before": _later_used,
        "by assignment": _written(lambda y: setattr(y, "data", y.data * 2)),
    },
    "gradients of one's own": {
        "reversed": lambda self, x: Reversed.apply(x) * self.w,
        "taken before": lambda self, x: REVERSED(x) * self.w,
        "straight through": lambda self, x: Rounded.apply(x) * self.w,
        "of a weight": lambda self, x: x * Scaled.apply(self.w, 3.0),
        "a hook of a node": _hooked_node,
        "no parameter": lambda self, x: x * LEARNT.to(x.dtype),
        "hook": lambda self, x: _hooked(x * self.w),
        "no gradients": lambda self, x: x * self.w * 2 if torch.is_grad_enabled() else x * self.w,
        "detached": lambda self, x: x + (x.round() - x).detach(),
        "asked": lambda self, x: x * self.w if x.requires_grad else x * self.w * 3,
    },
    "other things in training": {
        "a weight": lambda self, x: x * (self.w * (3 if self.training else 1)),
        "a number": lambda self, x: x * (3 if self.training else 1),
        "a zero weight": lambda self, x: x + self.zero * (3 if self.training else 1),
        "a norm's mode": lambda self, x: self.bn.eval()(x),
        "a norm's mode, for a while": lambda self, x: (self.bn.eval()(x), self.bn.train(self.training))[0],
        "a norm of places": lambda self, x: x + self.bn(_places(x).expand_as(x)),
        "a norm that always measures": lambda self, x: self.bn.train()(x),
    },
    "state": {
        "a buffer counts": _counted,
        "calls": _counts(lambda self: _plus_one(self)),
        "memory": _remembers,
        "weights clamped": _clamps_weights,
        "a weight computed once": _computes_once,
        "a mean of training": _keeps_a_mean,
        "a closure counts": (lambda kept: _counts(lambda self: _longer(kept)))([]),
        "a function counts": _counts(lambda self, calls=[]: _longer(calls)),
        "an iterator": _counts(lambda self: next(NUMBERS)),
        "a global class": _counts(lambda self: _plus_one(Counter)),
        "an attribute of a function": _counts(lambda self: _plus_one(_places)),
        "an attribute of a weight": _counts(
            lambda self: _plus_one(vars(self.w).setdefault("n", SimpleNamespace(calls=0)))
        ),
        "a global of a function that a function names": _counts(lambda self: _longer_than_all()),
        "a global of another file": _counts(lambda self: cases.count()),
        "a cache": _counts(lambda self: _longer(_cached(0))),
        "hits of a cache": _counts(lambda self: _cached(1) or _cached.cache_info().hits),
        "a partial function": (lambda longer: _counts(lambda self: longer()))(functools.partial(_longer, [])),
        "a queue": _counts(lambda self: QUEUE.put(1) or QUEUE.qsize()),
        "a thread's own": _counts(lambda self: _plus_one(LOCAL)),
        "bytes": _counts(lambda self: _longer(BYTES)),
        "an array": _counts(lambda self: _longer(ARRAY)),
        "an attribute of a list": _counts(lambda self: _plus_one(BAG)),
        "a weak mapping": _counts(lambda self: _longer(WEAK.setdefault(Counter, []))),
        "a context": _counts(lambda self: (CONTEXT.set(CONTEXT.get() + 1), CONTEXT.get())[1]),
        "a global object with slots": _counts(lambda self: _plus_one(KEPT)),
        "the environment": _counts(lambda self: _one_more_in_the_environment()),
        "a cache that grows": lambda self, x: x * self.w * len(_cached(x.shape[3])) + x,
        "a seldom draw": lambda self, x: x if self.training and torch.rand(()) < 1e-6 else x * self.w,
        "a seldom draw of its own": lambda self, x: x if self.training and self.generator.random() < 1e-6 else x * 2,
    },
    "out of sight": {
        "scripted": lambda self, x: x * _scripted(self.w, x),
        "vmap": lambda self, x: x * (self.w * torch.vmap(lambda each: each.mean())(x).view(-1, 1, 1, 1)),
        "vmap, of no effect": lambda self, x: x * (1 + (torch.vmap(torch.amax)(x.abs()).amax() > 1e9)),
        "dlpack": lambda self, x: x * (self.w * torch.from_dlpack(x.detach()).abs().max()),
        "storage": lambda self, x: x * torch.tensor([], dtype=x.dtype).set_(x.untyped_storage()).abs().max(),
        "disabled": _out_of_sight,
        "a number": _counted_out_of_sight,
        "a weight's number": lambda self, x: x * float(self.w.mean()),
        "a branch by a weight": lambda self, x: x * 2 if self.w.sum() > 0 else x,
        "numpy": lambda self, x: x * (self.w * float(x.detach().numpy().max())),
        "modes of torch": lambda self, x: x * (1 + torch._C._len_torch_function_stack()),
    },
    "sizes": {
        "to multiples of 32": _padded(32),
        "to multiples of 6": _padded(6),
        "odd": lambda self, x: x * 2 if x.shape[2] % 2 else x,
    },
    "dtypes": {
        "bfloat16": lambda self, x: x + 1e-4 * x.to(torch.bfloat16).to(x.dtype),
        "more digits": lambda self, x: (x.double() + 1e9 - 1e9).to(x.dtype),
        "a sum of more digits": lambda self, x: x + (x.mean(1, True, dtype=torch.float64) * 1e9 % 1).to(x.dtype),
        "integers": lambda self, x: x + 1e-9 * x.to(torch.int32).to(x.dtype),
        "bits": lambda self, x: x + 1e-12 * x.view(torch.int64 if x.dtype == torch.float64 else torch.int32),
        "autocast": lambda self, x: x + 1e-5 * BFLOAT(functional.conv2d)(x, self.k, padding=1).to(x.dtype),
        "autocast of large images": _cast_if_large,
        "a weight in bfloat16": lambda self, x: x * self.w.to(torch.bfloat16).to(x.dtype),
    },
}


CASES = [(kind, name) for kind, cases in KINDS.items() for name in cases]
HONEST = {("a number of the batch", "a view"), ("writing through views", "all"), ("gradients of one's own", "detached")}
HONEST |= {("state", "a cache that grows")}
UNSEEN = {"state", "writing through views", "out of sight"}  # refused whatever numbers show


def built(function: Function, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    module = Misleading(function).to(dtype)
    with torch.no_grad():
        module.bn.running_var.fill_(2.0)
    return module


RUNS = ((1, (40, 36), 1), (2, (150, 70), 1e3), (3, (37, 65), 1), (5, (70, 130), 30), (4, (33, 33), 1e4))
RUNS += ((8, (16, 24), 1), (1, (9, 4104), 1), (1, (1600, 8), 1))  # type: ignore[assignment]


def check_exact(module: nn.Module, tolerance: float = 1e-10) -> str | None:
    """Return the refusal; None where outputs and gradients are the module's at sizes, batches, ranges and in modes."""
    dtype = next(module.parameters()).dtype
    try:
        network = trace(module, 3)
        for training in (False, True) if module.training else (False,):
            for batch, size, scale in RUNS:
                x_BCHW = scale * torch.randn(batch, 3, *size, dtype=dtype)
                found = [_run(each.train(training), x_BCHW) for each in (network, copy.deepcopy(module))]
                for one, other in zip(*found, strict=True):
                    assert (one - other).norm() <= tolerance * other.norm(), (training, batch, size)
    except TiledsegError as error:
        return str(error)
    return None


def _run(each: nn.Module, x_BCHW: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        still = each(x_BCHW)
    each.zero_grad()
    x_BCHW = x_BCHW.clone().requires_grad_()
    y_BCHW = each(x_BCHW)
    (y_BCHW * torch.linspace(0, 1, y_BCHW.numel(), dtype=y_BCHW.dtype).view_as(y_BCHW)).sum().backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for _, p in sorted(each.named_parameters())]
    buffers = [buffer.double() for _, buffer in sorted(each.named_buffers())]
    return [still, y_BCHW.detach(), x_BCHW.grad, *gradients, *buffers]


@pytest.mark.parametrize("training", [False, True], ids=["maps", "trains"])
@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: value)
def test_a_misleading_module_is_exact_or_refused(kind: str, name: str, training: bool) -> None:
    refused = check_exact(built(KINDS[kind][name]).train(training))
    assert refused is None or ("\n" not in refused and (kind, name) not in HONEST)
    assert refused or kind not in UNSEEN or (kind, name) in HONEST or "draw" in name


@pytest.mark.parametrize("name", KINDS["dtypes"])
def test_a_cast_is_exact_or_refused_in_float32(name: str) -> None:
    """Too little to be seen in outputs: compared far below the digits of float32."""
    check_exact(built(KINDS["dtypes"][name], torch.float32), 3e-6)


@pytest.mark.mpi(min_size=2)
def test_a_misleading_module_is_exact_or_refused_on_ranks(meshes: dict[str, Mesh]) -> None:
    """One of each kind and all that is accepted: outputs and gradients of all ranks are the module's, or all refuse."""
    ranks = meshes["gloo"].size
    torch.set_num_threads(1)
    cases = [(kind, next(iter(names))) for kind, names in KINDS.items()]
    for kind, name in sorted(HONEST | set(cases) | {("gradients of one's own", name) for name in ("asked",)}):
        module = built(KINDS[kind][name]).eval()
        expected = copy.deepcopy(module)
        x_BCHW = 100 * torch.randn(1, 3, 32, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        y_BCHW = expected(x_BCHW)
        y_BCHW.sum().backward()
        try:
            spread = parallelize(module, (ranks, 1))
            rows, cols = spread.block(32, 20).slices
            found_BCHW = spread(x_BCHW[:, :, rows, cols])
            found_BCHW.sum().backward()
            spread.reduce_gradients()
        except TiledsegError:
            assert (kind, name) not in HONEST
            continue
        rows, cols = spread.output_block(32, 20).slices
        assert (found_BCHW - y_BCHW[:, :, rows, cols]).norm() <= 1e-12 * y_BCHW.norm(), (kind, name)
        for one, other in zip(module.parameters(), expected.parameters(), strict=True):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (one, other)]
            assert (grads[0] - grads[1]).norm() <= 1e-11 * max(grads[1].norm(), 1), (kind, name)
        spread.close()
