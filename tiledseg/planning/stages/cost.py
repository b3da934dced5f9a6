"""The cost of a stage of a pipeline: any run of a network's nodes, priced for one micro-batch.

Bytes kept for the backward pass follow `step.cost`, but a run that starts in the middle receives its input. Where a
node before has kept that tensor already, this rank has to keep it once more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from tiledseg.planning.step.cost import ForwardWalk, copied
from tiledseg.planning.walk.step_memory import ADAM_VALUES, step_activations
from tiledseg.units.widths import DOUBLE_BYTES, copy_bytes, wide_bytes

if TYPE_CHECKING:
    from tiledseg.planning.walk.items import Walk


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage, by purpose.

    `activations`: kept of one micro-batch from its forward to its backward pass. `inputs`: kept of one that is
    recomputed, all that it received. `backward`: needed by the backward pass on top at its worst moment, the gradients
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
        self.bytes_per_value, costs, graph = forward.value_bytes, forward.costs, forward.graph
        self._parameters = (0, *accumulate(c.parameters for c in costs))
        self._trained = (0, *accumulate(c.trained for c in costs))
        self._copied = (0, *accumulate(copied(graph, [c.parameters for c in costs])))
        self.memory = functools.cache(self._find_memory)

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Each edge that passes over nodes: the node that makes the tensor, and the one that reads it."""
        return tuple((tensor - 1, reader) for tensor, reader in self.graph.skips)

    def _find_memory(self, first: int, stop: int) -> StageMemory:
        """Return the memory of a rank that holds the run; the loss belongs to the last layer."""
        counts = self._parameters, self._trained, self._copied
        parameters, trained, copies = (each[stop] - each[first] for each in counts)
        width = wide_bytes(self.bytes_per_value)
        received = self.received(first, stop)
        activations, backward = step_activations(self.forward, (first, stop))
        return StageMemory(
            weights=parameters * width + copies * copy_bytes(self.bytes_per_value),
            gradients=trained * DOUBLE_BYTES,
            optimizer=ADAM_VALUES * trained * width,
            activations=activations,
            inputs=received if first else self.tensor_bytes(0),
            backward=backward,
        )

    def walk(self, first: int, stop: int) -> Walk:
        """Return the items of the run's backward pass, of one micro-batch."""
        from tiledseg.planning.walk.items import network_walk

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
