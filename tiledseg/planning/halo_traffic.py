"""What the ranks of one image send each other in one step: messages and bytes, forward and backward, in whole numbers.

Rows travel first, then columns of what the rows have made, as `spatial.halo_exchange` sends them: a row message is
its positions x the columns at hand x channels, a column message its positions x the rows of the window, those filled
in at the image's border included, x channels. The backward pass is the adjoint: who has received sends as much back.
A tensor before which no layer has weights needs no gradient, so its exchange has no backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiledseg.geometry.decomposition import Decomposition
from tiledseg.geometry.layer import Convolution, Layer, Norm, PopConcatenate, Stash, TransposedConvolution
from tiledseg.planning.rank_steps import DimStep, RankSteps, swaps
from tiledseg.widths import norm_bytes, wide_bytes

WHOLE_IMAGE_NORMS = ("batch", "group", "instance")  # their statistics are summed over the ranks
STATISTIC_BYTES = 8  # float64


@dataclass(frozen=True)
class Sent:
    """Messages and bytes."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Sent:
        return Sent(self.messages * times, self.bytes * times)


@dataclass(frozen=True)
class Traffic:
    """What one rank, or all together, send in the forward and in the backward pass of one image."""

    forward: Sent = Sent()
    backward: Sent = Sent()

    @property
    def step(self) -> Sent:
        """Both passes: what training sends. Validation and prediction send `forward` alone."""
        return self.forward + self.backward

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.forward * times, self.backward * times)


@dataclass(frozen=True)
class TensorAt:
    """What travels before a layer: channels, bytes of a value, and whether its gradient travels back."""

    channels: int
    value_bytes: int
    has_gradient: bool

    @property
    def pixel_bytes(self) -> int:
        return self.channels * self.value_bytes


def tensors_before(layers: Sequence[Layer], bands: int, value_bytes: int = 4) -> tuple[TensorAt, ...]:
    """Before each layer the tensor whose halos travel there: its input, or the skip that it pops.

    With 2-byte values (bf16 autocast) the network's input and what a pixel or group norm makes have 4 (`widths`).
    """
    found, stashed = [], {}
    current = input_tensor(bands, value_bytes)
    for layer in layers:
        if isinstance(layer, Stash):
            stashed[layer.skip] = current
        found.append(stashed[layer.skip] if isinstance(layer, PopConcatenate) else current)
        has_gradient = current.has_gradient or layer.parameters(current.channels) > 0
        current = TensorAt(layer.output_channels(current.channels), _width(layer, current, value_bytes), has_gradient)
    return tuple(found)


def input_tensor(bands: int, value_bytes: int) -> TensorAt:
    """The network's input."""
    return TensorAt(bands, wide_bytes(value_bytes), False)


def _width(layer: Layer, tensor: TensorAt, value_bytes: int) -> int:
    match layer:
        case Convolution() | TransposedConvolution():
            return value_bytes
        case Norm(kind=kind) if kind != "none":
            return norm_bytes(kind, value_bytes)
    return tensor.value_bytes


def layer_traffic(row: RankSteps, col: RankSteps, tensors: Sequence[TensorAt]) -> Traffic:
    """What one rank of layer mode sends, from its steps along rows and along columns."""
    forward, backward = [0, 0], [0, 0]
    for r, c, tensor in zip(row, col, tensors, strict=True):
        if not (r.exchanged or c.exchanged):
            continue
        pixels_out, pixels_back = _pixels(r, c)
        forward[0] += r.swap.sends + c.swap.sends
        forward[1] += pixels_out * tensor.pixel_bytes
        if tensor.has_gradient:
            backward[0] += r.swap.receives + c.swap.receives
            backward[1] += pixels_back * tensor.pixel_bytes
    return Traffic(Sent(*forward), Sent(*backward))


def _pixels(row: DimStep, col: DimStep) -> tuple[int, int]:
    """Pixels that a rank sends in an exchange, and that it receives: its adjoint sends as many back."""
    return (
        row.swap.sent * col.source + col.swap.sent * row.window,
        row.swap.received * col.source + col.swap.received * row.window,
    )


def input_traffic(decomposition: Decomposition, bands: int, value_bytes: int) -> Iterator[tuple[tuple[int, int], Sent]]:
    """What the rank at each (row, col) sends in the one exchange of mode `exchange`. It has no backward pass."""
    row_windows, col_windows = decomposition.context_windows()
    rows, cols = swaps(decomposition.rows, row_windows), swaps(decomposition.cols, col_windows)
    for i, row in enumerate(rows):
        for j, col in enumerate(cols):
            pixels = row.sent * decomposition.cols.owned(j).size + col.sent * row_windows[i].size
            yield (i, j), Sent(row.sends + col.sends, pixels * input_tensor(bands, value_bytes).pixel_bytes)


def norm_reductions(layers: Sequence[Layer], bands: int, ranks: int) -> Traffic:
    """The all-reduces of statistics in one step of layer mode: calls, and bytes a rank, in float64.

    Forward each rank gives count, means and variances, in a slot of its own; backward the gradients of the mean and of
    the deviation, which are summed (`models.normalise`).
    """
    channels, calls, slots, sums = bands, 0, 0, 0
    for layer in layers:
        if isinstance(layer, Norm) and layer.kind in WHOLE_IMAGE_NORMS and ranks > 1:
            sets = layer.groups if layer.kind == "group" else channels
            calls, slots, sums = calls + 1, slots + ranks * (1 + 2 * sets), sums + 2 * sets
        channels = layer.output_channels(channels)
    return Traffic(Sent(calls, slots * STATISTIC_BYTES), Sent(calls, sums * STATISTIC_BYTES))
