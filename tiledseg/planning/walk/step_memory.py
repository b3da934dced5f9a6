"""The memory of one training step on a tile or on a rank's block, walked through the forward and the backward pass.

Counted are weights, the float64 sums of their gradients (`tiledseg.gradients`), the optimizer's values, all that
autograd keeps (see `cost`), and on top of it the worst moment of the backward pass. Not counted are the device's
context, workspaces of its libraries, fragmentation, and communication buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import count_trained, tensor_channels
from tiledseg.planning.step.backward_walk import backward_peak
from tiledseg.planning.step.cost import ForwardWalk, copied, loss_bytes, rank_walk, tile_walk
from tiledseg.planning.step.rank_steps import RankSteps
from tiledseg.units import DOUBLE_BYTES, copy_bytes, wide_bytes

ADAM_VALUES = 2  # values an optimizer keeps for each parameter: AdamW 2, SGD with momentum 1


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one training step, by purpose.

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
        return self.weights + self.gradients + self.optimizer + self.activations + self.backward


@lru_cache(maxsize=1024)
def training_memory(graph: Graph, bands: int, context: tuple[int, int], bytes_per_value: int = 4) -> StepMemory:
    """Return the bytes of one training step on one context of (height, width), at their peak.

    Raises GeometryError where the context is no legal size for the network.
    """
    return memory_of(tile_walk(graph, bands, context, bytes_per_value))


def block_memory(graph: Graph, bands: int, row: RankSteps, col: RankSteps, ranks: int, value_bytes: int) -> StepMemory:
    """Return the bytes of one training step of the rank with these steps, one of `ranks` that share the image, without
    its strips and the block of the input."""
    return memory_of(rank_walk(graph, bands, row, col, ranks, value_bytes))


def memory_of(walk: ForwardWalk) -> StepMemory:
    """Return the bytes of a training step that goes forward as `walk` does."""
    costs, width = walk.costs, walk.value_bytes
    trained = sum(cost.trained for cost in costs)
    weights = _weights(walk.walked, [cost.parameters for cost in costs], width)
    fixed = weights, trained * DOUBLE_BYTES, trained * wide_bytes(width) * ADAM_VALUES
    return StepMemory(*fixed, *step_activations(walk))


def step_activations(walk: ForwardWalk, run: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the bytes that a step keeps for its backward pass, and those of the backward pass on top, by the memory
    policy of the graph. `run`: of the nodes (first, stop) alone, those of a stage."""
    policy = walk.graph.memory
    if policy is not None and not policy.keeps_all:
        from tiledseg.planning.walk.items import network_walk, price

        items = network_walk(walk, run=run)
        words = items.needed_words(policy)
        activations = items.kept(words)
        return activations, price(items, words).peak - activations
    first, stop = run or (0, len(walk.walked))
    kept = stage_kept(walk, first, stop) if run else [cost.kept_bytes for cost in walk.costs]
    results = [walk.costs[tensor - 1] for tensor in walk.walked.results]
    loss = loss_bytes(results, walk.value_bytes) if stop == len(walk.walked) else 0
    return sum(kept) + loss, backward_peak(walk.walked, walk.costs, kept, walk.value_bytes, first)


def stage_kept(walk: ForwardWalk, first: int, stop: int) -> list[int]:
    """Return the bytes that autograd keeps for each node of a stage and no earlier one of it."""
    seen: set[int] = set()
    entered = ([source <= first for source in walk.graph.sources[k]] for k in range(first, stop))
    return [walk.ran[first + at].kept_bytes(seen, each) for at, each in enumerate(entered)]


def fixed_memory(graph: Graph, bands: int, bytes_per_value: int) -> int:
    """Return the bytes of weights, of the sums of their gradients and of the optimizer's values, whatever the tiles."""
    trained = count_trained(graph, bands)
    held = trained * (wide_bytes(bytes_per_value) * ADAM_VALUES + DOUBLE_BYTES)
    return weight_memory(graph, bands, bytes_per_value) + held


def weight_memory(graph: Graph, bands: int, bytes_per_value: int) -> int:
    """Return the bytes of weights alone, as computed with."""
    return _weights(graph, node_parameters(graph, bands), bytes_per_value)


def copies_memory(graph: Graph, bands: int, bytes_per_value: int) -> int:
    """Return the bytes of the copies of weights that autocast makes and autograd keeps."""
    return sum(copied(graph, node_parameters(graph, bands))) * copy_bytes(bytes_per_value)


def node_parameters(graph: Graph, bands: int) -> list[int]:
    """Return the parameters of each node."""
    channels = tensor_channels(graph, bands)
    return [layer.parameters(channels[s[0]]) for layer, s in zip(graph.layers, graph.sources, strict=True)]


def _weights(graph: Graph, parameters: Sequence[int], width: int) -> int:
    return sum(parameters) * wide_bytes(width) + sum(copied(graph, parameters)) * copy_bytes(width)
