"""What a stage of a pipeline costs: any run of a network's layers, priced for one micro-batch.

Bytes kept for the backward pass follow `cost`, but a run that starts in the middle gets its input over the wire: where
the layer in front had kept that tensor already, this rank has to keep it once more. A skip from another rank goes with
its concatenation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tiledseg.geometry.layer import Layer, PopConcatenate, Stash
from tiledseg.planning.backward_walk import backward_peak
from tiledseg.planning.cost import LayerCost, Tensor, keep_for_backward, loss_bytes
from tiledseg.planning.step_memory import ADAM_VALUES
from tiledseg.widths import DOUBLE_BYTES, copy_bytes, wide_bytes


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage, by purpose.

    `activations`: what is kept of one micro-batch from its forward to its backward pass; `inputs`: what is kept of one
    that is recomputed, all that it received; `backward`: what the backward pass needs on top at its worst moment, the
    gradients that it received with it.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    inputs: int
    backward: int

    def kept(self, complete: int, inputs_only: int = 0) -> int:
        """Of so many micro-batches with all their activations, and so many with their inputs only."""
        return complete * self.activations + inputs_only * self.inputs

    def total(self, complete: int, inputs_only: int = 0) -> int:
        """With so many micro-batches kept at once."""
        fixed = self.weights + self.gradients + self.optimizer
        return fixed + self.kept(complete, inputs_only) + self.backward


class StagePrices:
    """Prices of runs of layers (first, stop), half-open, on one micro-batch: a context of `costs`."""

    def __init__(self, layers: Sequence[Layer], costs: Sequence[LayerCost], bytes_per_value: int) -> None:
        self.layers, self.costs, self.bytes_per_value = layers, costs, bytes_per_value
        self.skips = skip_ends(layers)
        self._parameters = (0, *accumulate(c.parameters for c in costs))
        self._kept_from = functools.cache(self._walk)
        self._backward = functools.cache(self._find_backward)

    def memory(self, first: int, stop: int) -> StageMemory:
        """Bytes of a rank that holds the run; the loss belongs to the last layer."""
        parameters = self._parameters[stop] - self._parameters[first]
        width = wide_bytes(self.bytes_per_value)
        up_to = self._kept_from(first)[: stop - first + 1]
        received = self.received(first, stop)
        return StageMemory(
            weights=parameters * (width + copy_bytes(self.bytes_per_value)),
            gradients=parameters * DOUBLE_BYTES,
            optimizer=ADAM_VALUES * parameters * width,
            activations=up_to[-1] + self._loss(stop),
            inputs=received if first else self.costs[0].input_bytes,
            backward=self._backward(first, stop),
        )

    def _loss(self, stop: int) -> int:
        return loss_bytes(self.costs, self.bytes_per_value) if stop == len(self.layers) else 0

    def _find_backward(self, first: int, stop: int) -> int:
        up_to = self._kept_from(first)[: stop - first + 1]
        kept = [after - before for before, after in pairwise(up_to)]
        return backward_peak(self.layers, self.costs, kept, self.bytes_per_value, first)

    def activation_bytes(self, layer: int) -> int:
        """Bytes that go from the layer in front to `layer`."""
        return self.costs[layer].input_bytes

    def skip_bytes(self, name: str) -> int:
        """Bytes of a skip, uncropped: its consumer crops it."""
        return next(self.costs[stash].output_bytes for skip, stash, _ in self.skips if skip == name)

    def received(self, first: int, stop: int) -> int:
        """Bytes that the run receives in a forward pass: its input, and each skip that it pops of another stage."""
        popped = {skip for skip, stash, pop in self.skips if stash < first <= pop < stop}
        return (self.activation_bytes(first) if first else 0) + sum(self.skip_bytes(skip) for skip in popped)

    def handed_on(self, first: int, stop: int) -> int:
        """The same without the skips, where these stay on their rank (folded)."""
        return self.activation_bytes(first) if first else 0

    def _walk(self, first: int) -> tuple[int, ...]:
        """Bytes kept by the first n layers of a run that starts at `first`, for each n."""
        source = self.costs[first].input_bytes
        width = self.bytes_per_value
        if first:
            width = source // math.prod(self.costs[first - 1].shape)
        tensor = Tensor(source // width, value_bytes=width)
        kept = [0]
        for layer, cost in zip(self.layers[first:], self.costs[first:], strict=True):
            more, tensor = keep_for_backward(layer, tensor, cost.shape, self.bytes_per_value)
            kept.append(kept[-1] + more)
        return tuple(kept)


def skip_ends(layers: Sequence[Layer]) -> tuple[tuple[str, int, int], ...]:
    """Each skip's name, the index of the layer that stashes it, and of one that pops it; a line for each that pops."""
    stashed = {layer.skip: index for index, layer in enumerate(layers) if isinstance(layer, Stash)}
    return tuple(
        (layer.skip, stashed[layer.skip], index)
        for index, layer in enumerate(layers)
        if isinstance(layer, PopConcatenate)
    )
