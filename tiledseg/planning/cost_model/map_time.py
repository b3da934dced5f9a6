"""What a map takes: forward passes, and memory that is touched for the first time."""

from __future__ import annotations

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.step.halo_traffic import tensors_of


def map_seconds(prices: Prices, context: tuple[int, int], owned: int) -> float:
    """Of one tile, without first touch."""
    time = prices.tile(context, owned)
    return time.forward + time.reading


def forward_peak(graph: Graph, bands: int, context: tuple[int, int], width: int) -> int:
    """Bytes of tensors that are there at once in a forward pass without gradients, at most."""
    sizes = [
        height * cols * tensor.pixel_bytes
        for (_, height, cols), tensor in zip(
            tensor_shapes(graph, bands, *context), tensors_of(graph, bands, width), strict=True
        )
    ]
    living, peak = {0: sizes[0]}, sizes[0]
    for k, layer in enumerate(graph.layers):
        source = graph.sources[k][0]
        taken = layer.hands_on or graph.overwrites[k]  # the same memory, by its newest name
        living[k + 1] = living.get(source, 0) if taken else sizes[k + 1]
        if taken:
            living[source] = 0
        peak = max(peak, sum(living.values()))
        for tensor in graph.released[k]:
            living.pop(tensor, None)
    return peak
