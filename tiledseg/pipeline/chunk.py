"""One chunk of a pipeline: its forward pass for a micro-batch, and later its backward pass, apart from all others.

The graph of autograd ends where tensors come in and go out. What comes in enters it by `_Enter` or `_EnterSkip`, which
cost no copy and keep no tensor: one that no layer needs again is let go. A received activation may be written into by
the first layer; a skip, which may be another chunk's too, may not. What goes out leaves by `_Leave`, a scalar behind
which the chunk's graph hangs: so an output is let go once it has been sent, and the backward pass starts from the
scalar, whatever gradients have come for the outputs.

With recomputation a chunk keeps its inputs only and goes forward once more right before it goes backward. The second
pass is the same: dropout draws by counter, and running statistics stand still.

The law: outputs, gradients and buffers are those of the layers run in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from tiledseg.geometry.layer import Activation, Dropout, Layer, Norm, PopConcatenate, Stash
from tiledseg.models.unet import FlatNetwork
from tiledseg.pipeline.partition import Cut

ACTIVATION = ""  # the name of what goes from chunk to chunk, beside the names of skips

Tensors = dict[str, torch.Tensor]


class MicroBatch(Protocol):
    """What goes through a pipeline at once. The ranks of a pipeline have one each of the same micro-batch."""

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(channels, height, width) of each layer's output, of what this rank's pipeline computes of it."""

    def source(self) -> torch.Tensor:
        """The network's input. Only called where the first chunk is, once, micro-batch by micro-batch."""

    def run_layers(self, x_BCHW: torch.Tensor, skips: Tensors, first: int, stop: int) -> torch.Tensor:
        """As `FlatNetwork.run_layers`; twice the same where it is called twice."""

    def loss(self, output_BKHW: torch.Tensor) -> torch.Tensor:
        """What to differentiate. Only called where the last chunk is, once."""


@dataclass
class Held:
    """What a chunk keeps of a micro-batch from its forward to its backward pass.

    `inputs`: to recompute from. `scalar`: the chunk's graph hangs behind it (None: nothing to differentiate), and
    `outgoing` takes the gradients of what went out, in its order. `entered`: where those of what came in appear.
    """

    inputs: Tensors | None = None
    scalar: torch.Tensor | None = None
    outgoing: list[torch.Tensor] = field(default_factory=list)
    entered: dict[str, Entrance] = field(default_factory=dict)


class Entrance:
    """The gradient of a tensor that came in, once there is one; of the tensor itself only what it looks like."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._like = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self._gradient: torch.Tensor | None = None

    def put(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient

    def gradient(self) -> torch.Tensor:
        """Zeros where no layer of the chunk depends on the tensor."""
        if self._gradient is not None:
            return self._gradient
        shape, strides, dtype, device = self._like
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


class Chunk:
    """Layers `first` to `stop` of a network, as a part of a pipeline."""

    def __init__(self, network: FlatNetwork, cut: Cut, index: int) -> None:
        self.index = index
        self.first, self.stop = cut.runs[index]
        self.is_first = self.first == 0
        self.is_last = self.stop == len(network.descriptions)
        self.leaving = tuple(sorted({r.skip for r in cut.pipeline.routes if r.source == index and r.skip}))
        self._modules = list(network.layers.values())[self.first : self.stop]
        self._overwrites = overwrites_input(network.descriptions[self.first : self.stop])

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of its layers."""
        for module in self._modules:
            yield from module.parameters()

    def output(self, micro_batch: MicroBatch, inputs: Tensors) -> Tensors:
        """What goes out, or the network's output as the activation of the last chunk. For a pass without gradients.

        Here and in `forward` the tensors of `inputs` are taken out as they are used.
        """
        return self._run(micro_batch, inputs)

    def forward(self, micro_batch: MicroBatch, inputs: Tensors, recompute: bool) -> tuple[Held, Tensors]:
        """What is kept for `backward`, and what goes out. The last chunk takes the loss and sends nothing."""
        if not recompute:
            return self._differentiable(micro_batch, inputs)
        kept = dict(inputs)
        with torch.no_grad():
            if self._overwrites:
                inputs[ACTIVATION] = inputs[ACTIVATION].clone()
            outputs = self._run(micro_batch, inputs)
        return Held(inputs=kept), {} if self.is_last else outputs

    def backward(self, micro_batch: MicroBatch, held: Held, gradients: Mapping[str, torch.Tensor]) -> Tensors:
        """Adds to the gradients of the chunk's weights; the gradients of what came in. `held` is used up."""
        if held.inputs is not None:
            inputs, held.inputs = held.inputs, None
            with _still_statistics(self._modules):
                held = self._differentiable(micro_batch, inputs)[0]
        if held.scalar is not None:
            if not self.is_last:
                held.outgoing += [gradients[name] for name in (ACTIVATION, *self.leaving)]
            held.scalar.backward()
        return {name: entrance.gradient() for name, entrance in held.entered.items()}

    def _differentiable(self, micro_batch: MicroBatch, inputs: Tensors) -> tuple[Held, Tensors]:
        held = Held()
        for name in list(inputs):
            if name == ACTIVATION and self.is_first:
                continue  # the network's input: nobody asks for its gradient
            held.entered[name] = Entrance(inputs[name])
            enter = _Enter if name == ACTIVATION else _EnterSkip
            inputs[name] = enter.apply(torch.empty(0, requires_grad=True), inputs[name], held.entered[name])
        outputs = self._run(micro_batch, inputs)
        if self.is_last:
            held.scalar = micro_batch.loss(outputs[ACTIVATION])
            return held, {}
        leaving = [outputs[name] for name in (ACTIVATION, *self.leaving)]
        if any(tensor.requires_grad for tensor in leaving):
            held.scalar = _Leave.apply(held.outgoing, *leaving)
        return held, {name: tensor.detach() for name, tensor in outputs.items()}

    def _run(self, micro_batch: MicroBatch, inputs: Tensors) -> Tensors:
        x_BCHW = micro_batch.run_layers(inputs.pop(ACTIVATION), inputs, self.first, self.stop)
        return {ACTIVATION: x_BCHW, **{name: inputs[name] for name in self.leaving}}


class _Enter(torch.autograd.Function):
    """Makes a received tensor the output of an operation: layers may write into it."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, received: torch.Tensor, entrance: Entrance) -> torch.Tensor:
        ctx.entrance = entrance
        ctx.mark_dirty(received)
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.entrance.put(gradient)
        return None, None, None


class _EnterSkip(_Enter):
    """The same for a tensor that layers only read: autograd refuses to write into what comes out."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, received: torch.Tensor, entrance: Entrance) -> torch.Tensor:
        ctx.entrance = entrance
        # The strides stay. `view_as` gives a dim of one image a stride that no longer tells channels last: what is
        # concatenated with the tensor would lose its layout, and be copied back and forth.
        return received[...]


class _Leave(torch.autograd.Function):
    """A scalar of no meaning; differentiated, it hands each output the gradient that `box` holds for it by then."""

    @staticmethod
    def forward(ctx: Any, box: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.box = box
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.box


def overwrites_input(layers: tuple[Layer, ...]) -> bool:
    """Whether running these layers may change the tensor that they are given: an activation works in place.

    Layers in front of it may hand the same tensor on: a norm that is none, a dropout that drops nothing, a stash.
    """
    for layer in layers:
        if isinstance(layer, Activation):
            return True
        passes_on = isinstance(layer, Dropout | Stash) or (isinstance(layer, Norm) and layer.kind == "none")
        if not passes_on or isinstance(layer, PopConcatenate):
            return False
    return False


@contextmanager
def _still_statistics(modules: list[nn.Module]) -> Iterator[None]:
    """Running statistics have moved in the first pass: here norms use the batch's, and keep the running ones."""
    tracking = [m for module in modules for m in module.modules() if getattr(m, "track_running_stats", False)]
    for module in tracking:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True  # type: ignore[assignment]
