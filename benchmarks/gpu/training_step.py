"""The time of a training step as a share of what the same device reaches in a matrix product and in a copy.

Three ways, each in fp32, TF32 and bf16: `default` (as `train` by default: deterministic kernels), `fast` (cuDNN chooses
by timing), `compiled` (fast, and torch.compile): forward and backward of the network alone. Before them the production
step: the trainer's own, with its reducer and optimizer, in the same ways, the share of the time in which the GPU
computes, and where that goes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.part import Part, begin_part
from benchmarks.gpu.production import ProductionStep, finish, forget_peak, median_seconds, peak_bytes, step_flop
from tiledseg.architecture.unet import UNet
from tiledseg.execution.carrying import autocast, make_deterministic
from tiledseg.models import compiled
from tiledseg.models.network import build_modules
from tiledseg.training.objective import PixelTerm

PRECISIONS = ("fp32", "tf32", "bf16")
WAYS = ("default", "fast", "compiled")
COMPILE_SECONDS = 30.0  # an estimate of what compiling forward and backward takes
KERNELS = 15


@dataclass(frozen=True)
class Sizes:
    """`side` of the image, `matrix` of the product, `copied` bytes."""

    unet: UNet
    side: int
    matrix: int
    copied: int
    repeats: int


LARGE = Sizes(UNet(5, base_channels=64), 1440, 8192, 4 * 2**30, 10)
SMALL = Sizes(UNet(3, base_channels=4), 64, 256, 2**20, 1)


def main() -> int:
    part = begin_part(__file__)
    sizes = SMALL if part.small or part.device.type == "cpu" else LARGE
    part.measure("copy", "GB/s, read and written", lambda: copy_rate(sizes, part.device))
    rates = {}
    for precision in PRECISIONS:
        rates[precision] = part.measure(
            f"matrix product {precision}", "TFLOP/s", partial(matrix_rate, sizes, precision, part.device)
        )
    for precision in ("bf16", "tf32", "fp32"):
        for way in ("default", "fast"):
            step = partial(production, part, sizes, precision, way, rates[precision])
            part.measure(f"production step {precision} {way}", "ms", step, needs=4)
    whole = partial(production, part, sizes, "bf16", "compiled", rates["bf16"])
    part.measure("production step bf16 compiled", "ms", whole, needs=COMPILE_SECONDS if sizes is LARGE else 4)
    part.measure("busy while training", "share of the time", lambda: busy(part, sizes), needs=4)
    part.measure("longest kernels", "us a step", lambda: longest_kernels(sizes, part.device), needs=4)
    for way in WAYS:
        for precision in ("bf16", "tf32", "fp32"):
            needs = 4.0 if way != "compiled" or sizes is SMALL else COMPILE_SECONDS
            part.measure(
                f"network {precision} {way}",
                "ms",
                partial(network_alone, part, sizes, precision, way, rates[precision]),
                needs=needs,
            )
    return int(part.failed)


def copy_rate(sizes: Sizes, device: torch.device) -> float:
    """Bytes read and written in a second by a copy within the device's memory."""
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.copied / median_seconds(lambda: target.copy_(source), device, sizes.repeats) / 1e9


def matrix_rate(sizes: Sizes, precision: str, device: torch.device) -> float:
    """Of an n x n product of random numbers."""
    set_kernels("fast", precision)
    n, dtype = sizes.matrix, torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: a @ b, device, sizes.repeats) / 1e12


def set_kernels(way: str, precision: str) -> None:
    """Which kernels may be used. TF32 is set after: `make_deterministic` knows only on and off."""
    make_deterministic(way == "default")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def production(part: Part, sizes: Sizes, precision: str, way: str, rate: float | None) -> dict[str, Any]:
    """The trainer's own step; `compiled` as by `train.compile`."""
    set_kernels(way, precision)
    forget_peak(part.device)
    torch._dynamo.reset()
    compiles = way == "compiled" and (sizes is LARGE or not part.small)
    with _traced_only() if way == "compiled" and not compiles else nullcontext():
        own = "bf16" if precision == "bf16" else "fp32"
        step = ProductionStep(sizes.unet, sizes.side, own, part.device, way == "compiled")
        try:
            return _figures(sizes, median_seconds(step.run, part.device, sizes.repeats), part.device, rate)
        finally:
            step.close()


@contextmanager
def _traced_only() -> Iterator[None]:
    """The small form shows that the step can be traced; code would take long to generate."""
    backend, compiled.INDUCTOR = compiled.INDUCTOR, "eager"
    try:
        yield
    finally:
        compiled.INDUCTOR = backend


def busy(part: Part, sizes: Sizes) -> float:
    """The share of the time of ten steps, inputs sent ahead, in which kernels run, as the profiler adds them up."""
    from torch.profiler import ProfilerActivity, profile

    part.needs_gpu()
    set_kernels("fast", "bf16")
    step = ProductionStep(sizes.unet, sizes.side, "bf16", part.device)
    try:
        step.run_ahead(3)
        finish(part.device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            begun = time.perf_counter()
            step.run_ahead(10)
            finish(part.device)
            seconds = time.perf_counter() - begun
    finally:
        step.close()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / seconds


def network_alone(part: Part, sizes: Sizes, precision: str, way: str, rate: float | None) -> dict[str, Any]:
    """Forward, loss and backward, nothing of the trainer's."""
    set_kernels(way, precision)
    device = part.device
    forget_peak(device)
    network = build_modules(sizes.unet, 0).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    run = network
    torch._dynamo.reset()  # else a limit of recompilations leaves the later ones uncompiled
    if way == "compiled":  # the small form shows that the network can be traced; code would take long to generate
        run = torch.compile(network, backend="inductor" if sizes is LARGE else "eager")
    side, classes = sizes.side, sizes.unet.classes
    x_BCHW = torch.randn(1, sizes.unet.bands, side, side, device=device).contiguous(memory_format=torch.channels_last)
    target_BHW = torch.randint(0, classes, (1, side, side), device=device)

    def step() -> None:
        network.zero_grad(set_to_none=True)
        with autocast(precision, device):
            logits_BKHW = run(x_BCHW)
        PixelTerm(255).sums((logits_BKHW.float(),), target_BHW)[0].backward()

    return _figures(sizes, median_seconds(step, device, sizes.repeats), device, rate)


def _figures(sizes: Sizes, seconds: float, device: torch.device, rate: float | None) -> dict[str, Any]:
    """`rate`: TFLOP/s of the matrix product, None where it failed."""
    tflops = step_flop(sizes.unet, sizes.side) / seconds / 1e12
    share = tflops / rate if rate else None
    return {"ms": 1e3 * seconds, "tflops": tflops, "share_of_matrix": share, "peak_bytes": peak_bytes(device)}


def longest_kernels(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Of the production step in bf16, fast: names, microseconds and calls of a step, and the share of all kernels."""
    from torch.profiler import ProfilerActivity, profile

    set_kernels("fast", "bf16")
    step = ProductionStep(sizes.unet, sizes.side, "bf16", device)
    on_gpu = device.type == "cuda"
    try:
        for _ in range(3):
            step.run()
        finish(device)
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            step.run()
            finish(device)
    finally:
        step.close()
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    spent = [(getattr(event, key), event.count, event.key) for event in profiler.key_averages()]
    total = sum(microseconds for microseconds, _, _ in spent) or 1.0
    longest = sorted(spent, reverse=True)[:KERNELS]
    return [{"kernel": name[:120], "us": us, "calls": calls, "share": us / total} for us, calls, name in longest]


if __name__ == "__main__":
    sys.exit(main())
