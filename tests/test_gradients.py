"""The reducer's laws: gradients are the sum over ranks, in place, whichever ranks have a tile."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tiledseg import gradients
from tiledseg.comm.collectives import Communicator
from tiledseg.comm.mesh import Mesh
from tiledseg.gradients import GradientReducer, clip_gradients, scale_gradients
from tiledseg.models.frozen import Lending


def small_network() -> nn.Module:
    generator = torch.Generator().manual_seed(4)
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 1), nn.Conv2d(7, 2, 3)).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network.to(memory_format=torch.channels_last)


def tile(index: int) -> torch.Tensor:
    return torch.randn(1, 3, 9, 8, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def reducer_of(network: nn.Module, wide: bool = True) -> GradientReducer:
    reducer = GradientReducer(network.parameters(), Communicator(), wide)
    reducer.zero()
    return reducer


def plain_gradients(tiles: list[int]) -> list[torch.Tensor]:
    network = small_network()
    for index in tiles:
        network(tile(index)).square().sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]


@pytest.fixture(params=[64, 1 << 20], ids=["many buckets", "one bucket"])
def bucket_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", request.param)
    return request.param


@pytest.mark.mpi
@pytest.mark.parametrize("dealt", ["uneven", "root only", "none"])
def test_gradients_are_the_sum_over_ranks(dealt: str, mesh: Mesh, bucket_bytes: int) -> None:
    size = mesh.size
    counts = {"uneven": list(range(size)), "root only": [3] + [0] * (size - 1), "none": [0] * size}[dealt]
    mine = [10 * mesh.rank + i for i in range(counts[mesh.rank])]
    everyone = [10 * rank + i for rank, count in enumerate(counts) for i in range(count)]
    network = small_network()
    reducer = GradientReducer(network.parameters(), mesh.communicator)
    assert (len(reducer.buckets) == 1) == (bucket_bytes > 64)
    for _ in range(2):  # the second step must not see the first
        reducer.zero()
        for i, index in enumerate(mine):
            if i == len(mine) - 1:
                reducer.overlap()
            network(tile(index)).square().sum().backward()
        reducer.finish()
        reducer.deliver()
    for parameter, expected in zip(network.parameters(), plain_gradients(everyone), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wide", [True, False])
def test_gradients_of_weights_that_are_parts_of_tensors(wide: bool) -> None:
    """Whose strides go beyond them: into the next one's sums."""
    generator = torch.Generator().manual_seed(5)
    big = torch.randn(12, 9, generator=generator, dtype=torch.float64)
    weights = [nn.Parameter(each) for each in (big[:, :4], big[::2, 1], big[3:5].clone(), big.t()[:3])]
    factors = [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in weights]
    reducer = GradientReducer(weights, Communicator(), wide)
    reducer.zero()
    for _ in range(2):
        sum((weight * factor).sum() for weight, factor in zip(weights, factors, strict=True)).backward()
    reducer.finish()
    reducer.deliver()
    for weight, factor in zip(weights, factors, strict=True):
        assert torch.equal(weight.grad, 2 * factor)


def test_float32_gradients_do_not_depend_on_the_order_of_the_tiles() -> None:
    """Summed in float64, they are the same bits in any order; summed in float32, they are not: so the test can fail.
    They have the dtype and the layout of the weights."""

    def summed(order: list[int], wide: bool) -> list[torch.Tensor]:
        network = small_network().float()
        reducer = reducer_of(network, wide)
        for index in order:
            network(tile(index).float()).square().sum().backward()
        reducer.finish()
        reducer.deliver()
        for parameter in network.parameters():
            assert (parameter.grad.dtype, parameter.grad.stride()) == (torch.float32, parameter.stride())
        return [p.grad for p in network.parameters()]

    for wide in (True, False):
        pairs = zip(summed([1, 2, 3, 4, 5], wide), summed([4, 1, 5, 3, 2], wide), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == wide


def test_uses_of_a_weight_are_summed_apart() -> None:
    """One backward pass through several tiles: autograd adds nothing up in float32, and keeps nothing itself."""
    network = small_network().float()
    lending, tiles = Lending(network), [tile(index).float() for index in range(5)]

    def summed(order: list[torch.Tensor], at_once: bool) -> list[torch.Tensor]:
        reducer, losses = reducer_of(network), []
        for x_BCHW in order:
            with lending.lend(0, 4, reducer.use) if at_once else nullcontext():
                losses.append(network(x_BCHW).square().sum())
            if not at_once:
                losses.pop().backward()
        if at_once:
            torch.stack(losses).sum().backward()
        assert all(p.grad is None for p in network.parameters())
        reducer.finish()
        reducer.close()
        return reducer.buckets

    for mine, theirs, turned in zip(summed(tiles, True), summed(tiles, False), summed(tiles[::-1], True), strict=True):
        assert float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-15
        assert torch.equal(mine.float(), turned.float())


def test_scaling_and_clipping_act_on_the_whole_gradient(bucket_bytes: int) -> None:
    network = small_network()
    reducer = reducer_of(network)
    network(tile(2)).square().sum().backward()
    reducer.deliver()
    before = [p.grad.clone() for p in network.parameters()]
    norm = torch.cat([g.reshape(-1) for g in before]).norm().item()
    scale_gradients(reducer, 0.5)
    for largest, factor in ((norm, 0.5), (norm / 8, 0.125)):  # half the norm: at first nothing is to clip
        clip_gradients(reducer, largest, Communicator())
        reducer.deliver()
        for parameter, expected in zip(network.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad, expected * factor)
