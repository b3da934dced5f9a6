"""Times a network and its converted twin on one rank, in pairs; one line of JSON. `conversion.py` starts it.

    python -m benchmarks.spatial.conversion_job SIZE LEVELS BASE_CHANNELS PAIRS [DEVICE]

They take turns, the first of a pair being the second of the next.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import serial_axes
from tiledseg.execution.precision import make_deterministic
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.models.network import build_modules
from tiledseg.spatial.network import SpatialNetwork
from tiledseg.training.losses.objective import cross_entropy_sums

CLASSES = 5


def measure_conversion(size: int, levels: int, base_channels: int, pairs: int, device: str = "cpu") -> dict[str, Any]:
    """Forward and backward of both, `pairs` times each after two to warm up; the figures as plain values."""
    network = build_modules(UNet(levels, base_channels=base_channels, classes=CLASSES), seed=0).to(device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    spatial = SpatialNetwork(network, serial_axes())
    generator = torch.Generator().manual_seed(1)
    x_BCHW = torch.randn(1, 4, size, size, generator=generator).to(device)
    x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
    target_BHW = torch.randint(0, CLASSES, (1, size, size), generator=generator).to(device)
    partition = Partition.even(size, 1)

    def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
        network.zero_grad(set_to_none=True)
        _wait(device)
        begun = time.perf_counter(), time.process_time()
        cross_entropy_sums(forward(x_BCHW), target_BHW, 255)[0].backward()
        _wait(device)
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    forwards: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": network,
        "converted": lambda x: spatial(x, partition, partition),
    }
    gradients = {}
    for name, forward in forwards.items():
        step(forward)
        step(forward)
        gradients[name] = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forwards}
    for pair in range(pairs):
        for name in sorted(forwards, reverse=bool(pair % 2)):
            times[name].append(step(forwards[name]))
    return {
        "device": device,
        "size": size,
        "pairs": pairs,
        "wall_seconds": {name: [wall for wall, _ in found] for name, found in times.items()},
        "cpu_seconds": {name: [cpu for _, cpu in found] for name, found in times.items()},
        "difference_of_gradients": max(
            float((a - b).abs().max() / a.abs().max())
            for a, b in zip(gradients["plain"], gradients["converted"], strict=True)
        ),
    }


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_deterministic(True)
    size, levels, base_channels, pairs = map(int, sys.argv[1:5])
    print(json.dumps(measure_conversion(size, levels, base_channels, pairs, *sys.argv[5:6])))
