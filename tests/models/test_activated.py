"""A convolution that applies the activation after it gives the bits of the two, one after the other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.activations import Activation
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import Add
from tiledseg.models.layers.activated import activations
from tiledseg.models.layers.convolution import SteadyConvolution
from tiledseg.models.network import GraphNetwork, build_modules, build_network, run_nodes

UNETS = {
    "plain": UNet(2, base_channels=5, classes=3, bands=4),
    "one band": UNet(2, base_channels=16, classes=3, bands=1),
    "valid": UNet(2, base_channels=8, classes=3, bands=3, padding="valid"),
}


def network(unet: UNet) -> GraphNetwork:
    made = build_modules(unet, seed=0).eval()
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def image(bands: int, side: int = 48) -> torch.Tensor:
    x_BCHW = torch.randn(1, bands, side, side, generator=torch.Generator().manual_seed(1))
    return x_BCHW.contiguous(memory_format=torch.channels_last)


def plainly(made: GraphNetwork, x_BCHW: torch.Tensor) -> torch.Tensor:
    """Each node by its module."""
    modules = list(made.layers.values())
    tensors = {0: x_BCHW}
    run_nodes(made.graph, lambda k, inputs: modules[k](*inputs), tensors, 0, len(made.graph))
    return tensors[len(made.graph)]


@pytest.mark.parametrize("unet", UNETS.values(), ids=UNETS)
def test_a_map_has_the_bits_of_the_layers_one_by_one(unet: UNet, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x_BCHW = network(unet), image(unet.bands)
    calls: list[int] = []
    plain = SteadyConvolution.activated
    monkeypatch.setattr(SteadyConvolution, "activated", lambda self, *given: (calls.append(1), plain(self, *given))[1])
    with torch.inference_mode():
        assert torch.equal(made(x_BCHW), plainly(made, x_BCHW))
    assert len(calls) == len(activations(made.graph, list(made.layers.values()))) == 6


@pytest.mark.parametrize("unet", UNETS.values(), ids=UNETS)
@pytest.mark.parametrize("frozen", [(), ("conv0.weight",), ("bias",)], ids=str)
def test_gradients_are_those_of_the_layers_one_by_one(unet: UNet, frozen: tuple[str, ...]) -> None:
    """To the last bit, the input's too, and the same tensors are kept for them."""
    made, x_BCHW = network(unet).train(), image(unet.bands).requires_grad_()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    wanted = [x_BCHW, *(each for each in made.parameters() if each.requires_grad)]
    found, kept = [], []
    for way in (made, partial(plainly, made)):
        held: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, held=held: (held.append(tuple(x.shape)), x)[1], _same):
            y_BCHW = way(x_BCHW)
        found.append([y_BCHW, *torch.autograd.grad(y_BCHW.sin().sum(), wanted)])
        kept.append(sorted(held))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert kept[0] == kept[1]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def test_who_follows_a_step_sees_both_layers() -> None:
    made, x_BCHW = network(UNETS["plain"]).train(), image(4)
    assert not any("pointwise" in name for name in _seen(made, x_BCHW))
    with torch.no_grad():
        expected = plainly(made, x_BCHW)
    assert torch.equal(made(x_BCHW), expected)


def _seen(made: GraphNetwork, x_BCHW: torch.Tensor) -> list[str]:
    """What a dispatch mode sees of a step."""
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with Names():
        made(x_BCHW).sum().backward()
    assert any("leaky_relu" in name for name in names)
    return names


def test_infinite_values_and_numbers_that_are_none_stay_what_they_are() -> None:
    convolution = SteadyConvolution(4, 4, 1, bias=True)
    x_BCHW = image(4, 20)
    x_BCHW[0, 0, 3, 3:6] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    with torch.inference_mode():
        expected = functional.leaky_relu(convolution(x_BCHW), 0.01)
        assert convolution.activated(x_BCHW, 0.01).numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("between", [{"norm": "batch"}, {"dropout": 0.5}], ids=str)
def test_a_norm_or_a_dropout_between_them_keeps_them_apart(between: dict[str, Any]) -> None:
    made = network(UNet(2, base_channels=4, classes=3, **between))
    assert not activations(made.graph, list(made.layers.values()))


def test_another_reader_of_the_convolution_keeps_them_apart() -> None:
    nodes = (
        Node("conv", Convolution(4, 3, 1, 1)),
        Node("act", Activation(), ("conv",)),
        Node("sum", Add((0, 0)), ("conv", "act")),
    )
    made = build_network(Graph(nodes), 4, seed=0).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not activations(made.graph, list(made.layers.values()))
    with torch.inference_mode():
        assert torch.equal(made(image(4)), plainly(made, image(4)))


def test_a_cut_between_them_and_a_hook_keep_them_apart() -> None:
    made, x_BCHW = network(UNETS["plain"]), image(4)
    with torch.inference_mode():
        expected = plainly(made, x_BCHW)
        for cut in range(1, len(made.graph)):
            tensors = {0: x_BCHW}
            made.run_nodes(tensors, 0, cut)
            made.run_nodes(tensors, cut, len(made.graph))
            assert torch.equal(tensors[len(made.graph)], expected)
        seen: list[torch.Tensor] = []
        first = next(iter(made.layers.values()))
        first.register_forward_hook(lambda module, given, made: seen.append(made.clone()))
        assert torch.equal(made(x_BCHW), expected)
        assert torch.equal(seen[0], first(x_BCHW))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_who_looks_at_a_gradient_sees_it_or_is_told(register: str) -> None:
    """torch says itself that the activation may not write over what a hook on the way back has seen."""
    made, x_BCHW = network(UNETS["plain"]), image(4)
    names = [name for name, module in made.layers.items() if isinstance(module, SteadyConvolution)]
    for name in names:
        seen: list[str] = []
        handle = getattr(made.layers[name], register)(lambda module, *given, seen=seen, name=name: seen.append(name))
        told = ""
        try:
            made(x_BCHW).sum().backward()
        except RuntimeError as error:
            told = str(error)
        assert "is a view and is being modified inplace" in told if told else seen == [name]
        handle.remove()


def test_who_looks_at_all_modules_sees_all() -> None:
    made, x_BCHW = network(UNETS["plain"]), image(4)
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, given, made: seen.append(module))
    made(x_BCHW)
    handle.remove()
    assert {id(module) for module in made.layers.values()} <= {id(module) for module in seen}
