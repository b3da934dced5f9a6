"""Bytes of oneDNN's code for one shape of one convolution, in one direction.

    python -m benchmarks.cost_model.kernels

A U-Net takes a step on one context after the other, each of a size that it has not seen; freed memory goes back to the
system. A line for each: what the process holds more than before it, and that for each of the network's kernels.
"""

from __future__ import annotations

import ctypes
import gc
import os

import torch

from benchmarks.cost_model.table import DIRECTIONS
from benchmarks.planned_peaks import in_channels_last, step
from benchmarks.planned_resident import status
from tiledseg.architecture.unet import UNet
from tiledseg.models.network import build_modules
from tiledseg.planning.cost_model.layer_work import CONVOLUTIONS
from tiledseg.system.freed_memory import keep_no_more

NETWORKS = UNet(3, base_channels=16), UNet(3, base_channels=12), UNet(4, base_channels=8)
CONTEXTS = (160, 160), (160, 192), (192, 160), (224, 256), (384, 384)  # few: oneDNN keeps 1024 kernels


def main() -> None:
    keep_no_more(os.environ)
    torch.set_num_threads(1)
    for unet in NETWORKS:
        module = in_channels_last(build_modules(unet, seed=0).train())
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        kernels = DIRECTIONS * sum(layer.speed in CONVOLUTIONS for layer in unet.graph().layers)
        step(module, _input(unet.bands, (128, 128)))
        for context in CONTEXTS:
            before = _at_rest()
            step(module, _input(unet.bands, context))
            more = _at_rest() - before
            name = f"L{unet.levels} c{unet.base_channels}, {context}"
            print(f"{name}: {more / 2**20:.1f} MiB, {more / kernels / 1024:.0f} KiB a kernel")


def _input(bands: int, context: tuple[int, int]) -> torch.Tensor:
    return torch.randn(1, bands, *context).contiguous(memory_format=torch.channels_last)


def _at_rest() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


if __name__ == "__main__":
    main()
