"""The messages and bytes that the ranks of one image send each other in one step, forward and backward.

The counts are those of `spatial.halo_exchange`. Each part that a rank sends or keeps along rows, with each along
columns, is a message of as many pixels x channels, but for the part that it keeps along both. The backward pass is the
adjoint: a rank sends back as much as it has received. A tensor before which no layer has weights needs no gradient, so
its exchange has no backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.geometry.sharing.decomposition import Decomposition
from tiledseg.planning.step.rank_steps import InputStep, RankSteps, Swap, swaps
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


@dataclass(frozen=True)
class TensorAt:
    """A tensor whose halos may travel: channels, bytes of a value, and whether its gradient travels back."""

    channels: int
    value_bytes: int
    has_gradient: bool

    @property
    def pixel_bytes(self) -> int:
        return self.channels * self.value_bytes


@lru_cache(maxsize=64)
def tensors_of(graph: Graph, bands: int, value_bytes: int = 4) -> tuple[TensorAt, ...]:
    """Return each tensor of a graph.

    With 2-byte values (bf16 autocast) the network's input and the outputs of a pixel or group norm have 4 (`widths`).
    """
    channels, wants = tensor_channels(graph, bands), graph.wants_gradient

    def step(k: int, given: list[TensorAt]) -> TensorAt:
        return TensorAt(channels[k + 1], graph.layers[k].output_width(given[0].value_bytes, value_bytes), wants[k + 1])

    return tuple(graph.fold(input_tensor(bands, value_bytes), step))


def input_tensor(bands: int, value_bytes: int) -> TensorAt:
    """Return the network's input."""
    return TensorAt(bands, wide_bytes(value_bytes), False)


def layer_traffic(graph: Graph, row: RankSteps, col: RankSteps, tensors: Sequence[TensorAt]) -> Traffic:
    """Return the messages of one rank of layer mode, from its steps along rows and along columns."""
    traffic = Traffic()
    for _, r, c, tensor in inputs_by_node(graph, row, col, tensors):
        out, back = sent(r.swap, c.swap), received(r.swap, c.swap)
        if r.exchanged or c.exchanged:
            forward = SentBytes(len(out), sum(out) * tensor.pixel_bytes)
            backward = SentBytes(len(back), sum(back) * tensor.pixel_bytes) * tensor.has_gradient
            traffic += Traffic(forward, backward)
    return traffic


def inputs_by_node(
    graph: Graph, row: RankSteps, col: RankSteps, tensors: Sequence[TensorAt]
) -> Iterator[tuple[int, InputStep, InputStep, TensorAt]]:
    """Yield each input of each node of a rank: the node's number, the steps along rows and columns, and the tensor."""
    for k, (sources, r, c) in enumerate(zip(graph.sources, row, col, strict=True)):
        for source, of_row, of_col in zip(sources, r.inputs, c.inputs, strict=True):
            yield k, of_row, of_col, tensors[source]


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
        yield (i, j), SentBytes(len(pieces), sum(pieces) * input_tensor(bands, value_bytes).pixel_bytes)


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


def strip_bytes(graph: Graph, bands: int, row: RankSteps, col: RankSteps, value_bytes: int) -> int:
    """Return the bytes of all strips of a step, one for each message: no more are alive at once."""
    return sum(
        (sum(sent(r.swap, c.swap)) + sum(received(r.swap, c.swap))) * (1 + tensor.has_gradient) * tensor.pixel_bytes
        for _, r, c, tensor in inputs_by_node(graph, row, col, tensors_of(graph, bands, value_bytes))
    )
