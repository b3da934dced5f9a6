"""The messages and bytes that the ranks of one image send each other in one step, forward and backward.

The counts are those of `spatial.halo_exchange`. Each part that a rank sends or keeps along rows, with each along
columns, is a message of as many pixels x channels, but for the part that it keeps along both. The backward pass is the
adjoint: a rank sends back as much as it has received. A tensor before which no layer has weights needs no gradient, so
its exchange has no backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.geometry.sharing.decomposition import Decomposition
from tiledseg.planning.step.rank_steps import InputStep, Swap, swaps
from tiledseg.units import DOUBLE_BYTES, wide_bytes


@dataclass(frozen=True)
class SentBytes:
    """Messages and bytes."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(self.messages + other.messages, self.bytes + other.bytes)

    def __mul__(self, times: int) -> SentBytes:
        return SentBytes(self.messages * times, self.bytes * times)


@dataclass(frozen=True)
class Traffic:
    """Messages of one rank, or of all together, in the forward and in the backward pass of one image."""

    forward: SentBytes = SentBytes()
    backward: SentBytes = SentBytes()

    @property
    def step(self) -> SentBytes:
        """Both passes: the messages of training. Validation and prediction send `forward` alone."""
        return self.forward + self.backward

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.forward * times, self.backward * times)


def given_back_in_place(graph: Graph, k: int, row: InputStep, col: InputStep) -> bool:
    """Return True if the gradient of the block that goes into an exchange before node `k` is a part of the window's."""
    stays = row.source == row.swap.kept and col.source == col.swap.kept
    whole = (row.read, col.read) == (row.window, col.window)
    return graph.layers[k].owns_gradient and (row.moves or col.moves) and stays and whole


def sent(row: Swap, col: Swap) -> list[int]:
    """Return the pixels of each piece that a rank sends in an exchange: of all pieces but the first, which it keeps."""
    rows, cols = (row.kept, *row.sent), (col.kept, *col.sent)
    return [height * width for height, width in list(product(rows, cols))[1:] if height * width]


def received(row: Swap, col: Swap) -> list[int]:
    """Return those of each piece that it receives: its adjoint sends them back."""
    return sent(row._replace(sent=row.received), col._replace(sent=col.received))


def input_traffic(
    decomposition: Decomposition, bands: int, value_bytes: int
) -> Iterator[tuple[tuple[int, int], SentBytes]]:
    """Yield the messages of the rank at each (row, col) in the one exchange of mode `exchange`. It has no backward
    pass."""
    row_windows, col_windows = decomposition.context_windows()
    rows, cols = swaps(decomposition.rows, row_windows), swaps(decomposition.cols, col_windows)
    for (i, row), (j, col) in product(enumerate(rows), enumerate(cols)):
        pieces = sent(row, col)
        yield (i, j), SentBytes(len(pieces), sum(pieces) * bands * wide_bytes(value_bytes))


def statistic_sums(graph: Graph, bands: int, ranks: int) -> Traffic:
    """Return the all-reduces of statistics in one step of layer mode: calls, and bytes a rank, in float64.

    Each rank gives count, means and variances of a norm, in a slot of its own. Backward it gives the gradients of the
    mean and of the deviation, which are summed (`models.normalise`). Other layers say how many values they give.
    """
    channels, traffic = tensor_channels(graph, bands), Traffic()
    for layer, sources in zip(graph.layers, graph.sources, strict=True):
        if layer.statistics and ranks > 1:
            forward, backward = layer.shared_values(channels[sources[0]], ranks)
            traffic += Traffic(SentBytes(1, forward * DOUBLE_BYTES), SentBytes(1, backward * DOUBLE_BYTES))
    return traffic
