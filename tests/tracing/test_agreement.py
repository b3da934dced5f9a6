"""The check at the place of use: what no trace has seen is named, what is only rounding never."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.foreign.modules import Sly, Somebody, build_aligned
from tests.tracing.styles import Functions
from tiledseg.errors import ConfigError
from tiledseg.models.network import GraphNetwork, with_channels_last
from tiledseg.tracing.compare import gap, verified
from tiledseg.tracing.trace import trace

ROOM = 1 << 30
MORE: list[str] = []  # what a module does besides


def window(side: int = 160, bands: int = 2, scale: float = 1.0) -> torch.Tensor:
    """Smooth ground with details, of pixels up to 4 `scale`."""
    draw = np.random.default_rng(7)
    rows, cols = np.mgrid[:side, :side] / 20
    ground = np.stack([np.sin(rows + band) * np.cos(cols) for band in range(bands)])
    pixels = 2 + ground + draw.normal(0, 0.3, (bands, side, side))
    return torch.from_numpy((pixels * scale).astype(np.float32))[None]


def traced(module: nn.Module, sly: str = "", training: bool = False) -> GraphNetwork:
    torch.manual_seed(4)
    network = trace(module.train(), 2)
    module.sly = sly
    return network.train(training)


@pytest.mark.parametrize(
    ("sly", "training", "side", "place"),
    [
        ("size", False, 320, r"\(mul, tests/foreign/modules.py:\d+\) is called, which was not when"),
        ("size", True, 320, r"\(mul, tests/foreign/modules.py:\d+\) is called"),
        ("hidden", False, 160, r"output 0 differs by .*: node 'norm' by .*, 'norm' \(InstanceNorm2d, tests/foreign"),
        ("pixels", False, 160, r"\(clamp, tests/foreign/modules.py:\d+\) is called"),
        ("view", False, 160, "is called, which was not"),
        ("term", False, 160, r"\(mean, tests/foreign/modules.py:\d+\) is called"),
        ("training", True, 160, r"in training .*\(mul, tests/foreign/modules.py:\d+\) is called"),
        ("counts", True, 160, "state 'count' differs by"),
        ("backward", True, 160, "gradient 'norm.bias' differs by .* a backward pass of its own, after it"),
    ],
)
def test_what_no_trace_has_seen_is_named(sly: str, training: bool, side: int, place: str) -> None:
    network = traced(Sly(), sly, training)
    with pytest.raises(ConfigError, match=f"Sly computes.*{place}.*set verify to false"):
        verified(network, window(side), ROOM)


@pytest.mark.parametrize("sly", ["training", "backward"])
def test_maps_do_without_what_is_of_training_alone(sly: str) -> None:
    assert verified(traced(Sly(), sly), window(), ROOM).startswith(
        "checked: the graph gives what Sly gives on 160 x 16"
    )


def test_a_term_below_the_rounding_of_bfloat16_is_seen() -> None:
    network = traced(Sly(), "term")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="Sly computes"):
        verified(network, window(), ROOM)


class Narrow(nn.Module):
    """A softmax in float32, whatever the input is; the choice from a table needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.register_buffer("table", torch.tensor([-1.0, 2.0, -1.0, 3.0, 4.0, 5.0]))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        shares_BCHW = self.conv(x_BCHW).float().softmax(1).to(x_BCHW.dtype)
        return self.head(shares_BCHW * self.table[self.table > 0].view(1, 4, 1, 1))


@pytest.mark.parametrize("training", [False, True])
def test_a_cast_to_float32_is_seen_in_a_run_in_float64(training: bool) -> None:
    network = traced(Narrow(), "", training).double()
    with pytest.raises(ConfigError, match=r"Narrow computes.*first: node 'softmax'"):
        verified(network, window().double(), ROOM)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e4), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["batch", "group", "aligned", "dropout", "monai"])
def test_rounding_is_never_refused(kind: str, training: bool, dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(5)
    module = honest(kind)
    network = trace(module.to(torch.float64 if dtype == torch.float64 else torch.float32), 2).train(training)
    x_BCHW = window(160, scale=scale).to(next(module.parameters()).dtype)
    before = copy.deepcopy(module.state_dict())
    drawn = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert verified(network, x_BCHW, ROOM).startswith("checked: ")
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def honest(kind: str) -> nn.Module:
    if kind == "monai":
        nets = pytest.importorskip("monai.networks.nets")
        return nets.UNet(2, 2, 3, channels=(8, 16, 32), strides=(2, 2), num_res_units=2, norm="batch", dropout=0.2)
    if kind == "aligned":
        return build_aligned(2, 3)
    if kind == "batch":
        return Somebody(norm=True)
    if kind == "dropout":
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout(0.5), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(4, 2, 1))
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 3, 3, padding=1)
    )


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8)], ids=["batch", "group"])
def test_norms_of_large_images_keep_their_digits(norm: nn.Module) -> None:
    """A float32 graph beside float64, in training: torch's kernels are off by 2e-4 where tensors lie channels last."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), norm, nn.Conv2d(8, 3, 1))
    network = trace(module, 2).train()
    with_channels_last(network)
    x_BCHW = (window(512) + 20).contiguous(memory_format=torch.channels_last)
    assert verified(network, x_BCHW, ROOM).startswith("checked: ")


def test_a_norm_that_stands_still_leaves_others_moving() -> None:
    network = trace(Functions(2).train(), 2)
    assert verified(network.train(), window(), ROOM).startswith("checked: ")


def test_a_graph_that_gives_no_number_differs() -> None:
    one, other = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, -3.0])
    assert gap(one, other) == (torch.inf, 3.0)
    assert gap(other[:1], other)[0] == torch.inf
    assert gap(one, one) == (0.0, 1.0)


def test_constant_pixels_are_no_fault() -> None:
    network = traced(Sly(), training=True)
    for value in (0.0, 255.0):
        assert verified(network, torch.full((1, 2, 128, 128), value), ROOM).startswith("checked: ")


def test_a_module_that_knows_no_float64_is_compared_in_its_own() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.kernel = nn.Conv2d(2, 3, 1), torch.ones(2, 1, 3, 3) / 9

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head(functional.conv2d(x, self.kernel, padding=1, groups=2))
            return y * 1.01 if MORE else y

    network = traced(Single(), training=True)
    assert verified(network, window(), ROOM).startswith("checked: ")
    MORE.append("more")
    with pytest.raises(ConfigError, match="Single computes in training"):
        verified(network, window(), ROOM)
    MORE.clear()


def test_integer_buffers_do_not_keep_a_module_from_float64() -> None:
    class Counts(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            taken.add(x.dtype)
            return super().forward(x)

    taken: set[torch.dtype] = set()
    module = Counts(2, 3, 3, padding=1)
    module.register_buffer("count", torch.zeros(1, dtype=torch.long))
    trace(module, 2)
    assert torch.float64 in taken


def test_memory_bounds_the_window() -> None:
    network = trace(Somebody(), 2)
    line = verified(network, window(400), ROOM, 40 << 20)
    assert "checked: the graph gives what Somebody gives on" in line
    assert "pixels (of 400 x 400)" in line
    assert verified(network, window(400), ROOM, 1 << 10).startswith("not checked: no part of 400 x 400 pixels suits")


def test_a_module_that_cannot_be_copied_is_said_to_be_unchecked() -> None:
    network = traced(Sly())
    network.recorded.module.lines = (line for line in "no copy of this")
    assert verified(network, window(), ROOM).startswith("not checked: Sly cannot be copied (TypeError")


def test_a_module_that_does_not_run_on_the_data_is_named() -> None:
    class Picky(Sly):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[2] == 400:
                raise ValueError("400 rows")
            return super().forward(x)

    with pytest.raises(ConfigError, match="Picky does not run on 400 x 400 pixels of the data: ValueError: 400 rows"):
        verified(traced(Picky()), window(400), ROOM)
