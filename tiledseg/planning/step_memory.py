"""The memory of one training step on one tile, walked through the forward and the backward pass.

Weights, their gradients and the optimizer's values, all that autograd keeps (see `cost`), and on top of it the worst
moment of the backward pass. Against PyTorch's own allocations the tests find it within 0.1 %. Not counted: the
device's context, workspaces of its libraries, fragmentation, communication buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiledseg.geometry.layer import Activation, Dropout, Layer, Norm, PopConcatenate, Stash
from tiledseg.planning.cost import INDEX_BYTES, SINGLE_BYTES, LayerCost, layer_costs, loss_bytes

ADAM_VALUES = 2  # values an optimizer keeps for each parameter: AdamW 2, SGD with momentum 1
VIEWING_NORMS = ("instance", "pixel")  # they compute in another layout and return a view


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one training step on one tile, by purpose.

    `activations` is all that autograd keeps when the forward pass ends; `backward` is what the backward pass needs on
    top of that at its worst moment.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    backward: int

    @property
    def total(self) -> int:
        """The peak of the step, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.backward


@dataclass(frozen=True)
class Moved(Layer):
    """A step of a rank that shares an image: it cuts, pads or gathers a tensor, or norms it over all ranks.

    `gradient_bytes`: what its backward pass allocates, the gradient that it hands on included.
    """

    gradient_bytes: int


def training_memory(
    layers: Sequence[Layer],
    bands: int,
    context: tuple[int, int],
    bytes_per_value: int = 4,
    optimizer_values: int = ADAM_VALUES,
) -> StepMemory:
    """Bytes of one training step on one context of shape (height, width), at their peak.

    Raises GeometryError where the context is no legal size for the network.
    """
    return walked_memory(
        layers, layer_costs(layers, bands, context, bytes_per_value), bytes_per_value, optimizer_values
    )


def walked_memory(
    layers: Sequence[Layer], costs: Sequence[LayerCost], bytes_per_value: int, optimizer_values: int = ADAM_VALUES
) -> StepMemory:
    """The same, of layers whose costs are known; `Moved` stands for what is done between layers."""
    weight_bytes = max(bytes_per_value, SINGLE_BYTES)
    parameters = sum(c.parameters for c in costs)
    copies = parameters * bytes_per_value if bytes_per_value < SINGLE_BYTES else 0  # autocast keeps cast weights
    kept = sum(c.kept_bytes for c in costs) + loss_bytes(costs, bytes_per_value)
    return StepMemory(
        weights=parameters * weight_bytes + copies,
        gradients=parameters * weight_bytes,
        optimizer=parameters * weight_bytes * optimizer_values,
        activations=kept,
        backward=_backward_peak(layers, costs, kept, bytes_per_value) - kept,
    )


def _backward_peak(layers: Sequence[Layer], costs: Sequence[LayerCost], kept: int, bytes_per_value: int) -> int:
    """The most bytes of kept tensors and gradients at once, walking the backward pass.

    At each layer: what this and earlier layers keep, the gradients of its output, input and weights, and those of
    skips that wait for their stash: the whole concatenation, or the skip's own where it was cropped.
    """
    logits = costs[-1].output_bytes
    labels = INDEX_BYTES * costs[-1].shape[1] * costs[-1].shape[2]  # they belong to the caller and stay
    stashed = {layer.skip: cost for layer, cost in zip(layers, costs, strict=True) if isinstance(layer, Stash)}
    waiting: dict[str, int] = {}
    live = kept - loss_bytes(costs, bytes_per_value) + labels
    peak, gradient = kept + 2 * logits, logits
    first = next(index for index, cost in enumerate(costs) if cost.parameters)  # its input needs no gradient
    for index in reversed(range(len(layers))):
        layer, cost = layers[index], costs[index]
        new = _new_gradient(layer, cost, layers[index - 1]) if index > first else 0
        handed_on = new
        if isinstance(layer, PopConcatenate) and layer.crop:
            skip = stashed[layer.skip]
            waiting[layer.skip], handed_on = skip.output_bytes, gradient
            new = skip.output_bytes * cost.shape[1] // skip.shape[1]  # put back along columns first, then along rows
        elif isinstance(layer, PopConcatenate):
            waiting[layer.skip], gradient, new, handed_on = gradient, 0, 0, 0
        elif _passes_on(layer):
            handed_on = gradient
        elif isinstance(layer, Activation):
            handed_on = cost.output_bytes
        elif isinstance(layer, Moved):
            handed_on = cost.input_bytes
        weights = cost.parameters * max(bytes_per_value, SINGLE_BYTES)
        peak = max(peak, live + sum(waiting.values()) + gradient + new + weights)
        live, gradient = live - cost.kept_bytes, handed_on
        if isinstance(layer, Stash):
            waiting.pop(layer.skip, None)
    return peak


def _new_gradient(layer: Layer, cost: LayerCost, previous: Layer) -> int:
    """Bytes that the backward pass of a layer allocates for the gradient of its input."""
    if _passes_on(layer):
        return 0
    if isinstance(layer, Moved):
        return layer.gradient_bytes
    if isinstance(layer, Activation) and isinstance(previous, Norm) and previous.kind in VIEWING_NORMS:
        return 3 * cost.input_bytes  # written over a view: autograd copies the gradient twice
    return cost.input_bytes


def _passes_on(layer: Layer) -> bool:
    """Whether a layer hands its gradient on as it is."""
    match layer:
        case Norm(kind=kind):
            return kind == "none"
        case Dropout(probability=p):
            return p == 0
    return False
