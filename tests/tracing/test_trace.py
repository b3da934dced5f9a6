"""A module's graph: the module's own outputs and names, its halo, and one message of all that cannot be exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.tracing.networks import Double, Inexact, Mixed, Outer, PaddingUNet, Pointed, Squeezed
from tests.tracing.styles import STYLES, Inverted
from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import minimum_halo, network_footprint
from tiledseg.models.layers.convolution import TorchConvolution
from tiledseg.tracing.trace import trace

MODULES = {
    "convolution": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "sequence": lambda: nn.Sequential(Double(3, 4), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2, 2)),
    "unet": PaddingUNet,
    "pointed": lambda: Outer(Pointed(8)),
    "squeezed": lambda: Outer(Squeezed(8)),
    "mixed": lambda: Outer(Mixed(8)),
    "inverted, halved": lambda: Outer(Inverted(8, stride=2)),
    **{name: (lambda style=style: Outer(style(8))) for name, style in STYLES.items()},
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().double()


@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_gradients_are_the_modules(name: str) -> None:
    module = made(name).eval()
    network = trace(module, 3)
    x_BCHW = torch.randn(1, 3, 32, 48, dtype=torch.float64)
    expected = module(x_BCHW)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    found = network(x_BCHW)
    found.square().sum().backward()
    assert (found - expected).norm() <= 1e-13 * expected.norm()
    for gradient, parameter in zip(gradients, network.parameters(), strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-12 * gradient.norm()


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


def test_the_halo_of_a_kernel_that_is_no_square_is_the_larger() -> None:
    network = trace(made("pointed"), 3)
    assert minimum_halo(network.graph) == (4, 4)
    assert network_footprint(network.graph).alignment == 1


def test_nodes_are_named_after_the_modules_that_call() -> None:
    names = [node.name for node in trace(made("unet"), 3).graph.nodes]
    assert names[:3] == ["first.body.0", "first.body.1", "first.body.2"]
    assert {"dropout.dropout", "interpolate", "cat", "head"} <= set(names)


def test_all_refusals_come_at_once_with_their_lines() -> None:
    with pytest.raises(ConfigError) as error:
        trace(Inexact(), 3)
    message = str(error.value)
    for word in ("__bool__", "the image's other end", "fft_fft2", "images too", "cumsum", "networks.py:"):
        assert word in message, word
    assert "\n" not in message


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


def test_bands_that_do_not_fit_are_said() -> None:
    with pytest.raises(ConfigError, match="does not run on 5 bands"):
        trace(made("unet"), 5)


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


class Dropping(nn.Module):
    """Drops its whole branch at times, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.branch(x)
        return x + (y * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.8) if self.training else y)


def test_what_trains_otherwise_maps_only() -> None:
    with pytest.raises(ConfigError, match=r"does not do in training what it does in evaluation.*test_trace.py"):
        trace(Dropping(), 3)
    network = trace(Dropping().eval(), 3)
    with pytest.raises(ConfigError, match="map with it"):
        network.train()
    assert not network.training


def test_a_checkpoint_of_the_module_is_one_of_the_network() -> None:
    module, again = made("Weighted"), made("Weighted")
    with torch.no_grad():
        for tensor in (*again.parameters(), *again.buffers()):
            tensor.mul_(1.5)
    network = trace(module, 3)
    network.load_state_dict(again.state_dict())
    x_BCHW = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    assert torch.equal(network.eval()(x_BCHW), trace(again, 3).eval()(x_BCHW))


class Returning(nn.Module):
    """Two tensors, one of them half as large."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": torch.relu(x), "aux": functional.avg_pool2d(x, 2)}


def test_outputs_of_several_sizes_are_chosen() -> None:
    with pytest.raises(ConfigError, match="64 x 96, 32 x 48 pixels; return those of one size"):
        trace(Returning(), 3)
    assert len(trace(Returning(), 3, outputs=[1]).graph) == 1


@pytest.mark.parametrize("computed", [False, True])
def test_a_strided_convolution_of_single_pixels_and_few_channels(computed: bool) -> None:
    """Its gradients in float32 are those in float64: torch's own kernel writes beyond its memory there."""

    class Thin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.thin, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1, stride=2), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if not computed:
                return self.last(self.thin(x))
            return self.last(torch.conv2d(x, 2 * self.thin.weight, self.thin.bias, stride=2))

    found = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(3)
        network = trace(Thin(), 3).to(dtype).to(memory_format=torch.channels_last)
        thin = network.layers["thin" if "thin" in network.layers else "conv"]
        assert isinstance(thin, TorchConvolution)
        x_BCHW = torch.randn(1, 3, 96, 112, dtype=torch.float64).to(dtype).contiguous(memory_format=torch.channels_last)
        network(x_BCHW).square().mean().backward()
        found.append({name: p.grad.double() for name, p in network.named_parameters()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6)
