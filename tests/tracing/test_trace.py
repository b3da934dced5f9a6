"""A module's graph: the module's own outputs and names, its halo, and one message of all that cannot be exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.tracing.networks import Mixed, Outer, PaddingUNet
from tests.tracing.styles import Functions
from tests.tracing.test_refused import Written
from tiledseg.errors import ConfigError
from tiledseg.models.layers.convolution import TorchConvolution
from tiledseg.tracing.runs import ModuleRuns
from tiledseg.tracing.trace import trace

MODULES = {
    "unet": PaddingUNet,
    "mixed": lambda: Outer(Mixed(8)),
    "functions": lambda: Outer(Functions(8)),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().double()


@pytest.mark.parametrize("name", MODULES)
def test_weights_are_shared_and_names_stay(name: str) -> None:
    module = made(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    network = trace(module, 3)
    assert list(network.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items()), "tracing moves no buffer"
    pairs = zip(network.named_parameters(), module.named_parameters(), strict=True)
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    x_BCHW = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    module.eval(), network.eval()
    assert torch.allclose(network(x_BCHW), module(x_BCHW), rtol=1e-12, atol=0)


def test_a_module_keeps_its_mode_and_the_network_takes_it() -> None:
    module = made("unet").train()
    module.second.eval()
    network = trace(module, 3)
    assert module.training
    assert network.training
    assert not module.second.training, "frozen parts stay frozen"


def test_all_refusals_come_at_once_with_their_lines() -> None:
    with pytest.raises(ConfigError) as error:
        trace(Written(lambda x: x.cumsum(dim=2) + torch.fft.fft2(x).real + x.mean() * (2 if x.sum() > 0 else 1)), 3)
    message = str(error.value)
    for word in ("__bool__", "fft_fft2", "images too", "cumsum", "test_trace.py:"):
        assert word in message, word
    assert "\n" not in message


def test_a_dropout_that_drops_nothing_trains() -> None:
    assert trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout3d(0.0)), 3).untrained is None


def test_dropout_by_itself_is_drawn_anew_at_each_call() -> None:
    """As the module draws it, where that drops whole channels; our loops give keys."""
    module = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Dropout2d(0.5))
    network, x_BCHW = trace(module.train(), 3), torch.randn(2, 3, 8, 8)
    found = []
    for each in (module, network):
        torch.manual_seed(4)
        found.append([each(x_BCHW), each(x_BCHW)])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(*found[1])


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_takes_gradients_in_any_layout(affine: bool) -> None:
    """torch's own, on a CPU, takes one that comes channels last for another."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=affine)).double()
    network = trace(module, 3)
    x_BCHW = torch.randn(1, 3, 16, 12, dtype=torch.float64)
    gradient = torch.randn(1, 4, 16, 12, dtype=torch.float64)
    expected = torch.autograd.grad(module(x_BCHW), module.parameters(), gradient)
    found = torch.autograd.grad(network(x_BCHW), network.parameters(), gradient.to(memory_format=torch.channels_last))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-12 * gradient.norm()


class Returning(nn.Module):
    """Two tensors, one of them half as large."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": torch.relu(x), "aux": functional.avg_pool2d(x, 2)}


def test_outputs_of_several_sizes_are_chosen() -> None:
    with pytest.raises(ConfigError, match="64 x 96, 32 x 48 pixels; return those of one size"):
        trace(Returning(), 3)
    assert len(trace(Returning(), 3, outputs=[1]).graph) == 1


def test_strided_convolutions_of_single_pixels_are_ours() -> None:
    """In modules and by functions: torch's own kernel writes beyond its memory for few channels."""

    class Thin(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.conv2d(x, 2 * self.weight, self.bias, stride=2)

    layers = list(trace(nn.Sequential(nn.Conv2d(3, 4, 1), Thin(4, 8, 1, stride=2)), 3).layers.values())
    assert sum(isinstance(layer, TorchConvolution) for layer in layers) == 3


@pytest.mark.parametrize("activation", [nn.LeakyReLU(-0.2), nn.ELU(-0.5), nn.LeakyReLU(0.2)], ids=str)
def test_slopes_of_either_sign_go_backward(activation: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), activation, nn.Conv2d(3, 2, 1)).double()
    x_BCHW = torch.randn(1, 2, 16, 16, dtype=torch.float64)
    found = []
    for each in (module, trace(module, 2)):
        module.zero_grad()
        each(x_BCHW).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in module.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_a_further_size_takes_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, modes and dtypes have a pair of runs of their own, with which further sizes are compared."""
    batches, run = list[int](), ModuleRuns.run

    def counted(source: ModuleRuns, batch: int, *given: Any, **how: Any) -> Any:
        batches.append(batch)
        return run(source, batch, *given, **how)

    network = trace(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).eval(), 3)
    network(torch.randn(1, 3, 32, 32))
    monkeypatch.setattr(ModuleRuns, "run", counted)
    for number, change in enumerate((network.eval, lambda: copy.deepcopy(network), network.train, network.double)):
        changed, batches[:] = change(), []
        for side in (48, 64, 80):
            changed(torch.randn(1, 3, side, side + number, dtype=next(changed.parameters()).dtype))
        assert batches == ([1, 2, 3, 1, 1] if number else [1, 1, 1])
