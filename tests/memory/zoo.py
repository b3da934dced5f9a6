"""The autograd zoo: small steps that use autograd in every way known to trip those who move saved tensors.

A case is a function of the step's number that gives everything the step has computed: outputs and gradients. It builds
its own tensors from a seed, so that two calls with one number give the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tensors = list[torch.Tensor]
Case = Callable[[int], Tensors]
ZOO: dict[str, Case] = {}


def case(function: Case) -> Case:
    ZOO[function.__name__] = function
    return function


def drawn(*shape: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def leaf(*shape: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return drawn(*shape, step=step, dtype=dtype).requires_grad_()


def module(made: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return made().to(dtype)


def trained(network: nn.Module, x: torch.Tensor, weights: torch.Tensor | None = None) -> Tensors:
    """Forward, a loss that weighs each value, backward: the output, all gradients, all buffers."""
    out = network(x)
    out = out[0] if isinstance(out, tuple) else out
    weigh = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) if weights is None else weights
    (out * weigh).sum().backward()
    grads = [p.grad for p in network.parameters() if p.grad is not None]
    return [out.detach(), *([x.grad] if x.grad is not None else []), *grads, *network.buffers()]


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> Tensors:
    """Backward of a loss, after one more operation: what nobody names any more has then left."""
    (loss * loss).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


# Networks.


@case
def linear_layers(step: int) -> Tensors:
    return trained(
        module(lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))),
        leaf(16, 32, step=step),
    )


def _convolutions(inplace: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for k in range(3):
        layers += [nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=inplace)]
    return nn.Sequential(*layers)


@case
def batch_norms_and_their_buffers(step: int) -> Tensors:
    return trained(module(lambda: _convolutions(False)), leaf(2, 3, 16, 16, step=step))


@case
def activations_in_place(step: int) -> Tensors:
    return trained(module(lambda: _convolutions(True)), leaf(2, 3, 16, 16, step=step))


class Skipping(nn.Module):
    """Two levels, the skip held by a name until the end."""

    def __init__(self, kind: str = "cat") -> None:
        super().__init__()
        self.kind = kind
        self.fine = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(16 if kind == "cat" else 8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.fine(x)
        deep, indices = functional.max_pool2d(skip, 2, return_indices=True)
        deep = self.deep(deep)
        if self.kind == "unpool":
            return self.head(functional.max_unpool2d(deep[:, :8], indices, 2))
        up = self.up(deep)
        return self.head(torch.cat((skip, up), 1) if self.kind == "cat" else skip + up)


@case
def a_skip_that_is_concatenated(step: int) -> Tensors:
    return trained(module(Skipping), leaf(2, 3, 16, 16, step=step))


@case
def a_skip_that_is_added(step: int) -> Tensors:
    return trained(module(lambda: Skipping("add")), leaf(2, 3, 16, 16, step=step))


@case
def indices_of_a_pooling(step: int) -> Tensors:
    return trained(module(lambda: Skipping("unpool")), leaf(2, 3, 16, 16, step=step))


@case
def densely_connected(step: int) -> Tensors:
    x = leaf(1, 4, 12, 12, step=step)
    convs = [module(lambda k=k: nn.Conv2d(4 * (k + 1), 4, 3, padding=1)) for k in range(3)]
    features = [x]
    for conv in convs:
        features.append(torch.relu(conv(torch.cat(features, 1))))
    return gradients(torch.cat(features, 1).square().sum(), x, *(p for conv in convs for p in conv.parameters()))


@case
def norms_of_all_kinds(step: int) -> Tensors:
    return trained(
        module(
            lambda: nn.Sequential(
                nn.Conv2d(3, 8, 3),
                nn.GroupNorm(2, 8),
                nn.GELU(),
                nn.InstanceNorm2d(8),
                nn.SiLU(),
                nn.LayerNorm([10, 10]),
            )
        ),
        leaf(2, 3, 12, 12, step=step),
    )


@case
def dropout_draws_the_same_numbers(step: int) -> Tensors:
    torch.manual_seed(step)
    result = trained(
        module(lambda: nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.2))),
        leaf(16, 32, step=step),
    )
    return [*result, torch.rand(4)]


@case
def attention(step: int) -> Tensors:
    attend = module(lambda: nn.MultiheadAttention(16, 4, batch_first=True))
    x = leaf(2, 10, 16, step=step)
    return gradients(attend(x, x, x)[0].square().sum(), x, *attend.parameters())


@case
def scaled_dot_product(step: int) -> Tensors:
    q, k, v = (leaf(2, 4, 12, 8, step=10 * step + part) for part in range(3))
    return gradients(functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum(), q, k, v)


@case
def a_recurrent_network(step: int) -> Tensors:
    return trained(module(lambda: nn.LSTM(8, 16, 2, batch_first=True)), leaf(3, 9, 8, step=step))


@case
def a_gated_recurrent_network(step: int) -> Tensors:
    return trained(module(lambda: nn.GRU(8, 16, bidirectional=True)), leaf(5, 3, 8, step=step))


@case
def convolutions_of_volumes(step: int) -> Tensors:
    return trained(
        module(lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.PReLU(4), nn.AvgPool3d(2), nn.ConvTranspose3d(4, 2, 2))),
        leaf(1, 2, 8, 8, 8, step=step),
    )


@case
def enlarging_and_shuffling(step: int) -> Tensors:
    return trained(
        module(
            lambda: nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1),
                nn.PixelShuffle(2),
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
                nn.ReflectionPad2d(1),
            )
        ),
        leaf(1, 3, 8, 8, step=step),
    )


@case
def frozen_layers(step: int) -> Tensors:
    network = module(lambda: _convolutions(False))
    for parameter in network[3].parameters():
        parameter.requires_grad_(False)
    return trained(network.eval(), drawn(1, 3, 16, 16, step=step))


@case
def weights_that_are_computed(step: int) -> Tensors:
    return trained(
        module(
            lambda: nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)),
                nn.utils.parametrizations.spectral_norm(nn.Linear(32, 16)),
            )
        ),
        leaf(8, 16, step=step),
    )


@case
def a_weight_that_is_used_twice(step: int) -> Tensors:
    shared = module(lambda: nn.Linear(16, 16))
    return trained(nn.Sequential(shared, nn.ReLU(), shared, nn.Sigmoid(), shared), leaf(8, 16, step=step))


@case
def embeddings(step: int) -> Tensors:
    table = module(lambda: nn.Embedding(50, 16))
    words = torch.randint(0, 50, (6, 7), generator=torch.Generator().manual_seed(step))
    return gradients((table(words) ** 3).sum(), *table.parameters())


@case
def embeddings_of_sparse_gradient(step: int) -> Tensors:
    table = module(lambda: nn.Embedding(50, 16, sparse=True))
    words = torch.randint(0, 50, (6, 7), generator=torch.Generator().manual_seed(step))
    return [t.to_dense() for t in gradients((table(words) ** 3).sum(), *table.parameters())]


# Kinds of tensors.


@case
def sparse_matrices_are_left_alone(step: int) -> Tensors:
    matrix = torch.eye(16).to_sparse().requires_grad_()
    x = leaf(16, 16, step=step)
    return [t.to_dense() for t in gradients(torch.sparse.mm(matrix, x.exp()).square().sum(), matrix, x)]


@case
def complex_numbers(step: int) -> Tensors:
    x = leaf(4, 32, step=step)
    return gradients((torch.fft.rfft(x) * torch.fft.rfft(x.sin())).abs().square().sum(), x)


@case
def conjugate_and_negative_views(step: int) -> Tensors:
    x = leaf(16, 16, step=step, dtype=torch.complex64)
    conjugate = (x * 2).conj()
    negative = torch.imag((x * 3).conj())
    assert conjugate.is_conj()
    assert negative.is_neg()
    return gradients((conjugate @ x).abs().sum() + (negative * negative.exp()).sum(), x)


@case
def float64(step: int) -> Tensors:
    return trained(
        module(lambda: _convolutions(True), torch.float64), leaf(1, 3, 12, 12, step=step, dtype=torch.float64)
    )


@case
def channels_last_strides(step: int) -> Tensors:
    network = module(lambda: _convolutions(False)).to(memory_format=torch.channels_last)
    x = drawn(2, 3, 16, 16, step=step).to(memory_format=torch.channels_last).requires_grad_()
    result = trained(network, x)
    assert result[0].is_contiguous(memory_format=torch.channels_last)
    return result


@case
def strides_of_zero(step: int) -> Tensors:
    row = leaf(1, 32, step=step)

    def loss() -> torch.Tensor:
        wide = (row * 2).expand(64, 32)
        return (wide * wide.sin()).sum()

    return gradients(loss(), row)


@case
def tensors_that_are_not_contiguous(step: int) -> Tensors:
    x = leaf(24, 32, step=step)

    def loss() -> torch.Tensor:
        part = (x * 2)[::3, 1::2]
        return (part * part.exp()).sum() + ((x * 3).t().flip(0)[::4, ::3] ** 2).sum()

    return gradients(loss(), x)


@case
def views_of_one_storage(step: int) -> Tensors:
    x = leaf(16, 32, step=step)

    def loss() -> torch.Tensor:
        base = x.exp()
        views = (base.t().contiguous(), base[2:6], base.expand(3, 16, 32), base.view(8, 64), base.t())
        return torch.stack([(view * view).sum() for view in views]).sum()

    return gradients(loss(), x)


@case
def the_last_keeper_is_a_view(step: int) -> Tensors:
    x = leaf(16, 32, step=step)

    def view() -> torch.Tensor:
        return (x * 2).t()[3:9]

    return gradients((view() * view()).sum(), x)


@case
def views_as_another_type(step: int) -> Tensors:
    x = leaf(8, 16, step=step)

    def loss() -> torch.Tensor:
        pairs = torch.view_as_complex((x * 2).view(8, 8, 2))
        return ((pairs * pairs).abs() + torch.view_as_real(pairs * 1j).sum(-1)).sum()

    return gradients(loss(), x)


@case
def masks_and_whole_numbers(step: int) -> Tensors:
    x = leaf(32, 32, step=step)
    kept = torch.where(x > 0, x * x, x.sin()).masked_fill(x.abs() < 0.1, 0.0)
    return gradients((kept.clamp(-1, 2) * kept.cumsum(1)).sum(), x)


@case
def gathers_and_sorts(step: int) -> Tensors:
    x = leaf(16, 24, step=step)
    ordered, at = (x * 2).sort(1)
    sums = torch.zeros(16, 24).scatter_add(1, at, ordered * ordered)
    return gradients((ordered.gather(1, at.flip(1)) * sums + x.topk(3, 1).values.prod()).sum(), x)


@case
def linear_algebra(step: int) -> Tensors:
    x = leaf(8, 8, step=step, dtype=torch.float64)
    matrix = x @ x.t() + 8 * torch.eye(8, dtype=torch.float64)
    return gradients(torch.linalg.solve(matrix, x).sum() + torch.logdet(matrix) + torch.linalg.svdvals(x).sum(), x)


@case
def empty_tensors_and_numbers(step: int) -> Tensors:
    x = leaf(0, 5, step=step)
    y = leaf(1, step=step)
    return gradients((x * x).sum() + (y * y.exp()).sum() + torch.tensor(2.0) * y.sum(), x, y)


@case
def memory_of_numpy(step: int) -> Tensors:
    array = drawn(16, 16, step=step).numpy()
    x = torch.from_numpy(array).requires_grad_()
    return gradients((x * x.sin()).sum(), x)


# Ways through a graph.


@case
def two_passes_over_one_graph(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    loss = (x.exp() * x.sin().exp()).square().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    return [first, x.grad]


@case
def three_passes_from_several_ends(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    middle = x.exp().sin()
    ends = [(middle * k).exp().sum() for k in (1.0, 0.5, 0.25)]
    grads = [torch.autograd.grad(end, x, retain_graph=True)[0] for end in (ends[2], ends[0], ends[1])]
    return [*grads, torch.autograd.grad(sum(ends), x)[0]]


@case
def double_backward(step: int) -> Tensors:
    network = module(lambda: nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 1)))
    x = leaf(8, 16, step=step)
    (grad,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
    ((grad.norm(dim=1) - 1) ** 2).sum().backward()
    return [grad.detach(), x.grad, *(p.grad for p in network.parameters() if p.grad is not None)]


@case
def triple_backward(step: int) -> Tensors:
    x = leaf(8, 16, step=step, dtype=torch.float64)
    value = (x.sin().exp() * x).sum()
    found = []
    for _ in range(3):
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        found.append(grad.detach())
        value = (grad * grad.cos()).sum()
    return found


@case
def a_branch_that_nobody_uses(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    shared = x.exp()
    unused = (shared.sin() * shared).cos()
    result = gradients((shared * shared).sum(), x)
    return [*result, unused.detach()]


@case
def only_a_part_of_the_graph(step: int) -> Tensors:
    x, w = leaf(16, 16, step=step), leaf(16, 16, step=step + 1)
    middle = (x @ w).tanh()
    out = (middle @ w).exp().sin().square().sum()
    (first,) = torch.autograd.grad(out, middle, retain_graph=True)
    return [first, *torch.autograd.grad(out, (x, w))]


@case
def gradients_that_add_up(step: int) -> Tensors:
    network = module(lambda: _convolutions(False))
    for part in range(3):
        network(drawn(1, 3, 12, 12, step=10 * step + part)).square().mean().backward()
    return [*(p.grad for p in network.parameters() if p.grad is not None), *network.buffers()]


@case
def two_networks_in_turn(step: int) -> Tensors:
    made, judged = module(lambda: nn.Linear(16, 16)), module(lambda: nn.Linear(16, 1))
    x = drawn(8, 16, step=step)
    judged(made(x).tanh().detach()).square().mean().backward()
    first = [p.grad.clone() for p in judged.parameters() if p.grad is not None]
    judged(made(x).tanh()).exp().mean().backward()
    return [*first, *(p.grad for net in (made, judged) for p in net.parameters() if p.grad is not None)]


@case
def another_depth_at_each_step(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    y = x
    for k in range(2 + step % 3):
        y = (y * (k + 1)).sin()
    return gradients(y.square().sum(), x)


@case
def another_order_at_each_step(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    ends = [(x * k).exp().sin().sum() for k in (1.0, 2.0, 3.0)]
    return [torch.autograd.grad(ends[(step + k) % 3], x)[0] for k in range(3)]


@case
def hooks_on_gradients(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    middle = x.exp()
    middle.register_hook(lambda grad: grad * 2)
    middle.retain_grad()
    return [*gradients((middle * middle.sin().exp()).sum(), x), middle.grad]


@case
def a_backward_pass_in_another_thread(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    loss = (x.exp() * x.sin()).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [loss.detach(), x.grad]


@case
def anomaly_detection(step: int) -> Tensors:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return linear_layers(step)


@case
def a_jacobian(step: int) -> Tensors:
    x = drawn(6, step=step)
    return [torch.autograd.functional.jacobian(lambda v: (v.exp() * v.sum()).sin(), x)]


@case
def part_of_it_without_gradients(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    with torch.no_grad():
        scale = x.exp().mean()
    return gradients(((x * scale).exp() * x.detach().sin()).sum(), x)


# Recomputation and autocast.


@case
def recomputed_segments(step: int) -> Tensors:
    network = module(lambda: _convolutions(False))
    x = leaf(1, 3, 12, 12, step=step)

    def loss() -> torch.Tensor:
        out = checkpoint(network[:3], x, use_reentrant=False)
        return checkpoint(network[3:], out.sin(), use_reentrant=False).square().sum()

    return gradients(loss(), x, *network.parameters())


@case
def recomputed_the_old_way(step: int) -> Tensors:
    network = module(lambda: _convolutions(False))
    x = leaf(1, 3, 12, 12, step=step)
    out = checkpoint(network[:3], x, use_reentrant=True)
    return gradients(checkpoint(network[3:], out, use_reentrant=True).square().sum(), x, *network.parameters())


@case
def recomputed_within_recomputed_with_dropout(step: int) -> Tensors:
    torch.manual_seed(step)
    inner = module(lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh()))
    x = leaf(8, 16, step=step)

    def outer(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, inner(y).sin(), use_reentrant=False).exp()

    return gradients(checkpoint(outer, x, use_reentrant=False).sum() + inner(x).sum(), x, *inner.parameters())


@case
def autocast_to_16_bits(step: int) -> Tensors:
    network = module(lambda: _convolutions(False))
    with torch.autocast("cpu", torch.bfloat16):
        return trained(network, leaf(1, 3, 12, 12, step=step))


@case
def autocast_of_a_shared_weight(step: int) -> Tensors:
    shared = module(lambda: nn.Linear(16, 16))
    x = leaf(8, 16, step=step)
    with torch.autocast("cpu", torch.bfloat16):
        loss = shared(shared(shared(x)).relu()).float().square().sum()
    return gradients(loss, x, *shared.parameters())


# Operations of other people, and operations in place.


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


@case
def a_function_of_ones_own(step: int) -> Tensors:
    x = (drawn(16, 16, step=step).abs() + 1).requires_grad_()
    return gradients(Cubed.apply(x * 2, 3).sum() + Cubed.apply(x, 2).sin().sum(), x)


class Hiding(torch.autograd.Function):
    """Keeps a tensor where autograd does not see it."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.hidden = x.exp()
        return ctx.hidden.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * ctx.hidden


@case
def a_function_that_hides_what_it_keeps(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    return gradients(Hiding.apply(Hiding.apply(x).sin()).sum(), x)


@case
def writes_into_a_part(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    y = x * 2
    y[2:5] = x[1:4].exp()
    y[:, 3].mul_(2)
    return gradients((y * y.sin()).sum(), x)


@case
def sums_in_place(step: int) -> Tensors:
    x = leaf(16, 16, step=step)
    y = x.exp() + 0
    y += x
    y.add_(x.sin()).relu_()
    return gradients((y.sigmoid() * x).sum(), x)


@case
def changed_past_autograd(step: int) -> Tensors:
    """Who writes to `.data` gets what autograd makes of it: the changed values."""
    x = leaf(16, 16, step=step)
    y = x * 2
    z = y * y
    y.data.mul_(3)
    del y
    return gradients(z.sin().sum(), x)


@case
def the_allocator_gives_addresses_again(step: int) -> Tensors:
    """Tensors of one size come and go: each next one lies where one before it lay."""
    x = leaf(64, 64, step=step)
    total = torch.zeros(())
    grads = []
    for k in range(12):
        y = (x * (k + 1)).sin()
        part = (y * y.exp()).sum()
        if k % 3 == 0:
            grads += torch.autograd.grad(part, x)
        else:
            total = total + part
    return [*grads, *gradients(total, x)]
