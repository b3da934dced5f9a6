"""What leaving for a store costs here, measured in a moment: so that the plan can weigh it against computing again."""

from __future__ import annotations

import torch

from tiledseg.memory.disk.rates import TENSOR, store_rates
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.profile import FLOPS_PER_MULTIPLY_ADD
from tiledseg.planning.memory.store import Store
from tiledseg.planning.walk.network_walk import Speed
from tiledseg.training.calibration.movement import least

_CHANNELS, _SIDE, _VALUE = 32, 128, 4
_MOVED = 2 * TENSOR  # bytes to the store and back, at most 0.2 s on a disk of 1 GB/s


def measured_store(folder: str, ranks: int, machine: Machine | None, precision: str) -> Store:
    """Of a folder that so many ranks share. How fast these compute the machine's profile says; without one, a
    convolution and a copy.

    Raises ConfigError, WriteError or MemoryLimitError where the store takes nothing.
    """
    rates = store_rates(folder, _MOVED)
    profile = machine.profile if machine else None
    speed = Speed(profile.flops[precision], profile.bandwidth) if profile else _measured_speed()
    return Store(rates.written / ranks, rates.read / ranks, speed)


def _measured_speed() -> Speed:
    device = torch.device("cpu")
    x_BCHW = torch.rand(1, _CHANNELS, _SIDE, _SIDE).contiguous(memory_format=torch.channels_last)
    weight = torch.rand(_CHANNELS, _CHANNELS, 3, 3)
    work = FLOPS_PER_MULTIPLY_ADD * 9 * _CHANNELS**2 * _SIDE**2
    with torch.no_grad():
        computing = least(device, lambda: torch.nn.functional.conv2d(x_BCHW, weight, padding=1))
        one_P, other_P = torch.rand(TENSOR // _VALUE), torch.empty(TENSOR // _VALUE)
        moving = least(device, lambda: other_P.copy_(one_P))
    return Speed(work / computing, 2 * TENSOR / moving)
