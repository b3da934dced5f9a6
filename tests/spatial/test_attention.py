"""Attention over the image on ranks against torch's on the whole image: y, dx, dW; float64 to 1e-12, float32 once."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from tests.spatial.drawn import image, with_weights
from tests.spatial.thread_ranks import ThreadCommunicator, on_ranks
from tests.spatial.twins import check_on_ranks, forward, refusal
from tiledseg.comm.mesh import Axes
from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.joins import ImageAttention, ImageProducts
from tiledseg.geometry.shapes import scales, total_stride
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.models.layers import attention
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.walk.mode_cost import statistic_sums


def attending(heads: int, ratio: tuple[int, int]) -> GraphNetwork:
    """Return a network of a convolution, attention with keys and values `ratio` times smaller, a sum, a convolution."""
    rows, cols = (ImageAttention(heads, each, 0.2) for each in ratio)

    def conv(channels: int, kernel: int, stride: int = 1, padding: int = 0) -> Convolution:
        return Convolution(channels, kernel, stride, padding, 1, True)

    smaller = (conv(6, ratio[0], ratio[0]), conv(6, ratio[1], ratio[1]))
    nodes = (
        Node("first", conv(6, 3, 1, 1)),
        Node("queries", conv(4 * heads, 1)),
        Node("smaller", smaller[0], ("first",), cols=smaller[1]),
        Node("key", conv(4 * heads, 1)),
        Node("value", conv(3 * heads, 1), ("smaller",)),
        Node("attention", rows, ("queries", "key", "value"), cols=cols),
        Node("last", conv(2, 3, 1, 1)),
    )
    modules = [
        nn.Conv2d(2, 6, 3, padding=1),
        nn.Conv2d(6, 4 * heads, 1),
        nn.Conv2d(6, 6, ratio, ratio),
        nn.Conv2d(6, 4 * heads, 1),
        nn.Conv2d(6, 3 * heads, 1),
        attention.AttentionOverImage(rows, cols),
        nn.Conv2d(3 * heads, 2, 3, padding=1),
    ]
    return with_weights(GraphNetwork(Graph(nodes), 2, modules), 3)


def of_products(heads: int) -> GraphNetwork:
    """Return a network of a convolution, sums of products over the image, and a convolution of these."""
    layer = ImageProducts(heads=heads, out_channels=12 * heads)
    nodes = (
        Node("first", Convolution(4 * heads, 3, 1, 1)),
        Node("second", Convolution(3 * heads, 3, 1, 1), (INPUT,)),
        Node("products", layer, ("first", "second")),
        Node("last", Convolution(2, 1, 1, 0)),
    )
    modules = [nn.Conv2d(2, 4 * heads, 3, padding=1), nn.Conv2d(2, 3 * heads, 3, padding=1)]
    modules += [attention.WholeImageProducts(layer), nn.Conv2d(12 * heads, 2, 1)]
    return with_weights(GraphNetwork(Graph(nodes), 2, modules), 3)


CASES = [
    (lambda: attending(1, (1, 1)), 1),
    (lambda: attending(2, (2, 2)), 1),
    (lambda: attending(3, (4, 2)), 2),
    (lambda: attending(2, (2, 2)), WHOLE),
    (lambda: of_products(1), 1),
    (lambda: of_products(2), WHOLE),
]


@pytest.mark.parametrize(("build", "fusion"), CASES)
def test_attention_and_products_over_ranks(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], GraphNetwork], fusion: int
) -> None:
    """By even and uneven blocks; weights are computed in several parts."""
    monkeypatch.setattr(attention, "WEIGHTS_AT_ONCE", 300)
    for dtype in (torch.float64, torch.float32):
        for rows, cols in ((1, 2), (2, 2), (3, 3)):
            height, width = 8 * rows + 4, 8 * cols
            x_BCHW = image((2, 2, height, width), 5).to(dtype)
            for cuts in (even(height, rows), even(width, cols)), (uneven(height, rows), uneven(width, cols)):
                assert check_on_ranks(build().to(dtype), x_BCHW, *cuts, fusion)


def even(size: int, parts: int) -> Partition:
    return Partition((*(8 * k for k in range(parts)), size))


def uneven(size: int, parts: int) -> Partition:
    return Partition((*(4 * k for k in range(parts)), size))


def test_queries_and_keys_cut_apart_are_refused() -> None:
    """A cut between two keys belongs to no rank."""
    cut = Partition((0, 3, 16)), Partition.even(16, 1)
    for fault in on_ranks(2, 1, lambda axes: refusal(attending(1, (4, 4)), axes, *cut)):
        assert fault is not None
        assert "not one place of the image" in fault


def test_the_output_lies_on_the_queries() -> None:
    network = attending(2, (4, 4))
    assert scales(network.graph)[-1] == Fraction(1)
    assert total_stride(network.graph) == 4


@pytest.mark.parametrize(("build", "passing"), [(lambda: attending(2, (2, 2)), 14), (lambda: of_products(2), None)])
def test_calls_and_bytes_are_those_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], GraphNetwork], passing: int | None
) -> None:
    """A rank holds keys and values of one other at a time: 1 / ranks of the `passing` bytes for each pixel."""
    rows, cols = 2, 2
    size, network = (8 * rows, 8 * cols), build().float()
    found: list[list[int]] = [[] for _ in range(rows * cols)]
    for name in ("broadcast", "all_reduce_sum"):
        original = getattr(ThreadCommunicator, name)

        def counted(self: ThreadCommunicator, tensor: torch.Tensor, *more: int, original: Any = original) -> Any:
            found[self.rank].append(tensor.nbytes)
            return original(self, tensor, *more)

        monkeypatch.setattr(ThreadCommunicator, name, counted)
    ahead, back = statistic_sums(network.graph, 2, rows * cols, size, 4)

    def work(axes: Axes) -> None:
        own, cuts = found[axes.image.rank], (even(size[0], rows), even(size[1], cols))
        run = forward(network, image((1, 2, *size), 5).float(), axes, *cuts)
        assert (len(own), sum(own)) == ahead
        assert max(own) == sum(own) // len(own)
        assert passing is None or max(own) == passing * size[0] * size[1] // (rows * cols)
        run.backward(torch.Size((1, 2, *size)))
        assert (len(own), sum(own)) == (ahead[0] + back[0], ahead[1] + back[1])

    on_ranks(rows, cols, work)
