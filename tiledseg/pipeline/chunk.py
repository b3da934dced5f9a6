"""One chunk of a pipeline: its forward pass for a micro-batch, and later its backward pass.

A received tensor enters the graph of autograd by `_Enter`, which keeps no tensor: it is freed once no layer needs it.
An output is freed once it has been sent. Its `GradientEdge` is kept, from which the backward pass starts with the
gradients received for the output.

    forward     received --> _Enter --> layer --> ... --> layer --> output --> sent and freed
                               :                                       :
    backward    Entrance <-----+------- layer <-- ... <-- layer <---- edge <-- received gradients
                   |
                   +--> sent back to the chunk that made the received tensor

With recomputation a chunk keeps only its inputs and repeats the forward pass right before the backward pass. The second
pass is identical: dropout draws by counter, and running statistics are not updated. A chunk whose own and earlier
weights are all frozen gets no gradients of its outputs; its backward pass does nothing, at its place in the schedule.

The law: outputs, gradients and buffers are those of the layers run in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tiledseg.memory.second_run import still_statistics
from tiledseg.models.network import GraphNetwork, Tensors
from tiledseg.pipeline.schedule import ChunkMap


class StagedBatch(Protocol):
    """A micro-batch of a pipeline. Each rank of the pipeline has its own object of the same micro-batch."""

    @property
    def images(self) -> int:
        """The number of images; the last micro-batches of a step may have fewer."""

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(channels, height, width) of each tensor of the graph, as far as this rank's pipeline computes it."""

    def source(self) -> torch.Tensor:
        """Return the network's input. Called once, on the rank of the first chunk, in the order of micro-batches."""

    def run_nodes(self, tensors: Tensors, first: int, stop: int) -> None:
        """Run nodes as `GraphNetwork.run_nodes` does; a second call gives the same results."""

    def loss(self, *outputs_BKHW: torch.Tensor) -> torch.Tensor:
        """Return the loss of the network's outputs, a scalar. Called once, on the rank of the last chunk."""


@dataclass
class Held:
    """The tensors that a chunk keeps of a micro-batch from its forward to its backward pass.

    `inputs`: for recomputation. `loss`: of the last chunk. `edges`: the ends of another chunk's graph, by output.
    `entered`: get the gradients of the inputs.
    """

    inputs: Tensors | None = None
    loss: torch.Tensor | None = None
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    entered: dict[int, Entrance] = field(default_factory=dict)


class Entrance:
    """The gradient of a received tensor, once it is computed; and the tensor's shape, strides, dtype and device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._like, self._device = tensor.to("meta"), tensor.device
        self.given: torch.Tensor | None = None  # by autograd

    def gradient(self) -> torch.Tensor:
        """Return the gradient; zeros if no layer of the chunk depends on the tensor."""
        return torch.zeros_like(self._like, device=self._device) if self.given is None else self.given


class Chunk:
    """Nodes `first` to `stop` (half-open) of a network, as a part of a pipeline."""

    def __init__(self, network: GraphNetwork, cut: ChunkMap, index: int) -> None:
        graph = network.graph
        self.index = index
        self.first, self.stop = cut.runs[index]
        self.is_first = self.first == 0
        self.is_last = self.stop == len(graph)
        self.leaving = tuple(sorted({route.tensor for route in cut.routes if route.source == index}))
        self._results = graph.results
        self._returning = tuple(tensor for tensor in self.leaving if graph.wants_gradient[tensor])
        self._wants_gradient = graph.wants_gradient
        self._overwritten = graph.overwritten(self.first, self.stop)
        self._modules = list(network.layers.values())[self.first : self.stop]

    def parameters(self) -> Iterator[nn.Parameter]:
        for module in self._modules:
            yield from module.parameters()

    def outputs(self, micro_batch: StagedBatch, inputs: Tensors) -> Tensors:
        """Return the chunk's outputs; the last chunk's are the network's. Removes tensors from `inputs` as they are
        used, here and in `forward`."""
        micro_batch.run_nodes(inputs, self.first, self.stop)
        return {tensor: inputs[tensor] for tensor in (self._results if self.is_last else self.leaving)}

    def forward(self, micro_batch: StagedBatch, inputs: Tensors, recompute: bool) -> tuple[Held, Tensors]:
        """Return the tensors kept for `backward`, and those to send: none from the last chunk, which takes the loss."""
        if not recompute or not (self.is_last or self._returning):  # without a returning gradient nothing is kept
            return self._differentiable(micro_batch, inputs)
        kept = dict(inputs)
        with torch.no_grad():
            for tensor in self._overwritten:
                inputs[tensor] = inputs[tensor].clone()
            outputs = self.outputs(micro_batch, inputs)
        return Held(inputs=kept), {} if self.is_last else outputs

    def backward(self, micro_batch: StagedBatch, held: Held, gradients: dict[int, list[torch.Tensor]]) -> Tensors:
        """Add to the gradients of the chunk's weights; return the gradients of its inputs.

        `gradients`: those of the outputs, one from each chunk that read them. Consumes them and `held`.
        """
        if held.inputs is not None:
            inputs, held.inputs = held.inputs, None
            with still_statistics(self._modules):
                held = self._differentiable(micro_batch, inputs)[0]
        if held.loss is not None:
            held.loss.backward()
        elif held.edges:
            torch.autograd.backward(list(held.edges.values()), [_total(gradients[tensor]) for tensor in held.edges])
        return {tensor: entrance.gradient() for tensor, entrance in held.entered.items()}

    def _differentiable(self, micro_batch: StagedBatch, inputs: Tensors) -> tuple[Held, Tensors]:
        held = Held()
        for tensor in [t for t in inputs if self._wants_gradient[t]]:
            held.entered[tensor] = Entrance(inputs[tensor])
            inputs[tensor] = _Enter.apply(torch.empty(0, requires_grad=True), inputs[tensor], held.entered[tensor])
            if tensor in self._overwritten:
                inputs[tensor] = inputs[tensor].clone()
        outputs = self.outputs(micro_batch, inputs)
        if self.is_last:
            held.loss = micro_batch.loss(*(outputs[tensor] for tensor in self._results))
            return held, {}
        ends = {k: outputs[k] for k in self._returning if outputs[k].requires_grad}
        # A view, since torch 2.8 starts no backward pass from an operation that is written in Python.
        held.edges = {k: get_gradient_edge(end.view_as(end)) for k, end in ends.items()}
        return held, {number: tensor.detach() for number, tensor in outputs.items()}


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, and remove each from the list as it is added."""
    total = parts.pop()
    while parts:
        total = total + parts.pop()
    return total


class _Enter(torch.autograd.Function):
    """An operation that returns a received tensor; autograd refuses to overwrite the result."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, received: torch.Tensor, entrance: Entrance) -> torch.Tensor:
        ctx.entrance = entrance
        # Indexing keeps the strides. `view_as` gives a dim of one image a stride that no longer means channels last: a
        # concatenation with the tensor would lose its layout, and be copied back and forth.
        return received[...]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.entrance.given = gradient
        return None, None, None
