"""The memory of one training step on one tile, walked through the forward and the backward pass.

Weights, the float64 sums of their gradients (`tiledseg.gradients`), the optimizer's values, all that autograd keeps
(see `cost`), and on top of it the worst moment of the backward pass. Against PyTorch's own allocations the tests find
it within 0.1 %. Not counted: the device's context, workspaces of its libraries, fragmentation, communication buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import held, spread
from tiledseg.geometry.memory_words import KEEP, REBUILD
from tiledseg.geometry.shapes import count_trained, tensor_channels
from tiledseg.planning.step.backward_walk import backward_peak
from tiledseg.planning.step.cost import LayerCost, copied, layer_costs, loss_bytes
from tiledseg.records import dataclass
from tiledseg.units.widths import DOUBLE_BYTES, copy_bytes, wide_bytes

ADAM_VALUES = 2  # values an optimizer keeps for each parameter: AdamW 2, SGD with momentum 1


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
        return self.weights + self.gradients + self.optimizer + self.activations + self.backward


@lru_cache(maxsize=1024)
def training_memory(
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    bytes_per_value: int = 4,
    optimizer_values: int = ADAM_VALUES,
) -> StepMemory:
    """Bytes of one training step on one context of shape (height, width), at their peak.

    Raises GeometryError where the context is no legal size for the network.
    """
    costs = layer_costs(graph, bands, context, bytes_per_value)
    memory = walked_memory(graph, costs, bytes_per_value, optimizer_values)
    if graph.memory is None or graph.memory.keeps_all:
        return memory
    activations, peak = policy_peak(graph, costs, math.prod((bands, *context)) * bytes_per_value, bytes_per_value)
    return replace(memory, activations=activations, backward=peak - activations)


def policy_peak(graph: Graph, costs: Sequence[LayerCost], input_bytes: int, bytes_per_value: int) -> tuple[int, int]:
    """Of a network that goes by a memory policy: bytes that lie there when the forward pass has ended, and at the worst
    moment of the backward pass, in which others are computed once more."""
    from tiledseg.planning.walk.items import price
    from tiledseg.planning.walk.network_walk import Speed, network_walk

    assert graph.memory is not None, "it goes by no policy"
    there = held(graph, graph.memory)
    lying = spread(graph, lambda home: KEEP if there[home] else REBUILD, graph.memory.inside)
    walk = network_walk(graph, costs, input_bytes, bytes_per_value, Speed())
    sizes = [input_bytes, *(cost.output_bytes for cost in costs)]
    kept = sum(size for size, is_there in zip(sizes, there, strict=True) if is_there)
    results = [costs[tensor - 1] for tensor in graph.results]
    return kept + loss_bytes(results, bytes_per_value), price(walk.walk, walk.choices(lying)).peak


def fixed_memory(graph: Graph, bands: int, bytes_per_value: int, optimizer_values: int = ADAM_VALUES) -> int:
    """Bytes of weights, of the sums of their gradients and of the optimizer's values, whatever the tiles."""
    trained = count_trained(graph, bands)
    held = trained * (wide_bytes(bytes_per_value) * optimizer_values + DOUBLE_BYTES)
    return weight_memory(graph, bands, bytes_per_value) + held


def weight_memory(graph: Graph, bands: int, bytes_per_value: int) -> int:
    """Bytes of weights alone, as computed with."""
    channels, wide = tensor_channels(graph, bands), wide_bytes(bytes_per_value)
    counts = [layer.parameters(channels[s[0]]) for layer, s in zip(graph.layers, graph.sources, strict=True)]
    return sum(counts) * wide + copies_memory(graph, bands, bytes_per_value)


def copies_memory(graph: Graph, bands: int, bytes_per_value: int) -> int:
    """Bytes of the copies of weights that autocast makes and autograd keeps."""
    channels = tensor_channels(graph, bands)
    counts = [layer.parameters(channels[s[0]]) for layer, s in zip(graph.layers, graph.sources, strict=True)]
    return sum(copied(graph, counts)) * copy_bytes(bytes_per_value)


def walked_memory(
    graph: Graph, costs: Sequence[LayerCost], bytes_per_value: int, optimizer_values: int = ADAM_VALUES
) -> StepMemory:
    """The same, of nodes whose costs are known; `Moved` stands for what is done between them."""
    weight_bytes = wide_bytes(bytes_per_value)
    parameters, trained = sum(c.parameters for c in costs), sum(c.trained for c in costs)
    copies = sum(copied(graph, [c.parameters for c in costs]))
    kept = sum(c.kept_bytes for c in costs)
    kept += loss_bytes([costs[tensor - 1] for tensor in graph.results], bytes_per_value)
    return StepMemory(
        weights=parameters * weight_bytes + copies * copy_bytes(bytes_per_value),
        gradients=trained * DOUBLE_BYTES,
        optimizer=trained * weight_bytes * optimizer_values,
        activations=kept,
        backward=backward_peak(graph, costs, [c.kept_bytes for c in costs], bytes_per_value),
    )
