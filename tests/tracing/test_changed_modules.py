"""Modules that change, or are changed: after tracing, by hooks, in their first call, by a `train` of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.tracing import cases
from tests.tracing.test_fooled import Misleading, built, check_exact
from tiledseg.errors import ConfigError, TiledsegError
from tiledseg.tracing.trace import trace


def _changed(change: Callable[[nn.Module], object]) -> str | None:
    module = built(lambda self, x: self.bn(x) * self.w * (1 + self.calls) if callable(cases.count) else x)
    network = trace(module, 3)
    change(module)
    try:
        found = network.eval()(torch.ones(1, 3, 8, 8, dtype=torch.float64))
    except TiledsegError as error:
        return str(error)
    return None if torch.equal(found, module.eval()(torch.ones(1, 3, 8, 8, dtype=torch.float64))) else "wrong"


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "calls", 3),
        lambda module: setattr(module, "a", nn.Conv2d(3, 4, 3, padding=1).double()),
        lambda module: setattr(module, "w", nn.Parameter(torch.ones(1, 4, 1, 1).double())),
        lambda module: setattr(module.bn, "eps", 1.0),
        lambda module: module.kept.update(a=1),
        lambda module: setattr(module.options, "calls", 2),
        lambda module: setattr(module, "function", lambda self, x: x),
        lambda module: setattr(module, "generator", torch.ones(3)),
        lambda module: setattr(Misleading, "more", 1),
        lambda module: cases.COUNTED.append(1),
        lambda module: module.w.register_hook(lambda gradient: gradient),
        lambda module: module.a.weight.register_post_accumulate_grad_hook(lambda weight: None),
        lambda module: module.a.register_forward_hook(lambda *given: given[-1] * 2),
        lambda module: setattr(module, "forward", lambda x: x),
    ],
)
def test_a_change_after_tracing_is_refused(change: Callable[[nn.Module], object]) -> None:
    assert "has changed since the module was traced" in str(_changed(change))


def test_weights_and_buffers_may_change_after_tracing() -> None:
    assert _changed(lambda module: module.w.data.mul_(2)) is None
    assert _changed(lambda module: module.bn.running_mean.fill_(3)) is None
    assert _changed(lambda module: module.load_state_dict({**module.state_dict(), "w": torch.ones(1, 4, 1, 1)})) is None


NUMBERS, EVERY = itertools.count(), list[int]()


class Numbered(nn.Module):
    """A module whose constructor takes a number of all modules, and lists it."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(NUMBERS)
        EVERY.append(self.number)
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.conv(x_BCHW)


def test_what_constructors_alone_touch_may_change() -> None:
    network, x_BCHW = trace(module := Numbered(), 3).train(), torch.randn(1, 3, 8, 8)
    assert Numbered().number in EVERY
    torch.testing.assert_close(network(x_BCHW), module(x_BCHW))


class Hanging(nn.Module):
    """A module that hangs hooks on its part in its calls, as those of transformers do in the first one."""

    def __init__(self, hang: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.part, self.hang, self.done = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), hang, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hang(self, x)
        return self.part(x)


def _once(hook: Any) -> Any:
    def hang(self: Any, x: torch.Tensor) -> None:
        if not self.done:
            self.part.register_forward_hook(hook)
        self.done = True

    return hang


@pytest.mark.parametrize("hook", [lambda *given: None, lambda *given: given[-1] * 2])
def test_hooks_that_are_hung_in_the_first_call(hook: Any) -> None:
    """The graph is that of all calls; the module is as after one."""
    module = Hanging(_once(hook)).double()
    network, x_BCHW = trace(module, 3), torch.randn(2, 3, 24, 32, dtype=torch.float64)
    assert len(module.part._forward_hooks) == 1
    assert torch.equal(network(x_BCHW), module(x_BCHW))


def _of_a_weight(self: Any, x: torch.Tensor) -> None:
    if not self.part[0].weight._backward_hooks:
        self.part[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


def _of_a_weight_with_gradients(self: Any, x: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        _of_a_weight(self, x)


def _of_the_first_size(self: Any, x: torch.Tensor) -> None:
    if not self.part._forward_hooks:
        self.part.register_forward_hook(lambda module, given, y, rows=x.shape[2]: y * rows)


@pytest.mark.parametrize(
    ("hang", "words"),
    [
        (_of_a_weight, "'part.0.weight' has a hook of its backward pass"),
        (_of_a_weight_with_gradients, "'part.0.weight' has a hook of its backward pass"),
        (_of_the_first_size, "is given other numbers at its next call"),
        (lambda self, x: self.part.register_forward_hook(lambda *given: None), "is changed by forward"),
    ],
)
def test_what_calls_hang_on_weights_or_keep_of_an_image_is_refused(hang: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trace(Hanging(hang), 3)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_all_modules_are_refused(kind: str) -> None:
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *given: None)
    try:
        with pytest.raises(ConfigError, match="all modules"):
            trace(built(lambda self, x: x).train(), 3)
    finally:
        handle.remove()


class Frozen(nn.Module):
    """A batch norm that its author's `train` keeps still."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.a(x))


def test_a_train_of_ones_own_is_kept() -> None:
    module = Frozen().double().train()
    network = trace(module, 3)
    norm = network.train().layers["bn"]
    assert not norm.training
    module.bn.train()  # by hand
    assert norm.training
    module.bn.eval()
    assert check_exact(module) is None
