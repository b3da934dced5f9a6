"""The bytes of a stage against what autograd keeps of that stage, run by itself."""

from __future__ import annotations

import pytest
import torch

from tiledseg.architecture.unet import UNet
from tiledseg.models.blocks import PopSkip, StashSkip
from tiledseg.models.unet import build_unet
from tiledseg.pipeline.balance import cuts
from tiledseg.planning.cost import layer_costs, loss_bytes
from tiledseg.planning.stages_cost import StagePrices, skip_ends
from tiledseg.planning.step_memory import training_memory

CONTEXT = (48, 64)
# Cuts in front of a convolution, norm, activation, stash, pooling, upsampling, concatenation and the head.
BALANCES = [(49,), (8, 10, 10, 10, 11), (2, 6, 12, 9, 9, 10, 1), (3, 5, 1, 4, 6, 9, 11, 9, 1), (1,) * 49]


def stage_bytes(unet: UNet, balance: tuple[int, ...]) -> list[int]:
    """Bytes that autograd keeps of each stage; whatever comes from another stage arrives in memory of its own."""
    network = build_unet(unet, seed=0).train()
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    modules = list(network.layers.values())
    x_BCHW = torch.randn(1, unet.bands, *CONTEXT)
    skips: dict[str, torch.Tensor] = {}
    found, held = [], []
    for first, stop in cuts(balance):
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> torch.Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
            return tensor

        x_BCHW = x_BCHW.detach().requires_grad_(first > 0).clone()
        own: dict[str, torch.Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for module in modules[first:stop]:
                if isinstance(module, PopSkip):
                    skip = own[module.skip] if module.skip in own else skips[module.skip].detach().clone()
                    x_BCHW = module(x_BCHW, skip)
                else:
                    x_BCHW = module(x_BCHW)
                if isinstance(module, StashSkip):
                    own[module.skip] = x_BCHW
        skips |= own
        held.append((kept, x_BCHW))  # nothing is freed while others are counted
        found.append(sum(s.nbytes() for pointer, s in kept.items() if pointer not in weights))
    return found


@pytest.mark.parametrize("balance", BALANCES, ids=lambda balance: f"{len(balance)}-stages")
@pytest.mark.parametrize("norm", ["none", "instance", "batch", "pixel"])
def test_kept_bytes_of_any_run_are_those_of_autograd(balance: tuple[int, ...], norm: str) -> None:
    unet = UNet(3, base_channels=4, norm=norm, classes=3)
    layers = unet.layers()
    assert sum(balance) == len(layers)
    prices = StagePrices(layers, layer_costs(layers, unet.bands, CONTEXT), 4)
    counted = [prices.memory(*run).activations for run in cuts(balance)]
    counted[-1] -= loss_bytes(prices.costs, 4)
    assert counted == stage_bytes(unet, balance)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_one_stage_is_the_whole_network(width: int) -> None:
    unet = UNet(4, base_channels=4, norm="instance")
    layers = unet.layers()
    whole = training_memory(layers, unet.bands, CONTEXT, width)
    prices = StagePrices(layers, layer_costs(layers, unet.bands, CONTEXT, width), width)
    assert prices.memory(0, len(layers)).total(1) == whole.total
    assert prices.memory(0, len(layers)).inputs == unet.bands * CONTEXT[0] * CONTEXT[1] * width


def test_a_stage_receives_its_input_and_each_foreign_skip_once() -> None:
    unet = UNet(3, base_channels=4)
    layers = unet.layers()
    costs = layer_costs(layers, unet.bands, CONTEXT)
    prices = StagePrices(layers, costs, 4)
    (inner, stash1, pop1), (outer, stash0, pop0) = skip_ends(layers)
    assert (inner, outer) == ("skip1", "skip0")
    assert prices.skip_bytes("skip0") == 4 * 4 * 48 * 64
    assert prices.received(0, len(layers)) == 0
    first = stash1 + 1  # the inner level's pooling
    skips = costs[stash1].output_bytes + costs[stash0].output_bytes
    assert prices.received(first, len(layers)) == costs[stash1].output_bytes + skips
    assert prices.received(stash1, pop0) == costs[stash1].input_bytes
    assert pop1 < pop0
