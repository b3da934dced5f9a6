"""What a memory policy drops and rebuilds: the same outputs and gradients to the last bit, and less memory."""

from __future__ import annotations

import random
import traceback

import pytest
import torch

from tests.law.every_layer import EveryLayer, ForeignLayers
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import Network
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD, Graph, MemoryPolicy, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.pixelwise import Sigmoid
from tiledseg.geometry.memory_policy import can_rebuild, held, keep_all, recomputation, spread
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.memory.saved import Hooks
from tiledseg.models.dropout import set_dropout_key
from tiledseg.models.network import GraphNetwork, build_modules, build_network
from tiledseg.planning.walk.cost import tile_walk


def drawn(graph: Graph, seed: int) -> MemoryPolicy:
    """Any policy that can be."""
    draw = random.Random(seed)
    words = [draw.choice((KEEP, REBUILD)) if can_rebuild(graph, home) else KEEP for home in range(len(graph.names))]
    inside = [draw.choice((KEEP, REBUILD)) if layer.can_rebuild else KEEP for layer in graph.layers]
    return spread(graph, words.__getitem__, inside)


def everything(graph: Graph) -> MemoryPolicy:
    """All that can be rebuilt, from the network's input on."""
    inside = [REBUILD if layer.can_rebuild else KEEP for layer in graph.layers]
    return spread(graph, lambda home: REBUILD if can_rebuild(graph, home) else KEEP, inside)


def policies(graph: Graph) -> dict[str, MemoryPolicy]:
    each = {"recomputation": recomputation(graph), "everything": everything(graph)}
    return each | {f"drawn{seed}": drawn(graph, seed) for seed in range(2)}


NETWORKS: dict[str, tuple[Network, tuple[int, int]]] = {
    "unet": (UNet(3, base_channels=4, dropout=0.3), (32, 48)),
    "unet-valid-batch": (UNet(3, base_channels=4, norm="batch", padding="valid", upsampling="bilinear"), (60, 68)),
    "unet-instance": (UNet(3, base_channels=4, norm="instance", upsampling="nearest", dropout=0.2), (32, 48)),
    "unet-group": (UNet(2, base_channels=8, norm="group"), (32, 48)),
    "unet-pixel": (UNet(2, base_channels=4, norm="pixel"), (32, 48)),
    "segnet": (SegNet(3, 4), (32, 48)),
    "residual": (ResidualUNet("resnet18", 4), (32, 64)),
    "gated": (GatedSCNN("resnet18", 8), (32, 64)),
    "every": (EveryLayer(whole=True), (32, 48)),
    "foreign": (ForeignLayers(whole=True), (32, 48)),
}
PRECISIONS = {"fp32": slice(None), "bf16": slice(None, None, 2), "fp64": slice(2, 3)}  # with which of the policies


def steps(network: GraphNetwork, x_BCHW: torch.Tensor, autocast: bool = False) -> dict[str, torch.Tensor]:
    """Outputs, gradients and buffers of two steps."""
    found, source = dict[str, torch.Tensor](), x_BCHW.clone().requires_grad_()
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16, autocast):
            made = network(source)
        made = made[0] if isinstance(made, tuple) else made
        found[f"output {step}"] = made.detach().clone()
        (made.double() ** 2).mean().backward()
    gradients = {f"gradient of {name}": p.grad for name, p in [*network.named_parameters(), ("input", source)]}
    return found | {name: each for name, each in gradients.items() if each is not None} | dict(network.named_buffers())


def built(name: str, precision: str = "fp32") -> tuple[GraphNetwork, torch.Tensor]:
    network, size = NETWORKS[name]
    modules = build_modules(network, seed=1).train()
    x_BCHW = torch.randn(2, network.bands, *size, generator=torch.Generator().manual_seed(0))
    if precision == "fp64":
        modules, x_BCHW = modules.double(), x_BCHW.double()
    return modules.to(memory_format=torch.channels_last), x_BCHW.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_gradients_to_the_last_bit(name: str, precision: str) -> None:
    network, x_BCHW = built(name, precision)
    expected = steps(network, x_BCHW, precision == "bf16")
    for policy in list(policies(network.graph).values())[PRECISIONS[precision]]:
        network, x_BCHW = built(name, precision)
        network.follow(policy)
        check_same(steps(network, x_BCHW, precision == "bf16"), expected)


def test_autograd_holds_what_the_policy_keeps() -> None:
    """Bytes when the forward pass has ended: the network's input, the tensors held, and statistics."""
    for name in ("unet-valid-batch", "unet-instance", "segnet"):
        network, x_BCHW = built(name)
        graph, costs = network.graph, tile_walk(network.graph, network.bands, (x_BCHW.shape[2], x_BCHW.shape[3])).costs
        for policy in (recomputation(graph), drawn(graph, 5)):
            network.follow(policy)
            with AllocationMeter([*network.parameters(), *network.buffers(), x_BCHW]) as meter:
                made = network(x_BCHW)
                found = meter.bytes
            there = held(graph, policy)
            tensors = {home for home, is_held in enumerate(there) if is_held} | {graph.homes[graph.results[0]]}
            least = sum(len(x_BCHW) * costs[home - 1].output_bytes for home in tensors - {0})
            assert least <= found <= 1.1 * least, policy
            del made


def test_a_chain_is_rebuilt_without_recursion_and_each_node_a_few_times_at_most() -> None:
    graph = Graph((Node("conv", Convolution(2, 1)), *(Node(f"gate{index}", Sigmoid()) for index in range(400))))
    x_BCHW = torch.randn(1, 2, 4, 4)
    gradients, runs = [], list[int]()
    for policy in (keep_all(graph), everything(graph)):
        network = build_network(graph, 2, seed=0).follow(policy)
        for module in network.layers.values():
            module.register_forward_hook(lambda *_: runs.append(len(traceback.extract_stack())))
        runs.clear()
        network(x_BCHW).sum().backward()
        gradients.append(network.layers["conv"].weight.grad)
    assert torch.equal(*gradients)
    assert len(runs) <= 5 * len(graph)
    assert max(runs) - min(runs) < 30


def test_nothing_is_left_after_steps_and_after_an_exception() -> None:
    network, x_BCHW = built("unet-instance")
    network.follow(everything(network.graph))
    with AllocationMeter([*network.parameters(), *network.buffers(), x_BCHW]) as meter:
        for _ in range(20):
            network(x_BCHW).sum().backward()
            network.zero_grad()
            assert meter.bytes == 0
        network.layers["head"].weight.data = torch.zeros(1, 1, 1, 1)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                network(x_BCHW)
            assert meter.bytes == 4


def test_a_backward_pass_that_is_made_twice() -> None:
    network, x_BCHW = built("unet-group")
    found = []
    for policy in (keep_all(network.graph), everything(network.graph)):
        network.zero_grad()
        made = network.follow(policy)(x_BCHW)
        made.sum().backward(retain_graph=True)
        made.sum().backward()
        found.append([p.grad for p in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("word", [KEEP, REBUILD])
def test_what_is_written_over_before_the_backward_pass_is_said(word: str) -> None:
    """As autograd says it: of the input, of a weight; of a bias, which only a node that runs again needs."""
    network, x_BCHW = built("unet-group")
    network.follow(everything(network.graph) if word == REBUILD else drawn(network.graph, 1))
    bias = network.layers["encoder0-norm0"].bias
    for spoil in (x_BCHW, next(iter(network.parameters())), *([bias] if word == REBUILD else [])):
        made = network(x_BCHW)
        with torch.no_grad():
            spoil.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


def test_dropout_that_draws_in_order_draws_once() -> None:
    """A network that somebody calls by himself: torch's generator, other channels at each call."""
    found = []
    for policy in (keep_all, everything):
        network, x_BCHW = built("unet")
        set_dropout_key(network.follow(policy(network.graph)))
        torch.manual_seed(3)
        found.append(steps(network, x_BCHW))
    check_same(*found)
    assert not torch.equal(found[0]["output 0"], found[0]["output 1"])


def test_kept_tensors_go_to_the_hooks_around_and_offloaded_ones_to_theirs() -> None:
    network, x_BCHW = built("unet-instance")
    expected = steps(network, x_BCHW)
    graph, away, around = network.graph, list[int](), list[int]()

    def hooks(taken: list[int]) -> Hooks:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            taken.append(tensor.numel())
            return tensor.detach().clone(memory_format=torch.preserve_format)

        return Hooks(pack, lambda packed: packed)

    again = recomputation(graph)
    moved = spread(graph, lambda home: OFFLOAD if again.tensors[home] == KEEP else REBUILD, again.inside)
    network, _ = built("unet-instance")
    network.follow(moved, hooks(away))
    with torch.autograd.graph.saved_tensors_hooks(*hooks(around)[:2]):
        check_same(steps(network, x_BCHW), expected)
    assert max(away) >= x_BCHW.shape[0] * 4 * x_BCHW.shape[2] * x_BCHW.shape[3]
    assert 0 < max(around) <= max(away)
