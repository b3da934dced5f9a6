"""What the backward pass needs on top of all that is kept for it: gradients on their way, walked layer by layer.

Of a whole network, or of a stage of a pipeline, a run of its layers. Checked against PyTorch's allocations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiledseg.geometry.layer import Activation, Dropout, Layer, Norm, PopConcatenate, Stash
from tiledseg.planning.cost import INDEX_BYTES, LayerCost, loss_bytes
from tiledseg.widths import norm_work_bytes, wide_bytes

VIEWING_NORMS = ("pixel",)  # they compute in another layout and return a view


@dataclass(frozen=True)
class Moved(Layer):
    """A step of a rank that shares an image: it cuts, pads or gathers a tensor, or norms it over all ranks.

    `gradient_bytes`: what its backward pass allocates, the gradient that it hands on included.
    """

    gradient_bytes: int


def backward_peak(
    layers: Sequence[Layer], costs: Sequence[LayerCost], kept: Sequence[int], bytes_per_value: int, first: int = 0
) -> int:
    """Bytes of the backward pass of the layers from `first` on, at its worst moment, on top of all that they keep.

    `kept`: of each layer of the run, of which there are so many; the loss is the last layer's. At each layer: what
    this and earlier layers keep, the gradients of its output, input and weights, and those of skips that wait for
    their stash: the whole concatenation, or the skip's own where it was cropped.

    What a stage receives, the gradients of its output and of the skips that others pop, it holds until the end. So it
    does the gradients of the skips that it pops of others, the whole concatenation's.
    """
    stop = first + len(kept)
    walk = _Walk(layers, costs, bytes_per_value, first, stop)
    walk.begin(sum(kept))
    for index in reversed(range(first, stop)):
        walk.step(index, kept[index - first])
    return walk.peak - walk.at_first


class _Walk:
    """The backward pass on its way from the last layer of a run to the first; all in bytes."""

    def __init__(
        self, layers: Sequence[Layer], costs: Sequence[LayerCost], bytes_per_value: int, first: int, stop: int
    ) -> None:
        self.layers, self.costs, self.bytes_per_value, self.first, self.stop = (
            layers, costs, bytes_per_value, first, stop
        )  # fmt: skip
        self.stashes = {layer.skip: index for index, layer in enumerate(layers) if isinstance(layer, Stash)}
        # The first layer with weights: its input needs no gradient.
        self.trained = next((index for index, cost in enumerate(costs) if cost.parameters), len(costs))
        self.waiting: dict[str, int] = {}
        self.live = self.peak = self.gradient = self.at_first = 0

    def begin(self, kept: int) -> None:
        """The loss is differentiated, or gradients have come from the stages behind."""
        if self.stop == len(self.layers):
            logits = self.costs[-1].output_bytes
            labels = INDEX_BYTES * self.costs[-1].shape[1] * self.costs[-1].shape[2]  # the caller's: they stay
            self.at_first = kept + loss_bytes(self.costs, self.bytes_per_value)
            self.live, self.peak, self.gradient = kept + labels, self.at_first + 2 * logits, logits
            return
        later = {layer.skip for layer in self.layers[self.stop :] if isinstance(layer, PopConcatenate)}
        own = [index for skip, index in self.stashes.items() if self.first <= index < self.stop and skip in later]
        received = self.costs[self.stop - 1].output_bytes + sum(self.costs[index].output_bytes for index in own)
        self.at_first = kept
        self.live = self.peak = kept + received

    def step(self, index: int, kept: int) -> None:
        """One layer's backward pass; behind it, what the layer keeps is let go."""
        layer, cost = self.layers[index], self.costs[index]
        new = self._new_gradient(index) if index > self.trained else 0
        handed_on = new
        if isinstance(layer, PopConcatenate):
            new, handed_on = self._split(layer, cost)
        elif _passes_on(layer):
            handed_on = self.gradient
        elif isinstance(layer, Activation):
            handed_on = cost.output_bytes
        elif isinstance(layer, Norm | Moved):
            handed_on = cost.input_bytes
        weights = cost.parameters * wide_bytes(self.bytes_per_value)
        self.peak = max(self.peak, self.live + sum(self.waiting.values()) + self.gradient + new + weights)
        self.live, self.gradient = self.live - kept, handed_on
        if isinstance(layer, Stash):
            self.waiting.pop(layer.skip, None)

    def _new_gradient(self, index: int) -> int:
        """Bytes that the backward pass of a layer allocates for the gradient of its input."""
        layer, cost, before = self.layers[index], self.costs[index], self.layers[index - 1]
        if _passes_on(layer):
            return 0
        if isinstance(layer, Moved):
            return layer.gradient_bytes
        writes = isinstance(layer, Activation) and index > self.first
        if writes and isinstance(before, Norm) and before.kind in VIEWING_NORMS:
            # Written over a view: autograd copies the gradient, and twice more; a received one stays beside its copy.
            return (3 if self.gradient else 4) * cost.input_bytes
        if isinstance(layer, Norm) and layer.kind != "pixel":
            return max(cost.input_bytes, norm_work_bytes(*cost.shape))  # the sums' rows are let go before it is made
        return cost.input_bytes

    def _split(self, layer: PopConcatenate, cost: LayerCost) -> tuple[int, int]:
        """The gradient of a concatenation goes two ways: bytes made for it, bytes handed on."""
        skip = self.costs[self.stashes[layer.skip]]
        if layer.crop:
            self.waiting[layer.skip] = skip.output_bytes
            # Put back along columns first, then along rows.
            return skip.output_bytes * cost.shape[1] // skip.shape[1], self.gradient
        self.waiting[layer.skip], self.gradient = self.gradient, 0
        return 0, 0


def _passes_on(layer: Layer) -> bool:
    """Whether a layer hands its gradient on as it is."""
    match layer:
        case Norm(kind=kind):
            return kind == "none"
        case Dropout(probability=p):
            return p == 0
    return False
