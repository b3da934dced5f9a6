"""What the peers and our own spatial layers compute: the same input, the same weights, the same loss, from seeds alone.

conv: one Conv2d(C, C, 3, padding=1) with bias on (1, C, H, W). unet: this project's padded U-Net without norm on
(1, 4, H, W). The loss is the sum of the output times fixed weights, so blocks of it add up to the undivided loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.precision import normal
from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.models.network import build_modules

BANDS, CLASSES = 4, 2
WORKLOADS = ("conv", "unet")


@dataclass(frozen=True)
class Workload:
    """One image of `size` = (height, width) pixels and the network that takes it; `dtype` is a torch dtype."""

    name: str
    size: tuple[int, int]
    channels: int = 8
    levels: int = 3
    base_channels: int = 8
    upsampling: str = "transposed"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.name not in WORKLOADS:
            raise ConfigError(f"workload is '{self.name}'; give one of {', '.join(WORKLOADS)}")

    @property
    def alignment(self) -> int:
        """Blocks start at multiples of this many pixels, so that pooling windows never cross a block's edge."""
        return 1 << (self.levels - 1) if self.name == "unet" else 1


@dataclass(frozen=True)
class Gradients:
    """Output, gradient of the input and gradients of the weights by name."""

    y_BCHW: torch.Tensor
    dx_BCHW: torch.Tensor
    dw: dict[str, torch.Tensor]


def make_input(workload: Workload) -> torch.Tensor:
    """x_BCHW of shape (1, C or 4, H, W), normally distributed; needs no gradient yet."""
    bands = workload.channels if workload.name == "conv" else BANDS
    return normal((1, bands, *workload.size), seed=1, dtype=workload.dtype)


def make_network(workload: Workload) -> nn.Module:
    """The undivided network with its weights; biases are drawn too, for a zero bias hides a wrong one."""
    if workload.name == "conv":
        network: nn.Module = nn.Sequential(nn.Conv2d(workload.channels, workload.channels, 3, padding=1))
        _draw(network, lambda tensor, seed: normal(tensor.shape, seed, tensor.dtype) / (3 * workload.channels**0.5))
    else:
        unet = UNet(workload.levels, base_channels=workload.base_channels, upsampling=workload.upsampling, bands=BANDS)
        network = build_modules(unet, seed=0)
        biases = nn.ParameterList(tensor for name, tensor in network.named_parameters() if name.endswith("bias"))
        _draw(biases, lambda tensor, seed: 0.1 * normal(tensor.shape, seed, tensor.dtype))
    return network.to(workload.dtype)


def make_loss_weights(workload: Workload) -> torch.Tensor:
    """The fixed weights of the loss, of the output's shape: (1, C or 2, H, W)."""
    channels = workload.channels if workload.name == "conv" else CLASSES
    return normal((1, channels, *workload.size), seed=2, dtype=workload.dtype)


def loss_of(y_BCHW: torch.Tensor, weights_BCHW: torch.Tensor) -> torch.Tensor:
    """sum(y * weights), a scalar; over a block, that block's share of the whole loss."""
    return (y_BCHW * weights_BCHW).sum()


def undivided_gradients(workload: Workload) -> Gradients:
    """What torch computes on the whole image: what every divided run is held against."""
    network, x_BCHW = make_network(workload), make_input(workload).requires_grad_()
    y_BCHW = network(x_BCHW)
    loss_of(y_BCHW, make_loss_weights(workload)).backward()
    assert x_BCHW.grad is not None
    dw = {name: tensor.grad for name, tensor in network.named_parameters() if tensor.grad is not None}
    return Gradients(y_BCHW.detach(), x_BCHW.grad, dw)


def block_edges(length: int, parts: int, alignment: int = 1) -> list[int]:
    """parts + 1 edges of balanced blocks of `length` pixels; the first blocks take what is left over.

    Raises ConfigError where there are fewer whole aligned units than parts, or a remainder below one unit.
    """
    units, remainder = divmod(length, alignment)
    if remainder or units < parts:
        raise ConfigError(f"{length} pixels do not make {parts} blocks of multiples of {alignment}; give another size")
    return [alignment * (part * (units // parts) + min(part, units % parts)) for part in range(parts + 1)]


def block_of(x_BCHW: torch.Tensor, mesh: tuple[int, int], rank: int, alignment: int = 1) -> torch.Tensor:
    """A copy of the block that `rank` owns; ranks count along the rows of the mesh, (rows, cols)."""
    rows, cols = (block_edges(n, parts, alignment) for n, parts in zip(x_BCHW.shape[2:], mesh, strict=True))
    row, col = divmod(rank, mesh[1])
    return x_BCHW[:, :, rows[row] : rows[row + 1], cols[col] : cols[col + 1]].clone()


def assemble(blocks: list[torch.Tensor], mesh: tuple[int, int]) -> torch.Tensor:
    """The whole image from the blocks of all ranks, in rank order: the inverse of `block_of`."""
    strips = [torch.cat(blocks[row * mesh[1] : (row + 1) * mesh[1]], dim=3) for row in range(mesh[0])]
    return torch.cat(strips, dim=2)


def _draw(module: nn.Module, value_of: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    with torch.no_grad():
        for seed, tensor in enumerate(module.parameters(), start=10):
            tensor.copy_(value_of(tensor, seed))
