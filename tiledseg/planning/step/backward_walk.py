"""The gradients of a backward pass, walked node by node: of a whole network, or of a run of its nodes, a stage.

The walk is checked against PyTorch's allocations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tiledseg.geometry.graph import Graph
from tiledseg.planning.step.cost import INDEX_BYTES, LayerCost, unfolded_bytes
from tiledseg.units import wide_bytes

FURTHER_OUTPUT = 3  # sizes of it that a loss of several outputs keeps: measured of `training.objective`


class Gradients(NamedTuple):
    """Bytes of gradients at a node: at its worst moment, before its own ones are made, and the most once what the node
    keeps is freed."""

    peak: int
    before: int
    after: int


def gradients_by_node(
    graph: Graph, costs: Sequence[LayerCost], bytes_per_value: int, first: int, stop: int, given: bool = False
) -> list[Gradients]:
    """Return the gradients of the nodes `first` to `stop`; last those of the loss, without what this keeps, or those
    that arrive from later stages. `given`: gradients of the results are given, in place of a loss.

    The gradients of a tensor's several readers are added up in a new one. A stage receives a gradient of what it has
    sent from each node that reads it, as if all were on stages of their own, and holds their sum until the end. It
    holds the gradients of what it received likewise.
    """
    wants, bytes_of, wide = (
        graph.wants_gradient,
        [0, *[cost.output_bytes for cost in costs]],
        wide_bytes(bytes_per_value),
    )
    waiting: dict[int, int] = {}  # of each tensor with a gradient, the bytes that this holds alone
    scattered: set[int] = set()  # tensors whose gradients are views of larger ones, or the loss's
    sums = 0  # of gradients that later stages send
    if given or stop == len(graph):
        waiting = {tensor: bytes_of[tensor] for tensor in graph.results}
        scattered.update(() if given else graph.results)
        results = [costs[tensor - 1] for tensor in graph.results]
        start = sum(waiting.values()) if given else loss_peak(results, bytes_per_value)
    else:
        for tensor in graph.leaving(first, stop):
            if wants[tensor]:
                waiting[tensor] = sum([reader >= stop for reader in graph.readers[tensor]])
        start = sum([count * bytes_of[tensor] for tensor, count in waiting.items()])
        start += max([bytes_of[tensor] for tensor, count in waiting.items() if count > 1], default=0)
        sums, waiting = sum([bytes_of[tensor] for tensor in waiting]), dict.fromkeys(waiting, 0)
    moments = [Gradients(start, 0, 0)]
    for k in reversed(range(first, stop)):
        layer, cost, sources = graph.layers[k], costs[k], graph.sources[k]
        before, gradient = sums + sum(waiting.values()), waiting.pop(k + 1, 0)
        transient = layer.transient_bytes(cost.input_bytes, cost.shape)
        made = list[tuple[int, int, int]]()  # of each input's gradient: the tensor, bytes allocated, and held alone
        if wants[k + 1]:
            transient += unfolded_bytes(layer, cost, bytes_per_value)
            shared = gradient  # one that shares the output's memory counts for the tensor that is needed longest
            for index in sorted(range(len(sources)), key=sources.__getitem__):
                tensor, size = sources[index], cost.input_bytes[index]
                if not wants[tensor]:
                    continue
                if layer.gradient != "new":
                    held = size if layer.crop(index) else shared
                    made.append((tensor, size if layer.crop(index) else 0, held))
                    shared = shared if layer.crop(index) else 0
                    continue
                allocated, origin = layer.gradient_bytes(size, cost.shape), graph.origins[tensor]
                if graph.overwrites[k] and origin > first and graph.layers[origin - 1].returns_view:
                    # Autograd copies the gradient, and twice more; a received one stays beside its copy.
                    allocated = (3 if gradient else 4) * size
                made.append((tensor, allocated, layer.held_bytes(size, cost.shape)))
        own = sum([allocated for _, allocated, _ in made]) + max(0, gradient + transient)
        own += 0 if cost.frozen else cost.parameters * wide
        if k + 1 in scattered and layer.straightens_gradient:
            own += bytes_of[k + 1]  # a copy of the output's gradient that lies channels last
        peak, after = sums + sum(waiting.values()) + own, 0
        for tensor, allocated, held in made:
            if layer.gradient == "parts" and not allocated:
                scattered.add(tensor)
            if tensor in waiting:
                scattered.discard(tensor)
                after = max(after, sums + sum(waiting.values()) + held + bytes_of[tensor])
                held = bytes_of[tensor]
            waiting[tensor] = held
        if k == first > 0:  # what entered and no gradient depends on has one of zeros
            zeros = [bytes_of[t] for t in graph.entering(first, stop) if wants[t] and t not in waiting]
            after = max(after, sums + sum(waiting.values()) + sum(zeros))
        moments.append(Gradients(peak, before, after))
    return moments[::-1]


def loss_bytes(results: Sequence[LayerCost], bytes_per_value: int) -> int:
    """Return the bytes that the loss of a network's outputs keeps. The first one's cross-entropy keeps
    log-probabilities, sum of weights, and labels. Further ones keep a measured multiple of their size. Those of another
    loss are added."""
    channels, height, width = results[0].shape
    logits = channels * height * width
    further = sum(FURTHER_OUTPUT * result.output_bytes for result in results[1:])
    further += math.ceil(results[0].loss.kept * height * width)
    return (logits + 1) * wide_bytes(bytes_per_value) + height * width * INDEX_BYTES + further


def loss_peak(results: Sequence[LayerCost], bytes_per_value: int) -> int:
    """Return the bytes on top of what the loss keeps while its gradients are made, once the labels are freed. They are
    the outputs' gradients and a copy of the first one's, in the loss's width, and those of another loss."""
    channels, height, width = results[0].shape
    loss = results[0].loss
    made = height * width * (2 * channels * wide_bytes(bytes_per_value) - INDEX_BYTES)
    made += sum(result.output_bytes for result in results[1:])
    return max(0, made + math.ceil((loss.peak - loss.kept) * height * width))
