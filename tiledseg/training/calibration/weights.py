"""What each weight and each tensor of weights takes: adding up a tile's gradient, and a step's update."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.comm.transports.stopwatch import Stopwatch
from tiledseg.gradients import GradientReducer, scale_gradients

_FEW, _MANY, _TENSORS = 64, 1 << 17, 32  # weights of a tensor, and tensors
_REPEATS = 5


class WeightTimes(NamedTuple):
    """Seconds a weight, of a tile's gradient and of an update; and a tensor of either."""

    gradient: float
    update: float
    tensor: float


def measure_weights(device: torch.device) -> WeightTimes:
    """By few and by many weights in as many tensors, as the step treats them: gradients summed in float64, AdamW."""
    few, many = (_seconds(size, device) for size in (_FEW, _MANY))
    weights = _TENSORS * (_MANY - _FEW)
    gradient, update = (max(0.0, b - a) / weights for a, b in zip(few, many, strict=True))
    return WeightTimes(gradient, update, min(few) / _TENSORS)


def _seconds(size: int, device: torch.device) -> tuple[float, float]:
    parameters = [nn.Parameter(torch.rand(size, device=device)) for _ in range(_TENSORS)]
    reducer = GradientReducer(parameters, SerialCommunicator())
    optimizer = torch.optim.AdamW(parameters, lr=0.0, foreach=True)
    watch, found = Stopwatch(device), []
    for _ in range(1 + _REPEATS):
        reducer.zero()
        ways = (lambda: _backward(parameters)), (lambda: _update(reducer, optimizer))
        found.append([_timed(watch, way) for way in ways])
    reducer.close()
    gradient, update = map(min, zip(*found[1:], strict=True))
    return gradient, update


def _backward(parameters: list[nn.Parameter]) -> None:
    torch.autograd.backward(parameters, [torch.ones_like(p) for p in parameters])


def _update(reducer: GradientReducer, optimizer: torch.optim.Optimizer) -> None:
    reducer.finish()
    scale_gradients(reducer, 0.5)
    reducer.deliver()
    optimizer.step()


def _timed(watch: Stopwatch, way: object) -> float:
    watch.reset()
    with watch.running():
        way()  # type: ignore[operator]
    return watch.seconds()
