"""The bytes of a stage against what autograd keeps of that stage, run by itself."""

from __future__ import annotations

import pytest
import torch

from tiledseg.architecture.unet import UNet
from tiledseg.models.network import Tensors, build_modules
from tiledseg.pipeline.balance import cuts
from tiledseg.planning.stages.cost import StagePrices
from tiledseg.planning.step.cost import layer_costs, loss_bytes, tile_walk
from tiledseg.planning.walk.step_memory import training_memory

CONTEXT = (48, 64)
# Cuts in front of a convolution, norm, activation, stash, pooling, upsampling, concatenation and the head.
BALANCES = [(49,), (8, 10, 10, 10, 11), (2, 6, 12, 9, 9, 10, 1), (3, 5, 1, 4, 6, 9, 11, 9, 1), (1,) * 49]


def stage_bytes(unet: UNet, balance: tuple[int, ...]) -> list[int]:
    """Bytes that autograd keeps of each stage; whatever comes from another stage arrives in memory of its own."""
    network = build_modules(unet, seed=0).to(memory_format=torch.channels_last).train()  # as runs have it
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    source_BCHW = torch.randn(1, unet.bands, *CONTEXT).to(memory_format=torch.channels_last)
    made: Tensors = {0: source_BCHW}
    found, held = [], []
    for first, stop in cuts(balance):
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> torch.Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
            return tensor

        tensors = {t: made[t].detach().requires_grad_(t > 0).clone() for t in network.graph.entering(first, stop)}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network.run_nodes(tensors, first, stop)
        made |= tensors
        held.append(kept)  # nothing is freed while others are counted
        found.append(sum(s.nbytes() for pointer, s in kept.items() if pointer not in weights))
    return found


@pytest.mark.parametrize("balance", BALANCES, ids=lambda balance: f"{len(balance)}-stages")
@pytest.mark.parametrize("norm", ["none", "instance", "batch", "pixel"])
def test_kept_bytes_of_any_run_are_those_of_autograd(balance: tuple[int, ...], norm: str) -> None:
    unet = UNet(3, base_channels=4, norm=norm, classes=3)
    layers = unet.graph()
    assert sum(balance) == len(layers)
    prices = StagePrices(tile_walk(layers, unet.bands, CONTEXT))
    counted = [prices.memory(*run).activations for run in cuts(balance)]
    counted[-1] -= loss_bytes([prices.costs[-1]], 4)
    assert counted == stage_bytes(unet, balance)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_one_stage_is_the_whole_network(width: int) -> None:
    unet = UNet(4, base_channels=4, norm="instance")
    layers = unet.graph()
    whole = training_memory(layers, unet.bands, CONTEXT, width)
    prices = StagePrices(tile_walk(layers, unet.bands, CONTEXT, width))
    assert prices.memory(0, len(layers)).total(1) == whole.total
    assert prices.memory(0, len(layers)).inputs == unet.bands * CONTEXT[0] * CONTEXT[1] * width


def test_a_stage_receives_its_input_and_each_foreign_skip_once() -> None:
    unet = UNet(3, base_channels=4)
    layers = unet.graph()
    costs = layer_costs(layers, unet.bands, CONTEXT)
    prices = StagePrices(tile_walk(layers, unet.bands, CONTEXT))
    (stash1, pop1), (stash0, pop0) = prices.skips
    assert prices.tensor_bytes(stash0 + 1) == 4 * 4 * 48 * 64
    assert prices.received(0, len(layers)) == 0
    first = stash1 + 2  # after the inner level's pooling
    skips = costs[stash1].output_bytes + costs[stash0].output_bytes
    assert prices.received(first, len(layers)) == costs[first - 1].output_bytes + skips
    assert prices.received(stash1, pop0) == sum(costs[stash1].input_bytes)
    assert pop1 < pop0
    # The inner level's pooling, and its concatenation, take one mark: it comes once.
    assert prices.received(stash1 + 1, len(layers)) == skips
