"""The cost of the conversion alone: on one rank, the converted network against the one it was converted from.

Both compute the same layers on the same weights; what differs is what Python does around them. They take turns, the
first of a pair being the second of the next, and the ratio is taken pair by pair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from spread import Spread, markdown

from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import serial_axes
from tiledseg.geometry.decomposition import Partition
from tiledseg.models.unet import build_unet
from tiledseg.spatial.network import SpatialNetwork
from tiledseg.training.objective import cross_entropy_sums

CLASSES = 5
BOUND = 1.02  # the law to show: below 2 %


def measure_conversion(size: int, levels: int, base_channels: int, pairs: int, device: str = "cpu") -> dict[str, Any]:
    """Forward and backward of both, `pairs` times each after two to warm up; figures as plain values for JSON."""
    network = build_unet(UNet(levels, base_channels=base_channels, classes=CLASSES), seed=0).to(device)
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
    wall, cpu = (
        sorted(c[clock] / p[clock] for p, c in zip(times["plain"], times["converted"], strict=True)) for clock in (0, 1)
    )
    return {
        "device": device,
        "size": size,
        "pairs": pairs,
        "plain_seconds": Spread.of([t[0] for t in times["plain"]]).to_dict(),
        "wall_ratio": _quartiles(wall),
        "cpu_ratio": _quartiles(cpu),
        "difference_of_gradients": max(
            float((a - b).abs().max() / a.abs().max())
            for a, b in zip(gradients["plain"], gradients["converted"], strict=True)
        ),
    }


def _quartiles(values: list[float]) -> dict[str, float]:
    """Median and quartiles: single pairs are disturbed by whatever else the machine does."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "least": lower, "most": upper}


def conversion_table(answers: list[dict[str, Any]]) -> str:
    head = (
        "image",
        "device",
        "seconds a step, unconverted",
        "converted over unconverted: wall time (quartiles)",
        "CPU time (quartiles)",
        "gradients differ by",
        "below 2 %",
    )
    return markdown(head, [_cells(answer) for answer in answers])


def _cells(answer: dict[str, Any]) -> list[str]:
    wall, cpu = (
        f"{ratio['median']:.4f} ({ratio['least']:.4f} - {ratio['most']:.4f})"
        for ratio in (answer["wall_ratio"], answer["cpu_ratio"])
    )
    seconds = Spread(**answer["plain_seconds"])
    verdict = "yes" if answer["wall_ratio"]["median"] < BOUND else "no"
    size, difference = answer["size"], answer["difference_of_gradients"]
    return [f"{size} px", answer["device"], str(seconds), wall, cpu, f"{difference:.1e}", verdict]


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
