"""What tracing has to refuse: one line that names the module's path, the source line, a reason that is true, a remedy.

Each is written as people write it, and would come out otherwise on tiles, at another size, or in training.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.tracing.networks import Outer
from tests.tracing.styles import Parsing
from tiledseg.errors import ConfigError
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.tracing.trace import trace

Function = Callable[[torch.Tensor], torch.Tensor]


class Written(nn.Module):
    """A convolution, and what its author writes after it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x))


class Told(nn.Module):
    """A transposed convolution that is told the size of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.ConvTranspose2d(4, 4, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(functional.avg_pool2d(x, 2), output_size=x.shape[2:])


def _shifted(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :, 1:] = x[:, :, :-1]
    return y


def _weights(tokens: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return tokens.transpose(1, 2) @ keys


def _positioned(x: torch.Tensor) -> torch.Tensor:
    tokens = functional.avg_pool2d(x, 8).flatten(2)
    weights = _weights(tokens, tokens)
    weights = (weights + torch.ones(1, 1, dtype=x.dtype)).softmax(-1)
    return (weights @ tokens.transpose(1, 2)).transpose(1, 2).unflatten(2, (x.shape[2] // 8, -1))


def _sharpened(x: torch.Tensor) -> torch.Tensor:
    coarse = functional.avg_pool2d(x, 8)
    tokens = coarse.flatten(2)
    weights = _weights(tokens, tokens).softmax(-1).square()
    return (weights @ tokens.transpose(1, 2)).transpose(1, 2).view_as(coarse)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(2).transpose(1, 2).relu()
    return (tokens @ tokens.sum(1).unsqueeze(-1)).transpose(1, 2).view_as(x[:, :1])


def _few_keys(x: torch.Tensor) -> torch.Tensor:
    coarse = functional.avg_pool2d(x, 8)
    keys = functional.adaptive_avg_pool2d(x, 7).flatten(2)
    weights = _weights(coarse.flatten(2), keys).softmax(-1)
    return (weights @ keys.transpose(1, 2)).transpose(1, 2).view_as(coarse)


def _over_few(x: torch.Tensor, change: Function) -> torch.Tensor:
    """Attention over means of 8 x 8 pixels, by weights that are changed after softmax."""
    coarse = functional.avg_pool2d(x, 8)
    tokens = coarse.flatten(2).transpose(1, 2)
    weights = change((tokens @ tokens.transpose(1, 2)).softmax(-1))
    return (weights @ tokens).transpose(1, 2).view_as(coarse)


ATTENTION_64 = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)


def _with_weights(x: torch.Tensor, use: Function, **how: bool) -> torch.Tensor:
    """Attention by torch's module over means of 8 x 8 pixels, and what is made of its weights."""
    coarse = functional.avg_pool2d(x, 8)
    tokens = coarse.flatten(2).transpose(1, 2)
    y, weights = ATTENTION_64(tokens, tokens, tokens, **how)
    assert weights.shape == (len(x), *(() if how.get("average_attn_weights", True) else (2,)), *[tokens.shape[1]] * 2)
    return use(weights) * y.transpose(1, 2).reshape(coarse.shape)


def _returned(x: torch.Tensor) -> torch.Tensor:
    tokens = functional.avg_pool2d(x, 8).flatten(2).transpose(1, 2)
    return ATTENTION_64(tokens, tokens, tokens)[1]


def _windows(x: torch.Tensor) -> torch.Tensor:
    batch, channels, height, width = x.shape
    return functional.scaled_dot_product_attention(*[x.view(batch, channels, height, width)] * 3)


def _places(x: torch.Tensor) -> torch.Tensor:
    return functional.grid_sample(x, torch.tanh(x[:, :2]).permute(0, 2, 3, 1), align_corners=False)


TABLE = nn.Parameter(torch.rand(1, 4, 8, 12, dtype=torch.float64))


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[2], dtype=x.dtype)[:, None]


def _written_rows(x: torch.Tensor) -> torch.Tensor:
    rows = _rows(x)
    rows[1:] *= 2
    return x + rows


def _only_places(x: torch.Tensor) -> torch.Tensor:
    return x + functional.adaptive_max_pool2d(x, 1, return_indices=True)[1]


REFUSED: dict[str, tuple[Function, str]] = {
    "a part that is written": (_shifted, "writes into a part of a tensor"),
    "attention, fused, of rows": (_windows, "of all pixels"),
    "attention, of positions": (_positioned, "joins weights of attention with a tensor"),
    "attention, weights used otherwise": (_sharpened, "does with weights of attention what no tile can"),
    "attention, linear, of sums": (_normalised, "are no matrix of channels"),
    "attention, keys of a size": (_few_keys, "no whole number of times smaller"),
    "places that are computed": (_places, "reads pixels at places that are computed"),
    "positions by the larger side": (lambda x: x + _rows(x) / max(x.shape), "numbers that depend on the size"),
    "positions by a far size": (
        lambda x: x + _rows(x) * (2 if x.shape[2] > 3_000 else 1),
        "computes positions otherwise",
    ),
    "positions, written over": (_written_rows, "numbers that depend on the size"),
    "positions of NumPy": (lambda x: x + torch.from_numpy(np.arange(x.shape[3])), "numbers that depend on the size"),
    "a number of pixels": (lambda x: x / torch.tensor(x.shape[2] * x.shape[3]), "numbers that depend on the size"),
    "a table, resized": (lambda x: x + functional.interpolate(TABLE, x.shape[2:]), "numbers that depend on the size"),
    "weights of attention, summed": (
        lambda x: _over_few(x, lambda w: w / w.sum(-1, keepdim=True)),
        "scale them before",
    ),
    "einsum": (lambda x: torch.einsum("bchw,dchw->bchw", x, x), "mix channels by linear"),
    "weights of attention, scaled late": (lambda x: _over_few(x, lambda w: w / 2), "scale them before softmax"),
    "weights of torch's module, largest": (
        lambda x: _with_weights(x, torch.amax),
        "does with weights of attention what no tile can",
    ),
    "weights of torch's module, by heads": (
        lambda x: _with_weights(x, torch.amax, average_attn_weights=False),
        "does with weights of attention what no tile can",
    ),
    "weights of torch's module, returned": (
        _returned,
        "the module returns places of maxima, or weights of attention",
    ),
    "median of pixels": (lambda x: x - x.flatten(2).median(2)[0][..., None, None], "median over the whole image"),
    "round the batch": (lambda x: torch.roll(x, 1, 0), "works along pixels or images"),
    "places along rows": (lambda x: x.gather(2, x.argsort(2)), "along pixels"),
    "what comes of a refused call": (lambda x: torch.fft.rfft2(x).real, "(fft_rfft2, "),
    "round the end": (lambda x: x.roll(1, dims=2), "round the image's end"),
    "neighbours as one dim": (
        lambda x: functional.unfold(x, 3, padding=1).mean(1),
        "puts the neighbours of a pixel into one dim",
    ),
    "a mean of more pixels": (
        lambda x: functional.avg_pool2d(x, 2) * x.mean((2, 3), keepdim=True),
        "a tensor of other pixels",
    ),
    "rows by their means": (lambda x: x * x.mean(3, keepdim=True), "work along channels"),
    "places of maxima": (_only_places, "take the maxima alone"),
    "one number": (lambda x: x - x.mean(), "reduces all dims, images too"),
    "deviation": (lambda x: x / x.std((2, 3), keepdim=True), "takes the std over the whole image"),
    "the length of a mean": (lambda x: x * x.mean((2, 3), True).norm(dim=(2, 3), keepdim=True), "works along pixels"),
    "means of means": (lambda x: functional.adaptive_avg_pool2d(x, 4), "height, width) of all pixels"),
    "maxima of parts": (lambda x: functional.adaptive_max_pool2d(x, 2), "2 x 2 maxima of the whole image"),
    "parts, nearest": (
        lambda x: functional.interpolate(functional.adaptive_avg_pool2d(x, 2), x.shape[2:]),
        "take bilinear",
    ),
    "one line": (lambda x: functional.conv1d(x.flatten(2), x.new_ones(4, 4, 3), padding=1).view_as(x), "use conv2d"),
    "to a multiple": (lambda x: functional.pad(x, (0, -x.shape[3] % 36)), "pad by fixed numbers"),
    "round the border": (lambda x: functional.pad(x, (1, 1, 1, 1), mode="circular"), "the image's other end"),
    "no gradients": (lambda x: torch.no_grad()(torch.relu)(x), "switches gradients on or off"),
    "a part that is run again": (lambda x: checkpoint(torch.relu, x, use_reentrant=True), "torch.utils.checkpoint"),
    "every second pixel": (lambda x: x[:, :, ::2, ::2], "not as much from each end at every size"),
    "a size that is told": (Told(), "give the rest, such as output_padding, to its constructor"),
    "dropout always": (functional.dropout, "pass training=self.training"),
    "noise": (lambda x: x + 0.1 * torch.randn(1), "draws numbers in evaluation too"),
    "noise, written": (lambda x: x + torch.empty(4, 1, 1, dtype=x.dtype).normal_(), "draws numbers in evaluation too"),
    "noise of Python": (lambda x: x * random.random(), "random numbers"),
    "places of truths": (lambda x: torch.where(x > 0)[0], "reads"),
    "counted truths": (lambda x: x / (x > 0).sum((2, 3), keepdim=True), "convert them before, as by .to(x.dtype)"),
    "weights of the input": (
        lambda x: functional.group_norm(x, 2, x.mean((0, 2, 3))),
        "of which a tile has a part only",
    ),
    "rows again": (lambda x: x.repeat(1, 1, 2, 1), "repeats pixels beside the image"),
    "four times as many": (lambda x: x.repeat(1, 2, 2, 1), "repeat one channel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_says_where_and_why(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        trace(Written(function).double().eval(), 3)
    message = str(error.value)
    assert reason in message
    assert "\n" not in message
    if "returns" not in message and "random numbers" not in message:
        assert "test_refused.py:" in message, "it names the line"


@pytest.mark.parametrize(("draw", "whose"), [(random.random, "Python"), (np.random.random_sample, "NumPy")])
def test_a_layer_that_is_dropped_by_a_draw_does_not_train(draw: Callable[[], float], whose: str) -> None:
    """However seldom: the runs that were tried need not have dropped it. The generator stays where it was."""

    class Seldom(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training and draw() < 1e-9 else super().forward(x)

    module, states = nn.Sequential(Seldom(3, 3, 1), nn.ReLU()).train(), (random.getstate(), np.random.get_state()[2])
    with pytest.raises(ConfigError, match=f"does not do in training what it does in evaluation: it draws {whose}'s"):
        trace(module, 3)
    assert (random.getstate(), np.random.get_state()[2]) == states
    trace(module.eval(), 3)


def test_batch_norm_on_means_of_an_image_maps_and_does_not_train() -> None:
    """torch trains it on batches alone, whose images a step of ours may spread over ranks."""
    module = Outer(Parsing(8, nn.BatchNorm2d)).double()
    with pytest.raises(ConfigError, match="learns from a few means an image"):
        trace(module.train(), 3)
    network = trace(module.eval(), 3)
    x_BCHW = torch.randn(1, 3, 40, 56, dtype=torch.float64)
    torch.testing.assert_close(network(x_BCHW), module(x_BCHW), rtol=1e-12, atol=1e-12)
    with pytest.raises(ConfigError, match="map with it"):
        network.train()


def test_batch_norm_on_means_of_an_image_trains_by_constants() -> None:
    """As the module does whose batch norms are evaluated: outputs and gradients; no statistics move."""
    module = Outer(Parsing(8, nn.BatchNorm2d)).double()
    x_BCHW = torch.randn(2, 3, 40, 56, dtype=torch.float64)
    for _ in range(2):
        module.train()(x_BCHW)  # its statistics are not those of the beginning
    network = trace(module.train(), 3, still=True).hold_statistics().train()
    expected = copy.deepcopy(module).train()
    for part in expected.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    for each in (network, expected):
        each.zero_grad()
        each(x_BCHW).square().mean().backward()
    torch.testing.assert_close(network(x_BCHW), expected(x_BCHW), rtol=1e-12, atol=1e-12)
    found = dict(network.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-10, atol=1e-14)
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_torch_has_compiled_cannot_be_seen() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()))
    with pytest.raises(ConfigError, match=r"'1' is compiled by torch\.jit"):
        trace(nn.Sequential(nn.Identity(), scripted), 3)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2)


def _by_product(x: torch.Tensor) -> torch.Tensor:
    tokens = _tokens(x)
    return (torch.softmax(tokens @ tokens.transpose(1, 2), -1) @ tokens).transpose(1, 2).view_as(x)


def _checked_product(x: torch.Tensor) -> torch.Tensor:
    assert not x.isnan().any()
    return _by_product(x)


def _as_array(x: torch.Tensor) -> torch.Tensor:
    return _by_product(x * x.detach().numpy().max())


def _by_difference(x: torch.Tensor) -> torch.Tensor:
    rows = x[:, 0].flatten(1)
    return x * (-(rows[:, :, None] - rows[:, None]).abs()).exp().sum(2).view_as(x[:, :1])


ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True)
ATTENTIONS: dict[str, Function] = {
    "product": _by_product,
    "difference": _by_difference,
    "parts": lambda x: x * sum((part @ _tokens(x).transpose(1, 2)).mean() for part in _tokens(x).split(1024, 1)),
    "fused": lambda x: functional.scaled_dot_product_attention(*[_tokens(x)] * 3).transpose(1, 2).view_as(x),
    "values are read": _checked_product,
    "no shapes alone": _as_array,
    "module": lambda x: x + ATTENTION(*[_tokens(x)] * 3)[0].transpose(1, 2).view_as(x),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_over_pixels_is_refused_by_name_in_little_memory(name: str) -> None:
    """Refuse by runs without values: at 160 x 224 pixels each tensor of pairs would take 5 GB and more."""
    begun = time.thread_time()
    with (
        AllocationMeter([]) as meter,
        pytest.raises(ConfigError, match=r"every pixel see every other|the same at every size") as error,
    ):
        trace(Written(ATTENTIONS[name]).eval(), 3)
    assert "test_refused.py:" in str(error.value)
    assert "a size is fixed" not in str(error.value)
    assert meter.peak < 700 << 20
    assert time.thread_time() - begun < 20


def _twice(x: torch.Tensor) -> torch.Tensor:
    y = x.roll(1, dims=2)
    return y + x.roll(1, dims=2)


def test_like_places_are_one_line_from_the_package_on() -> None:
    said = r": \(1\) [^/]*, tests/tracing/test_refused.py:\d+\) moves [^/]*\(2 such places\)$"
    with pytest.raises(ConfigError, match=said):
        trace(Written(_twice).eval(), 3)


def test_a_fixed_size_is_said() -> None:
    with pytest.raises(ConfigError, match="if a size is fixed in it, build it for any, or run it by crops"):
        trace(Written(lambda x: x + TABLE).eval(), 3)
