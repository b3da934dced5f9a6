"""A step whose activations have a half, a third and a quarter of the memory that they would take: what it costs.

`kept`: the cheapest policy by which so much of what plain PyTorch keeps lies there when the forward pass has ended; of
a network without a norm, and of one with. All others are parts of a step's peak. `the plan`: the policy that
`memory.budget` chooses with `memory.offload: auto`: tensors are computed once more, or leave for the host's memory, at
rates that are measured first. `large_model_support`: around the network of somebody's loop, which knows nothing of this
project; parts are computed once more, and what is still too much leaves. `copies alone`: the same without knowing the
network, so that nothing is computed twice. Bytes are those of a GPU's allocator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.part import SkippedError, begin_part
from benchmarks.gpu.production import forget_peak, median_seconds, peak_bytes
from benchmarks.large_model_support.kept import SHARES, keeping, plain_bytes
from benchmarks.large_model_support.network import PlainUNet
from tiledseg.architecture.unet import UNet
from tiledseg.execution.carrying import autocast, make_deterministic
from tiledseg.memory.host import HostMover
from tiledseg.memory.mover import TENSOR, store_rates
from tiledseg.memory.offload import Offload, large_model_support, mover_to
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.planning.run.memory import offload_by
from tiledseg.planning.walk.choice import MemoryChoice, StepChoices, step_choices
from tiledseg.planning.walk.cost_model import Store
from tiledseg.training.objective import PixelTerm
from tiledseg.training.offloading import hooks_of
from tiledseg.units import ACTIVATION_BYTES
from tiledseg.user_files.machine import find_machine

MOST_ON_HOST = 16 << 30
NORMS = "none", "batch"
IGNORED, BANDS, CLASSES = 255, 4, 5
Whole = dict[str, Any] | None


class Loop:
    """Forward, loss and backward, again and again: the loop of somebody who has a network."""

    def __init__(self, network: nn.Module, side: int, device: torch.device) -> None:
        self.network = network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device = device
        x_BCHW = torch.randn(1, BANDS, side, side, device=device)
        self._x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        self._target_BHW = torch.randint(0, CLASSES, (1, side, side), device=device)

        self._kept = 0

    def step(self) -> None:
        with autocast("bf16", self.device):
            logits_BKHW = self.network(self._x_BCHW)
        self._kept = self._allocated()
        PixelTerm(IGNORED).sums((logits_BKHW.float(),), self._target_BHW)[0].backward()

    def measure(self, repeats: int) -> dict[str, Any]:
        """Milliseconds of a step, and over what lies there between two its peak, and what it keeps when the forward
        pass has ended."""
        self.step()
        forget_peak(self.device)
        between = self._allocated()
        seconds, peak = median_seconds(self.step, self.device, repeats), peak_bytes(self.device)
        if peak is None:
            return {"ms": 1e3 * seconds, "bytes": None, "kept": None}
        return {"ms": 1e3 * seconds, "bytes": peak - between, "kept": self._kept - between}

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


Limited = Callable[[Loop, int, int, Whole], dict[str, Any]]


def main() -> int:
    part = begin_part(__file__)
    make_deterministic(False)
    small = part.small or part.device.type == "cpu"
    levels, channels, side, repeats = (3, 4, 64, 1) if small else (5, 64, 1440, 5)
    store = None
    if part.device.type != "cpu":
        way = store_rates(HostMover(part.device, 2 * TENSOR), 2 * TENSOR)
        store = Store(*way, find_machine("h100").computing("bf16"))
    part.measure("the way to the host", "bytes a second", partial(rates, store))
    bare, normed = (UNet(levels, base_channels=channels, bands=BANDS, classes=CLASSES, norm=n) for n in NORMS)
    choices_of = partial(step_choices, bands=BANDS, context=(side, side), value_bytes=ACTIVATION_BYTES["bf16"])
    first, second = (choices_of(unet.graph(), store=store) for unet in (bare, normed))
    plain = partial(PlainUNet, levels, channels, BANDS, CLASSES)
    networks: dict[str, tuple[Limited, Callable[[], nn.Module]]] = {
        "kept": (partial(by_kept, first, plain_bytes(bare, side, "bf16")), partial(build_modules, bare, seed=0)),
        "kept, batch norm": (
            partial(by_kept, second, plain_bytes(normed, side, "bf16")),
            partial(build_modules, normed, seed=0),
        ),
        "the plan": (partial(by_plan, second), partial(build_modules, normed, seed=0)),
        "large_model_support": (partial(by_support, second), plain),
        "copies alone": (partial(by_copies, second), plain),
    }
    for name, (limited, network) in networks.items():
        loop = Loop(network(), side, part.device)
        whole = part.measure(f"{name}: everything kept", "ms", partial(loop.measure, repeats), needs=3)
        for words, part_of in SHARES.items():
            one = partial(limited, loop, part_of, repeats, whole)
            part.measure(f"{name}: activations in {words}", "times as long", one, needs=5)
    return int(part.failed)


def rates(store: Store | None) -> dict[str, float]:
    """Both ways, and what the plan takes the GPU to reach."""
    if store is None:
        raise SkippedError("a CPU's tensors lie in the host's memory as it is")
    machine = store.machine
    figures = {"flops": machine.flops, "bandwidth": machine.memory_bandwidth}
    return {"written": store.written, "read": store.read, **figures}


def by_kept(choices: StepChoices, plain: int, loop: Loop, part_of: int, repeats: int, whole: Whole) -> dict[str, Any]:
    """By the cheapest policy that keeps so much of `plain` bytes, whatever its peak."""
    found = keeping(choices, plain // part_of)
    if found is None:
        raise SkippedError(f"no policy keeps as little as {plain / part_of / 1e9:.3g} GB")
    planned = choices.walk.kept(choices.walk.needed_words(found.policy))
    return _followed(found, loop, repeats, whole) | {"planned_kept": planned, "plain": plain}


def by_plan(choices: StepChoices, loop: Loop, part_of: int, repeats: int, whole: Whole) -> dict[str, Any]:
    """By the policy that is cheapest for a step in so much memory."""
    budget = choices.fixed + (choices.kept - choices.fixed) // part_of
    found = choices.choose(budget)
    if found is None:
        raise SkippedError(f"no policy fits {budget / 1e9:.3g} GB: {choices.least / 1e9:.3g} GB is the least")
    return _followed(found, loop, repeats, whole)


def _followed(found: MemoryChoice, loop: Loop, repeats: int, whole: Whole) -> dict[str, Any]:
    """Results are the same to the last bit."""
    network = loop.network
    assert isinstance(network, GraphNetwork), "it follows policies"
    kept, away = network.memory, offload_by(found)
    moving = (
        None if away is None else Offload(mover_to("host", loop.device, MOST_ON_HOST), away.staying, 1, all_kept=False)
    )
    network.follow(found.policy, hooks_of(moving))
    try:
        with moving or nullcontext():
            return _beside(loop.measure(repeats), whole) | {"planned_extra": found.extra, "away": len(found.away)}
    finally:
        network.follow(kept)


def by_support(choices: StepChoices, loop: Loop, part_of: int, repeats: int, whole: Whole) -> dict[str, Any]:
    """Parts of the module are computed once more, as far as the budget demands."""
    with large_model_support(loop.network, budget=(choices.kept - choices.fixed) // part_of):
        return _beside(loop.measure(repeats), whole)


def by_copies(choices: StepChoices, loop: Loop, part_of: int, repeats: int, whole: Whole) -> dict[str, Any]:
    """Tensors leave for the host's memory, whatever the network."""
    if loop.device.type == "cpu":
        raise SkippedError("a CPU's tensors lie in the host's memory as it is")
    with large_model_support(budget=(choices.kept - choices.fixed) // part_of) as support:
        found = loop.measure(repeats)
        return _beside(found, whole) | {"bytes_out": support.figures.bytes_out}


def _beside(found: dict[str, Any], whole: Whole) -> dict[str, Any]:
    if whole is None:
        return found
    share = None if found["bytes"] is None else found["bytes"] / whole["bytes"]
    return {"ratio": found["ms"] / whole["ms"], "share_of_bytes": share, **found}


if __name__ == "__main__":
    sys.exit(main())
