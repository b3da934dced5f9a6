"""A traced network on a whole image against its module, called as its author would: a training step, by turns.

    python -m benchmarks.traced [--size 128] [--repeat 9]

One thread, float32, networks of their published widths, contiguous (as their authors run them) and channels last.
Prints, of each, the median of the paired ratios (seconds traced by seconds of the module), and their quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from benchmarks.foreign_networks import MONAI, Foreign, monai
from tiledseg.tracing.trace import trace

WIDE = (32, 64, 128, 256)
SOURCES = {
    "MONAI UNet, batch norm": Foreign(
        "monai", MONAI, monai("UNet", 2, 3, 2, (16, 32, 64, 128), (2, 2, 2), num_res_units=2, norm="batch")
    ),
    "MONAI BasicUNet": Foreign("monai", MONAI, monai("BasicUNet", 2, 3, 2)),
    "MONAI DynUNet": Foreign(
        "monai", MONAI, monai("DynUNet", 2, 3, 2, (3,) * 4, (1, 2, 2, 2), (2, 2, 2), filters=WIDE, res_block=True)
    ),
    "MONAI SegResNet": Foreign("monai", MONAI, monai("SegResNet", 2, 16, 3, 2)),
    "MONAI SegResNetDS": Foreign("monai", MONAI, monai("SegResNetDS", 2, 32, 3, 2, norm="batch")),
    "MONAI FlexibleUNet, ResNet-18": Foreign("monai", MONAI, monai("FlexibleUNet", 3, 2, "resnet18", spatial_dims=2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, foreign in SOURCES.items():
        for layout in (torch.contiguous_format, torch.channels_last):
            found = ratios(foreign, options.size, options.repeat, layout)
            low, middle, high = statistics.quantiles(found, n=4)
            word = "channels last" if layout == torch.channels_last else "contiguous"
            print(f"{name}, {word}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


def ratios(foreign: Foreign, size: int, repeat: int, layout: torch.memory_format) -> list[float]:
    """Seconds of a step of the traced network by those of the module's, which share their weights."""
    module = foreign.module().float().to(memory_format=layout).train()  # type: ignore[call-overload]
    network = trace(module, foreign.bands, foreign.outputs)
    x_BCHW = torch.randn(1, foreign.bands, size, size).contiguous(memory_format=layout)
    _step(module, x_BCHW), _step(network, x_BCHW)
    found = []
    for turn in range(repeat):
        pair = (network, module) if turn % 2 else (module, network)
        seconds = {id(each): _step(each, x_BCHW) for each in pair}
        found.append(seconds[id(network)] / seconds[id(module)])
    return found


def _step(network: nn.Module, x_BCHW: torch.Tensor) -> float:
    begin = time.perf_counter()
    y = network(x_BCHW)
    (y if isinstance(y, torch.Tensor) else y[0]).square().mean().backward()
    network.zero_grad()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
