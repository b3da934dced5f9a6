"""The memory of one training step on a tile or on a rank's block, walked through the forward and the backward pass.

Counted are weights, the float64 sums of their gradients (`tiledseg.gradients`), the optimizer's values, all that
autograd keeps (see `cost`), and on top of it the worst moment of the backward pass. Not counted are the device's
context, workspaces of its libraries, fragmentation, and communication buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import count_trained, tensor_channels
from tiledseg.planning.step.backward_walk import backward_peak
from tiledseg.planning.step.cost import ForwardWalk, copied, loss_bytes, rank_walk, tile_walk
from tiledseg.planning.step.rank_steps import RankSteps
from tiledseg.units.widths import DOUBLE_BYTES, copy_bytes, wide_bytes

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
def training_memory(
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    bytes_per_value: int = 4,
    optimizer_values: int = ADAM_VALUES,
) -> StepMemory:
    """Return the bytes of one training step on one context of (height, width), at their peak.

    Raises GeometryError where the context is no legal size for the network.
    """
    return memory_of(tile_walk(graph, bands, context, bytes_per_value), optimizer_values)


def block_memory(graph: Graph, bands: int, row: RankSteps, col: RankSteps, ranks: int, value_bytes: int) -> StepMemory:
    """Return the bytes of one training step of the rank with these steps, one of `ranks` that share the image, without
    its strips and the block of the input."""
    return memory_of(rank_walk(graph, bands, row, col, ranks, value_bytes))


def memory_of(walk: ForwardWalk, optimizer_values: int = ADAM_VALUES) -> StepMemory:
    """Return the bytes of a training step that goes forward as `walk` does."""
    graph, costs, width = walk.walked, walk.costs, walk.value_bytes
    wide, policy = wide_bytes(width), walk.graph.memory
    parameters, trained = sum(c.parameters for c in costs), sum(c.trained for c in costs)
    copies = sum(copied(graph, [c.parameters for c in costs]))
    fixed = parameters * wide + copies * copy_bytes(width), trained * DOUBLE_BYTES, trained * wide * optimizer_values
    kept = [c.kept_bytes for c in costs]
    if policy is None or policy.keeps_all:
        activations = sum(kept) + loss_bytes([costs[tensor - 1] for tensor in graph.results], width)
        return StepMemory(*fixed, activations, backward_peak(graph, costs, kept, width))
    from tiledseg.planning.walk.items import price
    from tiledseg.planning.walk.network_walk import network_walk

    items = network_walk(walk)
    choices = items.lying(policy)
    activations = items.kept(choices)
    return StepMemory(*fixed, activations, price(items.walk, choices).peak - activations)


def fixed_memory(graph: Graph, bands: int, bytes_per_value: int, optimizer_values: int = ADAM_VALUES) -> int:
    """Return the bytes of weights, of the sums of their gradients and of the optimizer's values, whatever the tiles."""
    trained = count_trained(graph, bands)
    held = trained * (wide_bytes(bytes_per_value) * optimizer_values + DOUBLE_BYTES)
    return weight_memory(graph, bands, bytes_per_value) + held


def weight_memory(graph: Graph, bands: int, bytes_per_value: int) -> int:
    """Return the bytes of weights alone, as computed with."""
    channels, wide = tensor_channels(graph, bands), wide_bytes(bytes_per_value)
    counts = [layer.parameters(channels[s[0]]) for layer, s in zip(graph.layers, graph.sources, strict=True)]
    return sum(counts) * wide + copies_memory(graph, bands, bytes_per_value)


def copies_memory(graph: Graph, bands: int, bytes_per_value: int) -> int:
    """Return the bytes of the copies of weights that autocast makes and autograd keeps."""
    channels = tensor_channels(graph, bands)
    counts = [layer.parameters(channels[s[0]]) for layer, s in zip(graph.layers, graph.sources, strict=True)]
    return sum(copied(graph, counts)) * copy_bytes(bytes_per_value)
