"""What everybody computes: one U-Net, M micro-batches, their loss and all gradients, from seeds alone.

The network is this project's padded U-Net without norm and dropout; a micro-batch is one image. The loss is the sum of
cross-entropies over the valid pixels of all micro-batches, divided by the number of those pixels, so a pipeline that
averages over micro-batches, or forgets that some pixels are ignored, gives other gradients.

Weights are drawn in float32 and pixels in float64, and both are rounded, so runs of both precisions compute the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from benchmarks.precision import DTYPES, normal
from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.pipeline.balance import Prices, choose_balances, cuts, parse_balance
from tiledseg.planning.stages.cost import StagePrices
from tiledseg.planning.step.cost import layer_costs

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
IGNORED = 255
_IGNORED_SHARE = 0.1
_CHANGES_NOTHING = (nn.Identity, ChannelDropout)  # here: no dropout, no norm


@dataclass(frozen=True)
class Workload:
    """`micro_batches` images of `size` x `size` pixels and the network that takes them, cut by `balance`."""

    size: int = 192
    micro_batches: int = 16
    balance: tuple[int, ...] = ()
    levels: int = 5
    base_channels: int = 32
    bands: int = 4
    classes: int = 2
    dtype: str = "float32"
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        unit = 1 << (self.levels - 1)
        if self.size < unit or self.size % unit:
            raise ConfigError(f"size is {self.size}; {self.levels} levels need a multiple of {unit}")
        if self.micro_batches < 1:
            raise ConfigError(f"micro-batches is {self.micro_batches}; give at least 1")
        parse_balance(self.balance, len(self.unet.graph()))

    @property
    def unet(self) -> UNet:
        return unet_of(self.levels, self.base_channels, self.bands, self.classes)

    @property
    def stages(self) -> int:
        return len(self.balance)

    @property
    def first_layers(self) -> list[int]:
        """The index of each stage's first layer in the flat sequence."""
        return [first for first, _ in cuts(self.balance)]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def memory_format(self) -> torch.memory_format:
        return LAYOUTS[self.layout]


@dataclass(frozen=True)
class Gradients:
    """The loss, and the gradients of the weights by name."""

    loss: float
    by_name: dict[str, torch.Tensor]


def unet_of(levels: int, base_channels: int, bands: int, classes: int) -> UNet:
    return UNet(levels, base_channels=base_channels, bands=bands, classes=classes)


def modelled_balance(unet: UNet, size: int, stages: int) -> tuple[int, ...]:
    """The balance whose largest stage has the fewest multiply-adds; among those, the one that sends the least."""
    layers = unet.graph()
    costs = layer_costs(layers, unet.bands, (size, size), 4)
    prices = StagePrices(layers, costs, 4)
    return choose_balances(Prices([cost.multiply_adds for cost in costs], traffic=prices.received), stages)[0]


def make_network(workload: Workload) -> GraphNetwork:
    """The undivided network with its weights; biases are drawn too, for a zero bias hides a wrong one."""
    network = build_modules(workload.unet, seed=0)
    with torch.no_grad():
        for seed, (name, tensor) in enumerate(network.named_parameters(), start=10):
            if name.endswith("bias"):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    network.to(workload.torch_dtype, memory_format=workload.memory_format)  # type: ignore[call-overload]  # torch's stub lacks it
    return network


def make_input(workload: Workload, micro_batch: int) -> torch.Tensor:
    """x_BCHW of shape (1, bands, size, size), normally distributed."""
    shape = (1, workload.bands, workload.size, workload.size)
    x_BCHW = normal(shape, 1000 + micro_batch, workload.torch_dtype)
    return x_BCHW.contiguous(memory_format=workload.memory_format)


def make_target(workload: Workload, micro_batch: int) -> torch.Tensor:
    """Classes of shape (1, size, size); a different share of each micro-batch is `IGNORED`."""
    generator = torch.Generator().manual_seed(2000 + micro_batch)
    shape = (1, workload.size, workload.size)
    target_BHW = torch.randint(workload.classes, shape, generator=generator)
    share = _IGNORED_SHARE * (1 + micro_batch % 5)
    return target_BHW.masked_fill(torch.rand(shape, generator=generator) < share, IGNORED)


def count_valid(workload: Workload) -> int:
    """Valid pixels of all micro-batches."""
    return sum(int((make_target(workload, m) != IGNORED).sum()) for m in range(workload.micro_batches))


def loss_of(logits_BKHW: torch.Tensor, target_BHW: torch.Tensor, valid: int) -> torch.Tensor:
    """A micro-batch's share of the whole loss, whose pixels are `valid` in number: shares add up."""
    return functional.cross_entropy(logits_BKHW, target_BHW, ignore_index=IGNORED, reduction="sum") / valid


def serial_step(network: nn.Module, workload: Workload, inputs: Sequence[torch.Tensor]) -> float:
    """Forward and backward of one micro-batch after the other in this process; gradients add up in the weights."""
    valid, total = count_valid(workload), 0.0
    for micro_batch, x_BCHW in enumerate(inputs):
        loss = loss_of(network(x_BCHW), make_target(workload, micro_batch), valid)
        loss.backward()
        total += loss.item()
    return total


def reference(workload: Workload, dtype: str = "float64") -> Gradients:
    """What one process computes without any pipeline: what every pipeline is held against."""
    exact = replace(workload, dtype=dtype)
    network = make_network(exact)
    loss = serial_step(network, exact, [make_input(exact, m) for m in range(exact.micro_batches)])
    return Gradients(loss, gradients_of(network))


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients by name; a weight without gradient is left out, so a comparison misses it."""
    return {name: tensor.grad.clone() for name, tensor in module.named_parameters() if tensor.grad is not None}


def keep_stage_inputs(network: GraphNetwork, first_layers: Sequence[int]) -> None:
    """Lets the activations that a stage meets first write elsewhere: a received tensor is a leaf of autograd, which
    must not be written into."""
    layers = list(network.layers.values())
    for first in first_layers[1:]:
        for layer in layers[first:]:
            if isinstance(layer, nn.LeakyReLU):
                layer.inplace = False
            if not isinstance(layer, _CHANGES_NOTHING):
                break


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a workload, the same for every program."""
    parser.add_argument("--size", type=int, default=Workload.size, help="pixels a side of a micro-batch's image")
    parser.add_argument("--micro-batches", type=int, default=Workload.micro_batches)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--balance", type=int, nargs="+", help="layers of each stage; without it, by multiply-adds")
    parser.add_argument("--levels", type=int, default=Workload.levels)
    parser.add_argument("--base-channels", type=int, default=Workload.base_channels)
    parser.add_argument("--bands", type=int, default=Workload.bands)
    parser.add_argument("--classes", type=int, default=Workload.classes)
    parser.add_argument("--dtype", choices=DTYPES, default=Workload.dtype)
    parser.add_argument("--layout", choices=LAYOUTS, default=Workload.layout)


def workload_of(given: argparse.Namespace) -> Workload:
    """The workload of parsed flags. Raises ConfigError where they do not fit together."""
    unet = unet_of(given.levels, given.base_channels, given.bands, given.classes)
    balance = tuple(given.balance or modelled_balance(unet, given.size, given.stages))
    return Workload(
        given.size,
        given.micro_batches,
        balance,
        given.levels,
        given.base_channels,
        given.bands,
        given.classes,
        given.dtype,
        given.layout,
    )
