"""The memory of one training step of one rank in layer mode: its block of every tensor, walked as `step_memory` does.

What differs from a context of the same size: an exchange makes a new tensor, block and halo, which the convolution
behind it keeps, while the activation before it keeps its own output; padding at the image's border makes one too. Each
place of an exchange holds its strips, the parts that do not lie in one piece in memory, from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiledseg.geometry.layer import Dropout, Layer, Norm, PopConcatenate, Stash
from tiledseg.planning.backward_walk import Moved
from tiledseg.planning.cost import LayerCost, Tensor, keep, keep_for_backward, statistics_bytes
from tiledseg.planning.halo_traffic import WHOLE_IMAGE_NORMS, TensorAt, tensors_before
from tiledseg.planning.rank_steps import DimStep, RankSteps
from tiledseg.planning.step_memory import StepMemory, walked_memory
from tiledseg.widths import SINGLE_BYTES, copy_bytes, norm_bytes, norm_work_bytes


def block_memory(
    layers: Sequence[Layer], bands: int, row: RankSteps, col: RankSteps, ranks: int, value_bytes: int
) -> StepMemory:
    """Bytes of one training step of the rank with these steps, one of `ranks` that share the image.

    Without its strips and the block that it was given.
    """
    walk = _Walk(value_bytes, ranks, Tensor(bands * row[0].held * col[0].held, value_bytes=value_bytes), bands)
    for layer, r, c in zip(layers, row, col, strict=True):
        walk.step(layer, r, c)
    return walked_memory(walk.layers, walk.costs, value_bytes)


def strip_bytes(
    layers: Sequence[Layer], bands: int, row: RankSteps, col: RankSteps, value_bytes: int, training: bool = True
) -> int:
    """Bytes of the strips that a rank's exchanges hold between steps; fewer where a whole narrow block is sent."""
    tensors = tensors_before(layers, bands, value_bytes)
    return sum(_strip_pixels(r, c, t, training) * t.pixel_bytes for r, c, t in zip(row, col, tensors, strict=True))


def _strip_pixels(row: DimStep, col: DimStep, tensor: TensorAt, training: bool) -> int:
    """Tensors lie channels last: whole rows travel as they lie, columns and all that is added to others do not."""
    rows_sent, rows_received = row.swap.sent * col.source, row.swap.received * col.source
    cols_sent, cols_received = col.swap.sent * row.window, col.swap.received * row.window
    # Rows that arrive in the middle of a wider window do not lie in one piece, but for a single row.
    scattered = col.exchanged and col.window > col.source and row.swap.received > row.swap.receives
    forward = cols_sent + cols_received + rows_received * scattered
    if row.held == row.source and col.held != col.source:
        forward += rows_sent
    backward = rows_sent + cols_sent + cols_received
    return forward + backward * (training and tensor.has_gradient)


@dataclass
class _Walk:
    """The layers and what is done between them, with the cost of each."""

    value_bytes: int
    ranks: int
    tensor: Tensor
    channels: int
    layers: list[Layer] = field(default_factory=list)
    costs: list[LayerCost] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)  # channels

    def step(self, layer: Layer, row: DimStep, col: DimStep) -> None:
        if isinstance(layer, PopConcatenate):
            self._join(layer, row, col)
            return
        self._bring(layer.name, row, col)
        shape = layer.output_channels(self.channels), row.computed, col.computed
        before = self.channels * row.read * col.read * self.tensor.value_bytes
        kept, described = 0, layer
        if isinstance(layer, Norm) and layer.kind in WHOLE_IMAGE_NORMS and self.ranks > 1:
            kept = keep(self.tensor) + statistics_bytes(layer, shape, self.value_bytes)
            described = Moved(layer.name, self._norm_gradient(before, shape))
            width = norm_bytes(layer.kind, self.value_bytes)
            self.tensor = Tensor(self.channels * row.computed * col.computed, value_bytes=width)
        elif not _is_nothing(layer):
            kept, self.tensor = keep_for_backward(layer, self.tensor, shape, self.value_bytes)
        work = layer.multiply_adds(self.channels) * row.computed * col.computed
        self._add(described, shape, before, kept, layer.parameters(self.channels), work)
        self.channels = shape[0]
        self._cut(layer.name, (row.computed, col.computed), (row.given, col.given))
        if isinstance(layer, Stash):
            self.skips[layer.skip] = self.channels

    def _norm_gradient(self, size: int, shape: tuple[int, int, int]) -> int:
        """What the backward pass of a norm over all ranks allocates: its input's gradient; of narrow values that and
        a factor in float32, before it is cast."""
        values = size // self.tensor.value_bytes
        narrow = copy_bytes(self.tensor.value_bytes) > 0
        return max(2 * SINGLE_BYTES * values if narrow else size, norm_work_bytes(*shape))

    def _bring(self, name: str, row: DimStep, col: DimStep) -> None:
        """From what the rank holds to what the layer reads."""
        self._cut(name, (row.held, col.held), (row.source, col.source))
        if row.moves or col.moves:
            bands = self.channels * self.tensor.value_bytes
            by_cols = bands * row.window * col.source * col.exchanged
            by_rows = bands * row.source * col.source * row.exchanged
            self._move(f"{name}: exchange", (row.source, col.source), (row.window, col.window), by_cols + by_rows)
        if (row.read, col.read) != (row.window, col.window):
            self._move(f"{name}: padding", (row.window, col.window), (row.read, col.read))

    def _cut(self, name: str, before: tuple[int, int], after: tuple[int, int]) -> None:
        """A view: the tensor stays whole in memory. Its gradient is put back along columns first, then along rows."""
        if before == after:
            return
        values = self.channels * self.tensor.value_bytes
        gradients = [after[0] * before[1] * (before[1] != after[1]), before[0] * before[1] * (before[0] != after[0])]
        self._moved(f"{name}: cut", before, after, values * sum(gradients))

    def _move(self, name: str, before: tuple[int, int], after: tuple[int, int], gradients: int | None = None) -> None:
        """A new tensor of another size."""
        self._moved(name, before, after, gradients)
        self.tensor = Tensor(self.channels * after[0] * after[1], value_bytes=self.tensor.value_bytes)

    def _moved(self, name: str, before: tuple[int, int], after: tuple[int, int], gradients: int | None) -> None:
        size = self.channels * before[0] * before[1] * self.tensor.value_bytes
        self._add(Moved(name, size if gradients is None else gradients), (self.channels, *after), size, 0)

    def _join(self, layer: PopConcatenate, row: DimStep, col: DimStep) -> None:
        """The skip, cut or completed, before the tensor at hand."""
        given = row.given, col.given
        self._cut(layer.name, (row.joined, col.joined), given)
        skip_channels = self.skips[layer.skip]
        changed = (row.held, col.held) != given or row.moves or col.moves
        self.channels += skip_channels
        before = self.tensor.bytes
        self.tensor = Tensor(self.channels * given[0] * given[1], value_bytes=self.value_bytes)
        pop = PopConcatenate(layer.name, layer.skip, skip_channels, 1 if changed else 0)
        self._add(pop, (self.channels, *given), before, 0)

    def _add(
        self, layer: Layer, shape: tuple[int, int, int], before: int, kept: int, parameters: int = 0, work: int = 0
    ) -> None:
        after = shape[0] * shape[1] * shape[2] * self.tensor.value_bytes
        self.layers.append(layer)
        self.costs.append(LayerCost(layer.name, type(layer).__name__, shape, parameters, work, before, after, kept))


def _is_nothing(layer: Layer) -> bool:
    """Whether a layer hands its tensor on as it is."""
    match layer:
        case Norm(kind=kind):
            return kind == "none"
        case Dropout(probability=p):
            return p == 0
    return isinstance(layer, Stash)
