"""Planned peaks of training steps in which some is computed once more, beside what PyTorch allocates.

    python -m benchmarks.planned_memory.peaks

U-Nets of 2 to 4 levels, all norms, all upsamplings, at budgets between what is there whatever is chosen and all that is
kept. Bytes are those that PyTorch's allocator reports to its profiler: each one that a kernel takes for itself is among
them. A line for each setting that is off by more than 2 %; then how many are not, the median and the worst.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.autograd.profiler import profile
from torch.nn.functional import cross_entropy

from tiledseg.architecture.network import Network
from tiledseg.architecture.unet import UNet
from tiledseg.config.words import NORMS, UPSAMPLINGS
from tiledseg.geometry.graph import MemoryPolicy
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.memory.saved import Hooks
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.planning.walk.choice import StepChoices
from tiledseg.planning.walk.cost import tile_walk
from tiledseg.planning.walk.items import Walk
from tiledseg.planning.walk.step_memory import network_walk

CONTEXT = 64, 96
LARGE = 256, 256
"""Of the sweep. On much smaller ones PyTorch computes convolutions by other kernels, which unfold their input."""
SHARES = 0.2, 0.35, 0.5, 0.7, 0.9
OFF = 0.02


@dataclass(frozen=True)
class Setting:
    """A network, the share of the way that its budget is, and bytes."""

    network: Network
    share: float
    planned: int
    allocated: int

    @property
    def error(self) -> float:
        return self.planned / self.allocated - 1


def walk_of(network: Network, width: int = 4, context: tuple[int, int] = CONTEXT) -> Walk:
    return network_walk(tile_walk(network.graph(), network.bands, context, width))


def allocated_peak(network: Network, policy: MemoryPolicy) -> int:
    """Most bytes of one forward and backward pass, without weights and their gradients; channels last, as commands
    train."""
    module = in_channels_last(module_by(network, policy))
    x_BCHW = torch.randn(1, network.bands, *CONTEXT).contiguous(memory_format=torch.channels_last)
    with AllocationMeter(weights_of(module)) as meter:
        step(module, x_BCHW.clone())
    return meter.peak


def peak_by_allocator(network: Network, policy: MemoryPolicy) -> int:
    """The same by PyTorch's allocator, with channels last, as commands train."""
    module = in_channels_last(module_by(network, policy))
    x_BCHW = torch.randn(1, network.bands, *LARGE).contiguous(memory_format=torch.channels_last)
    step(module, x_BCHW)  # what kernels make once
    return allocator_peak(lambda: step(module, x_BCHW.clone()))


def allocator_peak(run: Callable[[], object]) -> int:
    """Most bytes that PyTorch's allocator has given at once while something runs, above those before."""
    with profile(profile_memory=True, use_kineto=True) as seen:
        run()
    events = [event for event in seen.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def module_by(network: Network, policy: MemoryPolicy, offload: Hooks | None = None) -> GraphNetwork:
    """In training, by a policy, with what holds the tensors that leave; gradients are there, as from the second step
    on."""
    module = build_modules(network, seed=0).train().follow(policy, offload)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return module


def in_channels_last(module: GraphNetwork) -> GraphNetwork:
    """As commands train."""
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def weights_of(module: GraphNetwork) -> list[torch.Tensor]:
    """And their gradients."""
    return [t for p in module.parameters() for t in (p, p.grad) if t is not None]


def step(module: Callable[..., torch.Tensor], *inputs: object) -> None:
    """One forward and backward pass."""
    logits_BKHW = module(*inputs)
    labels_BHW = torch.zeros(1, *logits_BKHW.shape[2:], dtype=torch.long)
    loss = cross_entropy(logits_BKHW, labels_BHW, reduction="sum")
    del logits_BKHW, labels_BHW
    loss.backward()


def budget_at(walk: Walk, share: float) -> int:
    """Bytes, at a share of the way from what is there whatever is chosen to all that is kept."""
    low, high = max(walk.base), StepChoices(walk).kept
    return int(low + share * (high - low))


def settings(network: Network, shares: Sequence[float]) -> Iterator[Setting]:
    """Yield the cases whose budget anything fits."""
    found = walk_of(network, context=LARGE)
    for share in shares:
        chosen = StepChoices(found).choose(budget_at(found, share))
        if chosen is not None:
            yield Setting(network, share, chosen.peak, peak_by_allocator(network, chosen.policy))


def networks(levels: Sequence[int], norms: Sequence[str]) -> Iterator[UNet]:
    for count in levels:
        for norm in norms:
            for upsampling in UPSAMPLINGS:
                yield UNet(count, base_channels=8, norm=norm, upsampling=upsampling)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=NORMS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [each for network in networks(options.levels, options.norms) for each in settings(network, SHARES)]
    for each in found:
        if abs(each.error) > OFF:
            print(f"{each.network}, share {each.share}: {each.planned} planned, {each.allocated} allocated")
    within = sum(abs(each.error) <= OFF for each in found)
    median = statistics.median(abs(each.error) for each in found)
    worst = max(found, key=lambda each: abs(each.error))
    print(f"{within} of {len(found)} within 2 %, half within {median:.3%}, the worst {worst.error:+.2%} planned")


if __name__ == "__main__":
    main()
