"""The cost of offloading to a store, measured in a moment: the plan weighs it against computing again."""

from __future__ import annotations

import torch

from tiledseg.comm.stopwatch import least
from tiledseg.execution.precision import autocast
from tiledseg.memory.file_store import disk_rates
from tiledseg.memory.host import GpuLanes, host_rates
from tiledseg.memory.mover import HOST, TENSOR
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.memory.store import Store
from tiledseg.planning.step.cost import FLOPS_PER_MULTIPLY_ADD

_CHANNELS, _SIDE, _VALUE = 32, 128, 4
_CHANNELS_ON_GPU, _SIDE_ON_GPU = 256, 256
_MOVED = 2 * TENSOR  # bytes to the store and back, at most 0.2 s on a disk of 1 GB/s


def measured_store(
    store: str, ranks: int, machine: Machine | None, precision: str, device: torch.device | None = None
) -> Store:
    """Measure a folder, or on a GPU the host's memory; so many `ranks` share the folder, or the GPU's way to its host.
    The machine's profile says how fast they compute; without one, a convolution and a copy are timed.

    Raises ConfigError, WriteError or MemoryLimitError where the store takes nothing.
    """
    device = device or torch.device("cpu")
    on_disk = device.type == "cpu" or store != HOST
    rates = disk_rates(store, _MOVED) if on_disk else host_rates(GpuLanes(device), _MOVED)
    known = machine if machine and machine.known else None
    known = known.computing(precision) if known else _measured_speed(device, precision)
    return Store(rates.written / ranks, rates.read / ranks, known)


def _measured_speed(device: torch.device, precision: str) -> Machine:
    on_cpu = device.type == "cpu"
    channels, side = (_CHANNELS, _SIDE) if on_cpu else (_CHANNELS_ON_GPU, _SIDE_ON_GPU)
    x_BCHW = torch.rand(1, channels, side, side, device=device).contiguous(memory_format=torch.channels_last)
    weight = torch.rand(channels, channels, 3, 3, device=device).contiguous(memory_format=torch.channels_last)
    work = FLOPS_PER_MULTIPLY_ADD * 9 * channels**2 * side**2
    with torch.no_grad():
        with autocast(precision, device):
            computing = least(device, lambda: torch.nn.functional.conv2d(x_BCHW, weight, padding=1))
        one_P = torch.rand(TENSOR // _VALUE, device=device)
        other_P = torch.empty_like(one_P)
        moving = least(device, lambda: other_P.copy_(one_P))
    return Machine(work / computing, memory_bandwidth=2 * TENSOR / moving)
