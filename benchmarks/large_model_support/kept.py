"""What a half, a third and a quarter of a U-Net's activations cost, by the plan.

    python -m benchmarks.large_model_support.kept                      # U-Net of 5 levels, 64 channels, 1440 px, bf16
    python -m benchmarks.large_model_support.kept --norm batch --size 1024

Activations are what lies there when the forward pass has ended, and parts of what plain PyTorch keeps of the network as
its author would write it (`network.py`), counted on tensors without values. All else is predicted for the rates that
are given. The backward pass needs more than that for a moment: `peak` is the most that a step takes beside its weights.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.large_model_support.network import PlainUNet
from tiledseg.architecture.unet import UNet
from tiledseg.planning.walk.choice import MemoryChoice, StepChoices, step_choices
from tiledseg.planning.walk.cost_model import Machine, Store
from tiledseg.units import ACTIVATION_BYTES

SHARES = {"a half": 2, "a third": 3, "a quarter": 4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def kept_by_pytorch(network: PlainUNet, x_BCHW: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, weights left out."""
    weights = {weight.untyped_storage()._cdata for weight in network.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network(x_BCHW)
    return sum(storage.nbytes() for key, storage in storages.items() if key not in weights)


def plain_bytes(unet: UNet, size: int, precision: str) -> int:
    """The same, of a plain U-Net on `size` x `size` pixels, counted on tensors without values."""
    with torch.device("meta"):
        normed = unet.norm != "none"
        network = PlainUNet(unet.levels, unet.base_channels, unet.bands, unet.classes, normed=normed)
        return kept_by_pytorch(
            network.to(DTYPES[precision]), torch.empty(1, unet.bands, size, size, dtype=DTYPES[precision])
        )


def keeping(step: StepChoices, most: int) -> MemoryChoice | None:
    """Return a choice by which at most so many bytes are in memory when the forward pass has ended, whatever the
    backward pass needs for a moment; None where none fits."""
    walk = step.walk
    free = -sum(item.bytes + item.work for item in walk.items)
    ended = (*[free] * (len(walk.base) - 1), walk.rebuilding[-1])
    choice = StepChoices(replace(walk, base=ended, rebuilding=ended), 0).choose(most)
    return None if choice is None else replace(choice, peak=step.peak(choice.policy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--norm", default="none")
    parser.add_argument("--size", type=int, default=1440)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--flops", type=float, default=0.6 * 790e12, help="operations a second")
    parser.add_argument("--bandwidth", type=float, default=0.8 * 4.8e12, help="bytes a second of memory")
    parser.add_argument("--host", type=float, default=50e9, help="bytes a second to the host's memory, each way")
    given = parser.parse_args()
    unet = UNet(given.levels, base_channels=given.channels, norm=given.norm)
    store = Store(given.host, given.host, Machine(given.flops, memory_bandwidth=given.bandwidth))
    size = given.size, given.size
    step = step_choices(unet.graph(), unet.bands, size, ACTIVATION_BYTES[given.precision], store)
    plain = plain_bytes(unet, given.size, given.precision)
    print(f"plain PyTorch keeps {plain / 1e9:.3f} GB; ours, everything kept, has a peak of {_beside(step, step.kept)}")
    print("| kept of that | bytes | more time, predicted | rebuilt | leave | peak |")
    print("| --- | --- | --- | --- | --- | --- |")
    for words, part in SHARES.items():
        found = keeping(step, plain // part)
        if found is None:
            print(f"| {words} | {plain / part / 1e9:.3f} GB | no choice found | | | |")
            continue
        lying = step.walk.kept(step.walk.needed_words(found.policy)) / 1e9
        counts = f"{100 * found.extra:.1f} % | {len(found.items)} | {len(found.away)}"
        print(f"| {words} | {lying:.3f} GB | {counts} | {_beside(step, found.peak)} |")


def _beside(step: StepChoices, peak: int) -> str:
    return f"{(peak - step.fixed) / 1e9:.3f} GB"


if __name__ == "__main__":
    main()
