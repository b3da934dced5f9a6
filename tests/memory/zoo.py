"""The autograd zoo: small steps that use autograd in every way known to trip those who move saved tensors.

A case is a function of the step's number that gives everything the step has computed: outputs and gradients. It builds
its own tensors from a seed, so that two calls with one number give the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Tensors = list[torch.Tensor]
Case = Callable[[int], Tensors]


def drawn(*shape: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def leaf(*shape: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return drawn(*shape, step=step, dtype=dtype).requires_grad_()


def module(made: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return made().to(dtype)


def trained(network: nn.Module, x: torch.Tensor) -> Tensors:
    """Forward, a loss that weighs each value, backward: the output, all gradients, all buffers."""
    out = network(x)
    out = out[0] if isinstance(out, tuple) else out
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    grads = [p.grad for p in network.parameters() if p.grad is not None]
    return [out.detach(), *([x.grad] if x.grad is not None else []), *grads, *network.buffers()]


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> Tensors:
    """Backward of a loss, after one more operation: what nobody names any more has then left."""
    (loss * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


# Networks: how each is made, the shape of its input.


def _convolutions(inplace: bool = False) -> nn.Module:
    layers: list[nn.Module] = []
    for k in range(3):
        layers += [nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=inplace)]
    return nn.Sequential(*layers)


class Skipping(nn.Module):
    """Two levels, the skip held by a name until the end."""

    def __init__(self, unpool: bool = False) -> None:
        super().__init__()
        self.unpool = unpool
        self.fine = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(8 if unpool else 16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.fine(x)
        deep, indices = functional.max_pool2d(skip, 2, return_indices=True)
        deep = self.deep(deep)
        if self.unpool:
            return self.head(functional.max_unpool2d(deep[:, :8], indices, 2))
        return self.head(torch.cat((skip, self.up(deep)), 1))


def _norms() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.InstanceNorm2d(8), nn.SiLU())
    return nn.Sequential(*layers, nn.LayerNorm([10, 10]))


def _computed_weights() -> nn.Module:
    layers = nn.Linear(16, 32), nn.Linear(32, 16)
    return nn.Sequential(parametrizations.weight_norm(layers[0]), parametrizations.spectral_norm(layers[1]))


def _shared() -> nn.Module:
    shared = nn.Linear(16, 16)
    return nn.Sequential(shared, nn.ReLU(), shared, nn.Sigmoid(), shared)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "activations in place": (partial(_convolutions, True), (2, 3, 16, 16)),
    "a skip that is concatenated": (Skipping, (2, 3, 16, 16)),
    "indices of a pooling": (partial(Skipping, True), (2, 3, 16, 16)),
    "norms of all kinds": (_norms, (2, 3, 12, 12)),
    "weights that are computed": (_computed_weights, (8, 16)),
    "a weight that is used twice": (_shared, (8, 16)),
}


def _network(made: Callable[[], nn.Module], shape: tuple[int, ...], step: int) -> Tensors:
    return trained(module(made), leaf(*shape, step=step))


# Losses of one tensor: kinds of tensors, views, operations in place.


class Cubed(torch.autograd.Function):
    """Keeps its input and its output, and looks at both twice."""

    @staticmethod
    def forward(ctx, x, power):  # type: ignore[no-untyped-def]
        y = x**power
        ctx.save_for_backward(x, y)
        ctx.power = power
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return grad * ctx.power * y / x + 0 * again, None


def _conjugate_and_negative(x: torch.Tensor) -> torch.Tensor:
    conjugate, negative = (x * 2).conj(), torch.imag((x * 3).conj())
    assert conjugate.is_conj()
    assert negative.is_neg()
    return (conjugate @ x).abs().sum() + (negative * negative.exp()).sum()


def _strides_of_zero(x: torch.Tensor) -> torch.Tensor:
    wide = (x[:1] * 2).expand(64, 16)
    return (wide * wide.sin()).sum()


def _not_contiguous(x: torch.Tensor) -> torch.Tensor:
    part = (x * 2)[::3, 1::2]
    return (part * part.exp()).sum() + ((x * 3).t().flip(0)[::4, ::3] ** 2).sum()


def _views_of_one_storage(x: torch.Tensor) -> torch.Tensor:
    base = x.exp()
    views = (base.t().contiguous(), base[2:6], base.expand(3, 16, 16), base.view(8, 32), base.t())
    return torch.stack([(view * view).sum() for view in views]).sum()


def _writes_into_a_part(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[2:5] = x[1:4].exp()
    y[:, 3].mul_(2)
    return (y * y.sin()).sum()


def _past_autograd(x: torch.Tensor) -> torch.Tensor:
    """Who writes to `.data` gets what autograd makes of it: the changed values."""
    y = x * 2
    z = y * y
    y.data.mul_(3)
    return z.sin().sum()


def _through_a_handle(x: torch.Tensor) -> torch.Tensor:
    """So does who writes through the storage alone."""
    y = x * 2
    z, handle = y * y, y.untyped_storage()
    del y
    w = z.sin().exp()
    handle.fill_(0)
    return w.sum()


DOUBLE, COMPLEX = torch.float64, torch.complex64
LOSSES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {
    "conjugate and negative views": (_conjugate_and_negative, COMPLEX),
    "strides of zero": (_strides_of_zero, torch.float32),
    "tensors that are not contiguous": (_not_contiguous, torch.float32),
    "views of one storage": (_views_of_one_storage, torch.float32),
    "a function of one's own": (lambda x: Cubed.apply(x.exp() * 2, 3).sin().sum(), DOUBLE),
    "writes into a part": (_writes_into_a_part, torch.float32),
    "changed past autograd": (_past_autograd, torch.float32),
    "changed through a handle": (_through_a_handle, torch.float32),
}


def _loss(loss: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, step: int) -> Tensors:
    x = leaf(16, 16, step=step, dtype=dtype)
    return gradients(loss(x), x)


# Others, each with a way of its own.

OTHERS: list[Case] = []


@OTHERS.append
def channels_last_strides(step: int) -> Tensors:
    network = module(_convolutions).to(memory_format=torch.channels_last)
    x = drawn(2, 3, 16, 16, step=step).to(memory_format=torch.channels_last).requires_grad_()
    result = trained(network, x)
    assert result[0].is_contiguous(memory_format=torch.channels_last)
    return result


@OTHERS.append
def sparse_matrices_are_left_alone(step: int) -> Tensors:
    matrix, x = torch.eye(16).to_sparse().requires_grad_(), leaf(16, 16, step=step)
    return [t.to_dense() for t in gradients(torch.sparse.mm(matrix, x.exp()).square().sum(), matrix, x)]


@OTHERS.append
def memory_of_numpy(step: int) -> Tensors:
    x = torch.from_numpy(drawn(16, 16, step=step).numpy()).requires_grad_()
    return gradients((x * x.sin()).sum(), x)


@OTHERS.append
def passes_over_one_graph_from_several_ends(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    middle = x.exp().sin()
    ends = [(middle * k).exp().sum() for k in (1.0, 0.5, 0.25)]
    order = [ends[(step + k) % 3] for k in range(3)]  # another one at each step
    grads = [torch.autograd.grad(end, x, retain_graph=True)[0] for end in order]
    return [*grads, *torch.autograd.grad(ends[0], middle, retain_graph=True), torch.autograd.grad(sum(ends), x)[0]]


@OTHERS.append
def double_backward(step: int) -> Tensors:
    network = module(lambda: nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 1)))
    x = leaf(8, 16, step=step)
    (grad,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
    ((grad.norm(dim=1) - 1) ** 2).sum().backward()
    return [grad.detach(), x.grad, *(p.grad for p in network.parameters() if p.grad is not None)]


@OTHERS.append
def a_backward_pass_in_another_thread(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    loss = (x.exp() * x.sin()).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [loss.detach(), x.grad]


@OTHERS.append
def recomputed_segments_in_both_ways(step: int) -> Tensors:
    found: Tensors = []
    for reentrant in (False, True):
        network, x = module(_convolutions), leaf(1, 3, 12, 12, step=step)
        out = checkpoint(network[:3], x, use_reentrant=reentrant)
        loss = checkpoint(network[3:], out.sin(), use_reentrant=reentrant).square().sum()
        found += gradients(loss, x, *network.parameters())
    return found


@OTHERS.append
def autocast_to_16_bits(step: int) -> Tensors:
    with torch.autocast("cpu", torch.bfloat16):
        return [*_network(_convolutions, (1, 3, 12, 12), step), *_network(_shared, (8, 16), step)]


@OTHERS.append
def the_allocator_gives_addresses_again(step: int) -> Tensors:
    """Tensors of one size come and go: each next one lies where one before it lay."""
    x = leaf(64, 64, step=step)
    total, grads = torch.zeros(()), list[torch.Tensor]()
    for k in range(12):
        y = (x * (k + 1)).sin()
        part = (y * y.exp()).sum()
        if k % 3 == 0:
            grads += torch.autograd.grad(part, x)
        else:
            total = total + part
    return [*grads, *gradients(total, x)]


ZOO: dict[str, Case] = {
    **{name: partial(_network, *case) for name, case in NETWORKS.items()},
    **{name: partial(_loss, *case) for name, case in LOSSES.items()},
    **{case.__name__: case for case in OTHERS},
}
