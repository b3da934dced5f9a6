"""The cost of a stage of a pipeline: any run of a network's nodes, priced for one micro-batch.

Bytes kept for the backward pass follow `step.cost`, but a run that starts in the middle receives its input: where a
node before has kept that tensor already, this rank has to keep it once more.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from tiledseg.planning.step.backward_walk import backward_peak
from tiledseg.planning.step.cost import ForwardWalk, Tensor, copied, keep_for_backward, loss_bytes
from tiledseg.planning.walk.step_memory import ADAM_VALUES
from tiledseg.units.widths import DOUBLE_BYTES, copy_bytes, wide_bytes

if TYPE_CHECKING:
    from tiledseg.planning.walk.network_walk import NetworkWalk


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage, by purpose.

    `activations`: kept of one micro-batch from its forward to its backward pass; `inputs`: kept of one that is
    recomputed, all that it received; `backward`: needed by the backward pass on top at its worst moment, the gradients
    that it received included.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    inputs: int
    backward: int

    def kept(self, complete: int, inputs_only: int = 0) -> int:
        """Return the bytes of so many micro-batches with all their activations, and so many with their inputs only."""
        return complete * self.activations + inputs_only * self.inputs

    def total(self, complete: int, inputs_only: int = 0) -> int:
        """Return all bytes, with so many micro-batches kept at once."""
        fixed = self.weights + self.gradients + self.optimizer
        return fixed + self.kept(complete, inputs_only) + self.backward


class StagePrices:
    """Prices of runs of nodes (first, stop), half-open, on one micro-batch with this forward walk."""

    def __init__(self, forward: ForwardWalk) -> None:
        self.forward, self.graph, self.costs = forward, forward.graph, forward.costs
        self.bytes_per_value = forward.value_bytes
        self._parameters = (0, *accumulate(cost.parameters for cost in self.costs))
        self._trained = (0, *accumulate(cost.trained for cost in self.costs))
        self._copied = (0, *accumulate(copied(self.graph, [cost.parameters for cost in self.costs])))
        self._kept_from = functools.cache(self._find_kept)
        self.memory = functools.cache(self._find_memory)

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Each edge that passes over nodes: the node that makes the tensor, and the one that reads it."""
        return tuple((tensor - 1, reader) for tensor, reader in self.graph.skips)

    def _find_memory(self, first: int, stop: int) -> StageMemory:
        """Return the memory of a rank that holds the run; the loss belongs to the last layer."""
        counts = self._parameters, self._trained, self._copied
        parameters, trained, copies = (each[stop] - each[first] for each in counts)
        width, policy = wide_bytes(self.bytes_per_value), self.graph.memory
        if policy is not None and not policy.keeps_all:
            from tiledseg.planning.walk.items import price

            walk = self.walk(first, stop)
            choices = walk.lying(policy)
            kept = walk.kept(choices)
            backward = price(walk.walk, choices).peak - kept
        else:
            up_to = self._kept_from(first)[: stop - first + 1]
            each = [after - before for before, after in pairwise(up_to)]
            kept, backward = up_to[-1], backward_peak(self.graph, self.costs, each, self.bytes_per_value, first)
            if stop == len(self.graph):
                outputs = [self.costs[tensor - 1] for tensor in self.graph.results]
                kept += loss_bytes(outputs, self.bytes_per_value)
        return StageMemory(
            weights=parameters * width + copies * copy_bytes(self.bytes_per_value),
            gradients=trained * DOUBLE_BYTES,
            optimizer=ADAM_VALUES * trained * width,
            activations=kept,
            inputs=self.received(first, stop) if first else self.tensor_bytes(0),
            backward=backward,
        )

    def walk(self, first: int, stop: int) -> NetworkWalk:
        """Return the tensors that the run's backward pass uses, of one micro-batch."""
        from tiledseg.planning.walk.network_walk import network_walk

        return network_walk(self.forward, run=(first, stop))

    def tensor_bytes(self, tensor: int) -> int:
        """Return the bytes of a tensor of the graph, whole: its reader crops it."""
        return self.costs[tensor - 1].output_bytes if tensor else self.forward.input_bytes

    def received(self, first: int, stop: int) -> int:
        """Return the bytes that the run receives in a forward pass."""
        return sum(map(self.tensor_bytes, self.graph.entering(first, stop))) if first else 0

    def handed_on(self, first: int, stop: int) -> int:
        """Return the bytes that the run receives without skips, where these stay on their rank (folded)."""
        return self.tensor_bytes(first) if first else 0

    def _find_kept(self, first: int) -> tuple[int, ...]:
        """Return the bytes kept by the first n nodes of a run that starts at `first`, for each n."""
        tensors: dict[int, Tensor] = {}
        kept = [0]
        for k in range(first, len(self.graph)):
            inputs = [tensors.setdefault(source, self._entering(source)) for source in self.graph.sources[k]]
            more, tensors[k + 1] = keep_for_backward(self.graph, k, inputs, self.costs[k].shape, self.bytes_per_value)
            kept.append(kept[-1] + more)
        return tuple(kept)

    def _entering(self, tensor: int) -> Tensor:
        size = self.tensor_bytes(tensor)
        values = math.prod(self.costs[tensor - 1].shape) if tensor else size // self.bytes_per_value
        return Tensor(values, value_bytes=size // values)
