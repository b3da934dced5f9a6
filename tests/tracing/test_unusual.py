"""What tracing takes although it is written in an unusual way: the graph gives what the module gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.tracing.test_refused import TABLE, Function, Written, _tokens
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.tracing.trace import trace


def _series(attend: Function) -> Function:
    """Attention of each pixel over two times, of two channels each."""

    def function(x: torch.Tensor) -> torch.Tensor:
        series = x.unflatten(1, (2, 2)).permute(0, 3, 4, 1, 2)
        made = attend(series.flatten(0, 2)).view(*series.shape[:3], 2, -1)
        return made.permute(0, 3, 4, 1, 2).flatten(1, 2)

    return function


def _turned(x: torch.Tensor) -> torch.Tensor:
    coarse = functional.avg_pool2d(x, 8)
    tokens = coarse.flatten(2)
    weights = (tokens.transpose(1, 2) @ tokens / 3).softmax(-1)
    return (tokens @ weights.transpose(1, 2)).view_as(coarse)


ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
MATRIX = torch.rand(3, 2, dtype=torch.float64)


def _of_half(x: torch.Tensor) -> torch.Tensor:
    half = functional.avg_pool2d(x, 2)
    return ATTENTION(*[_tokens(half)] * 3)[0].transpose(1, 2).reshape(half.shape)


def _mixed(matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Function:
    """Channels multiplied by a matrix of the image, by a product that is written in another way."""
    return lambda x: matmul((x.flatten(2) @ x.flatten(2).transpose(1, 2) / 1e3).softmax(-1), x.flatten(2)).view_as(x)


ODD: dict[str, Function] = {
    "a mean of fewer pixels": lambda x: x * functional.avg_pool2d(x, 2).mean((2, 3), keepdim=True),
    "windows that touch, rounded up": lambda x: functional.interpolate(
        functional.max_pool2d(x, 2, ceil_mode=True), size=x.size()[2:], mode="bilinear"
    ),
    "shrunk by four and by three": lambda x: torch.cat(
        [
            functional.interpolate(functional.interpolate(x, scale_factor=1 / 4, mode="bilinear"), scale_factor=4),
            functional.interpolate(
                functional.interpolate(x, scale_factor=(1, 1 / 2), mode="area"), scale_factor=(1, 2)
            ),
        ],
        1,
    ),
    "stacked single channels": lambda x: x * torch.stack([x[:, 0], x.mean(1)], dim=-3).amax(1, keepdim=True),
    "padded by hand, on one side": lambda x: functional.conv2d(
        functional.pad(x, (0, 1, 0, 1)), TABLE[0, :, None, :3, :3], stride=2, groups=4
    ),
    "the largest of channels": lambda x: x * x.max(dim=1, keepdim=True)[0].sigmoid() + x.max(dim=1)[0][:, None],
    "one channel again": lambda x: torch.cat([x, x[:, 1:2].expand_as(x)], 1),
    "a mean of fewer pixels, resized": lambda x: (
        x / (3 + functional.avg_pool2d(x, 2).mean((2, 3), keepdim=True).expand_as(x))
    ),
    "channels of split ones": lambda x: (
        functional.linear(x.unflatten(1, (2, 2)).permute(0, 3, 4, 1, 2), MATRIX).permute(0, 3, 4, 1, 2).flatten(1, 2)
    ),
    "of each time": lambda x: (MATRIX @ x.unflatten(1, (2, 2)).flatten(3)).unflatten(3, x.shape[2:]).flatten(1, 2),
    "attention over times": _series(lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x),
    "attention over times, bmm": _series(lambda x: torch.bmm(torch.bmm(x, x.transpose(1, 2)).softmax(-1), x)),
    "attention over times, fused": _series(lambda x: functional.scaled_dot_product_attention(x, x, x)),
    "turned weights": _turned,
    "attention at stride 2, with weights": _of_half,
    "a mean, as it is": lambda x: x * x.mean((2, 3), keepdim=True).amax((2, 3), keepdim=True).expand(-1, -1, -1, -1),
    "data of a weight": lambda x: x * TABLE.data[:, :, :1, :1],
    "channels again": lambda x: x.repeat(1, 2, 1, 1) + x.tile((1, 2, 1, 1)),
    "median of channels": lambda x: x.median(1, keepdim=True)[0] + x.kthvalue(2, 1, keepdim=True)[0],
    "words and places of arguments": lambda x: (
        torch.flip(x - x.var(1, False, True), dims=(1,)) + x.std(1, True)[:, None]
    ),
    "the largest channels": lambda x: x.topk(2, 1)[0] + x.topk(1, 1)[0],
    "channels that are moved": lambda x: torch.roll(x, (1, 2), (1, 1)) + x.index_select(1, torch.tensor([2, 0, 1, 3])),
    "channels by their order": lambda x: (
        x.gather(1, x.argsort(1)) - torch.take_along_dim(x, x.argsort(1), 1).diff(dim=1)[:, :1]
    ),
    "one channel by its number": lambda x: x * x.index_select(1, torch.tensor([2])),
    "names of NumPy": lambda x: x * x.mean(axis=(2, 3), keepdims=True),
    "nothing joined": lambda x: torch.cat([x, torch.empty(0)], axis=-3),
    "all by name": lambda x: torch.add(input=torch.relu(input=x), other=x, alpha=2),
    "matmul, other by name": _mixed(lambda a, b: torch.matmul(a, other=b)),
    "matmul by names": _mixed(lambda a, b: torch.matmul(input=a, other=b)),
    "bmm, mat2 by name": _mixed(lambda a, b: torch.bmm(a, mat2=b)),
    "bmm by names": _mixed(lambda a, b: torch.bmm(input=a, mat2=b)),
    "weights by name": lambda x: torch.matmul(TABLE[0, :, :4, 0], other=x.flatten(2)).view_as(x),
    "bmm by names, of each time": _series(
        lambda x: torch.bmm(torch.bmm(x, mat2=x.transpose(1, 2)).softmax(-1), mat2=x)
    ),
    "one channel, viewed": lambda x: functional.conv2d(x.mean(1, True).view(x[:, :1].shape), TABLE[0, :, None, :1, :1]),
    "the largest of split channels": lambda x: x * x.unflatten(1, (2, 2)).amax((1, 2), keepdim=True).squeeze(1),
    "less the mean of channels and pixels": lambda x: x - x.mean((1, 2, 3), keepdim=True),
    "cropped where channels are last": lambda x: x.permute(0, 2, 3, 1)[:, 1:-1, 1:-1].relu().permute(0, 3, 1, 2),
    "padded where channels are last": lambda x: functional.pad(x.movedim(1, 3), (0, 0, 2, 2, 1, 1)).movedim(3, 1),
    "a place that is chosen": lambda x: x.argmax(1, keepdim=True).to(x.dtype) * x,
}


@pytest.mark.parametrize("name", ODD)
def test_unusual_arguments_are_exact(name: str) -> None:
    module = Written(ODD[name]).double().eval()
    x_BCHW = torch.randn(1, 3, 40, 56, dtype=torch.float64)
    network, y_BCHW = trace(module, 3), module(x_BCHW)
    torch.testing.assert_close(network(x_BCHW), y_BCHW, rtol=1e-12, atol=1e-12)
    assert tensor_shapes(network.graph, 3, 40, 56)[network.graph.results[0]] == tuple(y_BCHW.shape[1:])
