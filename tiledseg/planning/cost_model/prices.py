"""Seconds that tiles and blocks of one network take on a machine, part by part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.step.cost import ForwardWalk, tile_walk
from tiledseg.units import DOUBLE_BYTES, wide_bytes

BUCKET_BYTES = 8 << 20  # of an all-reduce: `gradients.BUCKET_BYTES`
_GRADIENT, _UPDATE = 20, 76  # bytes a weight: its gradient added to a float64 sum, and a step of AdamW


class StepTime(NamedTuple):
    """The seconds of a step on the rank that takes longest.

    `forward`, `backward`: of layers and the loss. `reading`: rasters, and preparing them for the network. `update`:
    adding up gradients of tiles, and the optimizer. `again`: computing once more, and waiting for a store, where memory
    is short. `messages`: halos, their copies, and statistics of norms. `all_reduce`: of gradients, the part that no
    computing hides. `waiting`: of a pipeline's ranks, for each other.
    """

    forward: float = 0.0
    backward: float = 0.0
    reading: float = 0.0
    update: float = 0.0
    again: float = 0.0
    messages: float = 0.0
    all_reduce: float = 0.0
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    def times(self, factor: float) -> StepTime:
        return StepTime(*[factor * part for part in self])


def sum_of(times: Iterable[StepTime]) -> StepTime:
    """Add up times, one after the other."""
    return StepTime(*map(sum, zip(StepTime(), *times, strict=True)))


@dataclass(frozen=True)
class Prices:
    """Seconds of parts of a step: of a network with `bands`, in values of `width` bytes, on one of `ranks` ranks."""

    graph: Graph
    bands: int
    width: int
    machine: Machine
    ranks: int = 1

    @cached_property
    def weights(self) -> list[int]:
        """Count the weights of each node that are trained."""
        graph, channels = self.graph, tensor_channels(self.graph, self.bands)
        sources = [channels[first] for first, *_ in graph.sources]
        return [0 if n.frozen else n.layer.parameters(c) for n, c in zip(graph.nodes, sources, strict=True)]

    def nodes(self, context: tuple[int, int]) -> list[tuple[float, float]]:
        """Price each node in a training step on one context of shape (height, width), forward and backward: the sum of
        a weight's gradients counts for its node, reading for the first node, the loss for the last one."""
        times, pixels = tile_walk(self.graph, self.bands, context, self.width).costs, context[0] * context[1]
        nodes = [self.machine.node(cost) for cost in times]
        nodes = [(f, b + self._weights(_GRADIENT, [n])) for (f, b), n in zip(nodes, self.weights, strict=True)]
        reading, ahead, back = self._ends(pixels, pixels)
        nodes[0] = nodes[0][0] + reading, nodes[0][1]
        nodes[-1] = nodes[-1][0] + ahead, nodes[-1][1] + back
        return nodes

    def tile(self, context: tuple[int, int], owned: int) -> StepTime:
        """Price a training step's work on one context of shape (height, width) that owns so many pixels."""
        return self.walked(tile_walk(self.graph, self.bands, context, self.width), owned)

    def walked(self, walk: ForwardWalk, owned: int) -> StepTime:
        """Price a training step's work on a tile or on a rank's block, without messages."""
        height, width = walk.made[0].size
        reading, *loss = self._ends(height * width, owned)
        nodes = [self.machine.node(cost) for cost in walk.costs]
        forward, backward = map(sum, zip(*nodes, loss, strict=True))
        return StepTime(forward, backward, reading, self._weights(_GRADIENT, self.weights))

    def _ends(self, pixels: int, owned: int) -> tuple[float, float, float]:
        """Price the ends of a network on a context: from its raster, unless a free core reads meanwhile, to the input;
        the loss over the pixels that are owned, to which the output is cropped, forward and backward."""
        machine, values, size = (
            self.machine,
            self.bands * pixels,
            self.width * tensor_channels(self.graph, self.bands)[-1],
        )
        entering = machine.kernel(2 * values * wide_bytes(self.width))
        entering += 0.0 if machine.has_free_core(self.ranks) else machine.reading * values
        crop = machine.kernel(3 * size * pixels) if owned < pixels else 0.0
        return entering, machine.kernel(6 * size * owned), machine.kernel(4 * size * owned) + crop

    def _weights(self, moved: int, weights: Sequence[int]) -> float:
        """Price a pass over the weights of nodes, of two tensors each, which moves so many bytes a weight."""
        launches = 2 * sum(map(bool, weights)) * self.machine.launch
        return launches + moved * sum(weights) / self.machine.memory_bandwidth

    def step(self, image: StepTime, images: int, backward: float) -> StepTime:
        """Price a step of so many images a rank, one after the other, and what comes once a step; `backward`: seconds
        of the last backward pass, which hides sums of gradients, of all buckets but the last one."""
        size, machine = DOUBLE_BYTES * sum(self.weights), self.machine
        whole, buckets, hidden = machine.all_reduce_seconds(1, size, self.ranks), ceil(size / BUCKET_BYTES), 0.0
        if machine.known and buckets and machine.has_free_core(self.ranks):
            hidden = min(whole * (buckets - 1) / buckets, backward)
        once = StepTime(update=self._weights(_UPDATE, self.weights), all_reduce=whole - hidden)
        return sum_of((image.times(images), once))

    def seconds(self, step: StepTime) -> float:
        """Return a step's seconds by the clock, where ranks may share cores: what ranks do together takes its time
        anyhow."""
        together = step.messages + step.all_reduce + step.waiting
        return self.machine.taking_turns(self.ranks) * (step.seconds - together) + together
