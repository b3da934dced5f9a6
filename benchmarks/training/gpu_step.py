"""One training step of a U-Net on one device, as a share of the matrix rate that the same device reaches.

    python benchmarks/training/gpu_step.py [--side 1440] [--base-channels 64] [--device cuda]

For fp32, TF32 and bf16: seconds of forward and backward on one context, FLOP/s by the planner's count of multiply-adds
(2 a multiply-add, backward twice the forward), and their share of the rate of a large matrix product in the same number
format, measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from tiledseg.architecture.unet import UNet
from tiledseg.models.unet import build_unet
from tiledseg.planning.cost import layer_costs
from tiledseg.training.objective import cross_entropy_sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", type=int, default=1440)
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=64)
    parser.add_argument("--matrix", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    unet = UNet(options.levels, base_channels=options.base_channels)
    forward = sum(cost.multiply_adds for cost in layer_costs(unet.layers(), unet.bands, (options.side, options.side)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, U-Net L={options.levels}, {options.base_channels} channels, "
          f"context {options.side} px, {6 * forward / 1e12:.2f} TFLOP a step")  # fmt: skip
    print("precision   step ms   TFLOP/s   matrix TFLOP/s   share   peak GiB")
    for precision in ("fp32", "tf32", "bf16"):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.benchmark = True
        matrix = matrix_rate(options.matrix, precision, device, options.repeats)
        seconds, peak = step_seconds(unet, options.side, precision, device, options.repeats)
        rate = 6 * forward / seconds
        print(f"{precision:9} {seconds * 1e3:9.1f} {rate / 1e12:9.2f} {matrix / 1e12:16.2f} "
              f"{rate / matrix:7.1%} {peak / 2**30:10.2f}")  # fmt: skip


def matrix_rate(n: int, precision: str, device: torch.device, repeats: int) -> float:
    """FLOP/s of an n x n matrix product."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b, device, repeats)


def step_seconds(unet: UNet, side: int, precision: str, device: torch.device, repeats: int) -> tuple[float, int]:
    """(median seconds, peak bytes) of one forward and backward pass."""
    network = build_unet(unet, 0).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x_BCHW = torch.randn(1, unet.bands, side, side, device=device).contiguous(memory_format=torch.channels_last)
    target_BHW = torch.randint(0, unet.classes, (1, side, side), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def step() -> None:
        network.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits_BKHW = network(x_BCHW)
        cross_entropy_sums(logits_BKHW.float(), target_BHW, 255)[0].backward()

    seconds = timed(step, device, repeats)
    return seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def timed(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after two to warm up."""
    times = []
    for i in range(repeats + 2):
        _wait(device)
        begun = time.perf_counter()
        function()
        _wait(device)
        if i >= 2:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
