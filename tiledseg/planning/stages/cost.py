"""What a stage of a pipeline costs: any run of a network's nodes, priced for one micro-batch.

Bytes kept for the backward pass follow `cost`, but a run that starts in the middle gets its input over the wire: where
a node before had kept that tensor already, this rank has to keep it once more.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from tiledseg.geometry.memory_words import MemoryPolicy
from tiledseg.planning.step.backward_walk import backward_peak
from tiledseg.planning.step.cost import ForwardWalk, Tensor, copied, keep_for_backward, loss_bytes
from tiledseg.planning.walk.step_memory import ADAM_VALUES
from tiledseg.units.widths import DOUBLE_BYTES, copy_bytes, wide_bytes

if TYPE_CHECKING:
    from tiledseg.planning.walk.network_walk import NetworkWalk


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
    """Prices of runs of nodes (first, stop), half-open, on one micro-batch, which goes `forward` so."""

    def __init__(self, forward: ForwardWalk) -> None:
        self.forward, self.graph, self.costs = forward, forward.graph, forward.costs
        self.bytes_per_value, costs, graph = forward.value_bytes, forward.costs, forward.graph
        self._parameters = (0, *accumulate(c.parameters for c in costs))
        self._trained = (0, *accumulate(c.trained for c in costs))
        self._copied = (0, *accumulate(copied(graph, [c.parameters for c in costs])))
        self._kept_from = functools.cache(self._walk)
        self.memory = functools.cache(self._find_memory)

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Each edge that passes over nodes: who makes the tensor, and who takes it."""
        return tuple((tensor - 1, reader) for tensor, reader in self.graph.skips)

    def _find_memory(self, first: int, stop: int) -> StageMemory:
        """Bytes of a rank that holds the run; the loss belongs to the last layer."""
        counts = self._parameters, self._trained, self._copied
        parameters, trained, copies = (each[stop] - each[first] for each in counts)
        width = wide_bytes(self.bytes_per_value)
        up_to = self._kept_from(first)[: stop - first + 1]
        received = self.received(first, stop)
        kept, backward = up_to[-1] + self._loss(stop), self._find_backward(first, stop)
        if self.graph.memory is not None and not self.graph.memory.keeps_all:
            kept, backward = self._by_policy(self.graph.memory, first, stop)
        return StageMemory(
            weights=parameters * width + copies * copy_bytes(self.bytes_per_value),
            gradients=trained * DOUBLE_BYTES,
            optimizer=ADAM_VALUES * trained * width,
            activations=kept,
            inputs=received if first else self.tensor_bytes(0),
            backward=backward,
        )

    def walk(self, first: int, stop: int) -> NetworkWalk:
        """What the run's backward pass asks for, of one micro-batch."""
        from tiledseg.planning.walk.network_walk import network_walk

        return network_walk(self.forward, run=(first, stop))

    def _by_policy(self, policy: MemoryPolicy, first: int, stop: int) -> tuple[int, int]:
        """Bytes that are kept of a micro-batch, and those of its backward pass on top."""
        from tiledseg.planning.walk.items import price

        found = self.walk(first, stop)
        choices = found.lying(policy)
        kept = found.kept(choices)
        return kept, price(found.walk, choices).peak - kept

    def _loss(self, stop: int) -> int:
        if stop < len(self.graph):
            return 0
        return loss_bytes([self.costs[tensor - 1] for tensor in self.graph.results], self.bytes_per_value)

    def _find_backward(self, first: int, stop: int) -> int:
        up_to = self._kept_from(first)[: stop - first + 1]
        kept = [after - before for before, after in pairwise(up_to)]
        return backward_peak(self.graph, self.costs, kept, self.bytes_per_value, first)

    def tensor_bytes(self, tensor: int) -> int:
        """Of a tensor of the graph, whole: its reader crops it."""
        return self.costs[tensor - 1].output_bytes if tensor else self.forward.input_bytes

    def received(self, first: int, stop: int) -> int:
        """Bytes that the run receives in a forward pass: all that enters it."""
        return sum(map(self.tensor_bytes, self.graph.entering(first, stop))) if first else 0

    def handed_on(self, first: int, stop: int) -> int:
        """The same without skips, where these stay on their rank (folded)."""
        return self.tensor_bytes(first) if first else 0

    def _walk(self, first: int) -> tuple[int, ...]:
        """Bytes kept by the first n nodes of a run that starts at `first`, for each n."""
        tensors: dict[int, Tensor] = {}
        kept = [0]
        for k in range(first, len(self.graph)):
            given = [tensors.setdefault(source, self._entering(source)) for source in self.graph.sources[k]]
            more, tensors[k + 1] = keep_for_backward(self.graph, k, given, self.costs[k].shape, self.bytes_per_value)
            kept.append(kept[-1] + more)
        return tuple(kept)

    def _entering(self, tensor: int) -> Tensor:
        if tensor == 0:
            return Tensor(self.tensor_bytes(0) // self.bytes_per_value, value_bytes=self.bytes_per_value)
        values = math.prod(self.costs[tensor - 1].shape)
        return Tensor(values, value_bytes=self.tensor_bytes(tensor) // values)
