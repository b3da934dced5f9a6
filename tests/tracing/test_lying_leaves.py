"""Declared leaves that are something else than declared in what small noise does not show: each is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tiledseg
from tests.tracing.test_fooled import Reversed
from tests.tracing.test_windows import Last
from tests.tracing.windows import Block
from tiledseg.errors import ConfigError
from tiledseg.tracing import declared

Function = Callable[[Any, torch.Tensor], torch.Tensor]


class Lying(nn.Module):
    """A function of a tensor whose channels come last, and of a few weights."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.w, self.block, self.kept = function, nn.Parameter(torch.rand(6)), Block(6, 2), {}
        self.ends_meet = Block(6, 2, masks=False)
        self.far = nn.Conv2d(6, 6, 3, padding=100, dilation=100)
        self.register_buffer("running", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("gate", torch.zeros(()))
        self.shut = torch.zeros(1)

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        return self.function(self, x_BHWC)


def _far(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.far(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _below(row: int) -> Function:
    return lambda self, x: x * torch.where(torch.arange(x.shape[1]) > row, 2.0, 1.0).to(x)[:, None, None]


def _running(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.training:
        self.running.mul_(0.9).add_(0.1 * x.detach().mean((0, 1, 2)))
        return x * self.w
    return x * self.w - self.running


def _counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x * (1 + (self.calls > 300))


def _keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
    if "mean" not in self.kept:
        self.kept["mean"] = x.detach().mean((0, 1, 2))
    return x * self.w - 0 * self.kept["mean"]


def _hooked(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * self.w
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / gradient.abs().sum())
    return y * 1


PIXEL, NEAR = tiledseg.PerPixel(), tiledseg.Local(1)
LIES: dict[str, tuple[Function, Any, str]] = {
    "vast images": (lambda self, x: x * (2 if x.shape[1] > 9000 else 1), PIXEL, "is given other numbers at 8 x 70000"),
    "wide images": (lambda self, x: self.block(x) if x.shape[2] < 9000 else x, tiledseg.Windows(4, 2), "comes"),
    "far rows": (_below(500), PIXEL, "a part of an image"),
    "large values": (lambda self, x: x + x.clamp_min(50).amax((1, 2), keepdim=True), PIXEL, "depends on row"),
    "a branch": (lambda self, x: x * 2 if x.abs().max() > 1e6 else x * self.w, PIXEL, "reads the values"),
    "the batch": (lambda self, x: x - x.mean(0, keepdim=True), PIXEL, "beside another one in a batch"),
    "a gate that is shut": (lambda self, x: x + self.gate * x.mean((1, 2), keepdim=True), PIXEL, "depends on row"),
    "a tensor that is zero": (lambda self, x: x + self.shut[0] * x.roll(1, 1), PIXEL, "depends on row"),
    "single precision": (
        lambda self, x: x * 2 if x.dtype == torch.float64 else x.flip(1),
        PIXEL,
        "else in torch.float32",
    ),
    "half precision": (lambda self, x: x.roll(int(x.dtype == torch.bfloat16), 1), PIXEL, "else in torch.bfloat16"),
    "far away": (_far, NEAR, "depends on row"),
    "far away in training": (lambda self, x: _far(self, x) if self.training else x, NEAR, "in training its output"),
    "a mean of training": (_running, PIXEL, "moves its buffer"),
    "a count": (_counts, PIXEL, "writes over 'leaf.calls'"),
    "kept": (_keeps, PIXEL, "at its next call"),
    "own gradients": (lambda self, x: Reversed.apply(x * self.w) * 1, PIXEL, "a backward pass of its own"),
    "a hook": (_hooked, PIXEL, "hangs a hook"),
    "a shift": (lambda self, x: self.block(x), tiledseg.Windows(4), "declared as .*depends on row"),
    "small windows": (lambda self, x: self.block(x), tiledseg.Windows(2), "does not run on 8 x 6"),
    "ends that meet": (lambda self, x: self.ends_meet(x), tiledseg.Windows(4, 2), "depends on row"),
    "its place": (lambda self, x: x + torch.arange(x.shape[1]).to(x)[:, None, None], NEAR, "a part of an image gives"),
    "its size": (lambda self, x: x.repeat_interleave(2, 1).repeat_interleave(2, 2), PIXEL, "gives|depends on row"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_DECLARED", dict(declared._DECLARED))
    function, stated, why = LIES[name]
    tiledseg.declare(Lying, stated)
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=why) as refusal:
        tiledseg.trace(Last(Lying(function)).double(), bands=3)
    assert "parts.0" in str(refusal.value)


class Smaller(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, ::2, ::2]


def test_a_whole_image_of_fewer_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_DECLARED", dict(declared._DECLARED))
    tiledseg.declare(Smaller, tiledseg.WholeImage())
    with pytest.raises(ConfigError, match="gives 16 x 12 pixels of 32 x 24, not 32 x 24"):
        tiledseg.trace(nn.Sequential(nn.Conv2d(3, 4, 1), Smaller()), bands=3)
