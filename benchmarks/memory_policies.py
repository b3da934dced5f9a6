"""What compaction and recomputation save of a U-Net's step, and what they cost: keep, compact and all by turns.

    python -m benchmarks.memory_policies --size 256 --repeat 9

Bytes that autograd holds when the forward pass has ended, at the worst moment of the step, and the median of the ratios
of each round's seconds to those of keeping everything.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn.functional import cross_entropy

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.tracing.allocations import AllocationMeter

WORDS = ("none", "compact", "all")


def step(network: GraphNetwork, x_BCHW: torch.Tensor, labels_BHW: torch.Tensor, meter: AllocationMeter | None) -> int:
    """One forward and backward pass; bytes that lay there between them."""
    logits_BKHW = network(x_BCHW)
    kept = meter.bytes if meter else 0
    loss = cross_entropy(logits_BKHW, labels_BHW, reduction="sum")
    del logits_BKHW
    loss.backward()
    return kept


def compare(norm: str, size: int, channels: int, repeat: int) -> None:
    network = build_modules(UNet(4, base_channels=channels, norm=norm), seed=0).train()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x_BCHW = torch.randn(1, network.bands, size, size).contiguous(memory_format=torch.channels_last)
    labels_BHW = torch.zeros(1, size, size, dtype=torch.long)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [tensor for p in network.parameters() for tensor in (p, p.grad) if tensor is not None]
    policies = {word: named_policy(network.graph, network.bands, word) for word in WORDS}
    ratios: dict[str, list[float]] = {word: [] for word in WORDS}
    for _ in range(repeat):
        seconds = {}
        for word, policy in policies.items():
            network.follow(policy)
            start = time.perf_counter()
            step(network, x_BCHW, labels_BHW, None)
            seconds[word] = time.perf_counter() - start
        for word in WORDS:
            ratios[word].append(seconds[word] / seconds["none"])
    for word, policy in policies.items():
        network.follow(policy)
        with AllocationMeter([*known, *network.buffers(), x_BCHW, labels_BHW]) as meter:
            kept = step(network, x_BCHW, labels_BHW, meter)
        low, middle, high = statistics.quantiles(ratios[word], n=4)
        megabytes = f"{kept / 2**20:.1f} | {meter.peak / 2**20:.1f}"
        print(f"| {norm} | {word} | {megabytes} | {middle:.2f} ({low:.2f} to {high:.2f}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| norm | memory.recompute | kept, MiB | peak, MiB | time |\n| --- | --- | --- | --- | --- |")
    for norm in ("none", "instance", "batch"):
        compare(norm, options.size, options.channels, options.repeat)


if __name__ == "__main__":
    main()
