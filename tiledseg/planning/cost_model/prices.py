"""Seconds that tiles and blocks of one network take on a machine, part by part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import NamedTuple

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels, tensor_shapes
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.step.cost import FLOPS_PER_MULTIPLY_ADD, backward_passes
from tiledseg.planning.step.halo_traffic import SentBytes, inputs_by_node, tensors_of
from tiledseg.planning.step.rank_steps import RankSteps
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
        return StepTime(*(factor * part for part in self))


def sum_of(times: Iterable[StepTime]) -> StepTime:
    """Add up times, one after the other."""
    return StepTime(*map(sum, zip(StepTime(), *times, strict=True)))


class NodeWork(NamedTuple):
    """The work of a node: channels of its output; bytes moved and operations, forward and backward."""

    channels: int
    forward: tuple[int, int] = (0, 0)
    backward: tuple[int, int] = (0, 0)


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
        sources = (channels[first] for first, *_ in graph.sources)
        return [0 if n.frozen else n.layer.parameters(c) for n, c in zip(graph.nodes, sources, strict=True)]

    def nodes(self, context: tuple[int, int]) -> list[tuple[float, float]]:
        """Price each node in a training step on one context of shape (height, width), forward and backward: the sum of
        a weight's gradients counts for its node, reading for the first node, the loss for the last one."""
        times, pixels = self._layers(graph_work(self.graph, self.bands, context, self.width)), context[0] * context[1]
        times = [(f, b + self._weights(_GRADIENT, [n])) for (f, b), n in zip(times, self.weights, strict=True)]
        ends = (0, self._reading(pixels), 0.0), (-1, *self._loss(pixels, pixels))
        for k, forward, backward in ends:
            times[k] = times[k][0] + forward, times[k][1] + backward
        return times

    def tile(self, context: tuple[int, int], owned: int) -> StepTime:
        """Price a training step's work on one context of shape (height, width) that owns so many pixels."""
        works = graph_work(self.graph, self.bands, context, self.width)
        return self._with_ends(works, context[0] * context[1], owned)

    def block(self, row: RankSteps, col: RankSteps, sent: SentBytes) -> StepTime:
        """Price the same of a rank's block of an image in layer mode, which sends so much, without all-reduces.
        Exchanges copy windows, and norms take another look at what they take and give."""
        steps, graph, kernel = list(zip(row, col, strict=True)), self.graph, self.machine.kernel
        computed = [r.computed * c.computed for r, c in steps]
        windows = [[a.window * b.window for a, b in zip(r.inputs, c.inputs, strict=True)] for r, c in steps]
        works = node_works(graph, self.bands, computed, windows, self.width)
        first, last = row[0].inputs[0].held * col[0].inputs[0].held, row[-1].given * col[-1].given
        copies = sum(
            (1 + tensor.has_gradient) * kernel(2 * tensor.pixel_bytes * r.window * c.window)
            for _, r, c, tensor in inputs_by_node(graph, row, col, tensors_of(graph, self.bands, self.width))
            if r.moves or c.moves
        )
        norms = [w.forward[0] for layer, w in zip(graph.layers, works, strict=True) if layer.statistics is not None]
        copies += 2 * sum(map(kernel, norms)) * (self.ranks > 1)
        messages = self.machine.taking_turns(self.ranks) * copies + self.machine.message_seconds(sent, self.ranks)
        return self._with_ends(works, first, last)._replace(messages=messages)

    def _with_ends(self, works: Sequence[NodeWork], pixels: int, owned: int) -> StepTime:
        forward, backward = map(sum, zip(*self._layers(works), self._loss(pixels, owned), strict=True))
        return StepTime(forward, backward, self._reading(pixels), self._weights(_GRADIENT, self.weights))

    def _layers(self, works: Sequence[NodeWork]) -> list[tuple[float, float]]:
        kernel = self.machine.kernel
        return [(kernel(*work.forward, work.channels), kernel(*work.backward, work.channels)) for work in works]

    def _loss(self, pixels: int, owned: int) -> tuple[float, float]:
        """Price the loss over the pixels that are owned, to which the output is cropped."""
        size = tensor_channels(self.graph, self.bands)[-1] * self.width
        forward, backward, crop = (
            self.machine.kernel(times * size) for times in (6 * owned, 4 * owned, 3 * pixels * (owned < pixels))
        )
        return forward, backward + crop

    def _reading(self, pixels: int) -> float:
        """Price a context from its raster, unless a free core reads meanwhile, to the network's input."""
        values, machine = self.bands * pixels, self.machine
        entering = machine.kernel(2 * values * wide_bytes(self.width))
        return entering + (0.0 if machine.has_free_core(self.ranks) else machine.reading * values)

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


@lru_cache(maxsize=256)
def graph_work(graph: Graph, bands: int, context: tuple[int, int], value_bytes: int) -> tuple[NodeWork, ...]:
    """Count the work of each node on a context of shape (height, width)."""
    pixels = [height * width for _, height, width in tensor_shapes(graph, bands, *context)]
    taken = [[pixels[source] for source in sources] for sources in graph.sources]
    return node_works(graph, bands, pixels[1:], taken, value_bytes)


def node_works(
    graph: Graph, bands: int, computed: Sequence[int], taken: Sequence[Sequence[int]], value_bytes: int
) -> tuple[NodeWork, ...]:
    """Count the work of nodes that compute so many pixels each, of inputs of so many. A node that hands its input on
    has none."""
    channels, tensors, works = tensor_channels(graph, bands), tensors_of(graph, bands, value_bytes), list[NodeWork]()
    for k, (layer, sources) in enumerate(zip(graph.layers, graph.sources, strict=True)):
        if layer.hands_on or not computed[k]:
            works.append(NodeWork(channels[k + 1]))
            continue
        out, wanted = computed[k] * tensors[k + 1].pixel_bytes, graph.wants_gradient[k + 1]
        inputs = [pixels * tensors[source].pixel_bytes for source, pixels in zip(sources, taken[k], strict=True)]
        kept = out * layer.keeps_output + sum(inputs[index] for index in layer.kept_inputs)
        operations = FLOPS_PER_MULTIPLY_ADD * layer.multiply_adds(channels[sources[0]]) * computed[k]
        passes = backward_passes(graph, k) if operations else int(wanted)
        moved = out + sum(inputs)
        back = ((moved + kept) * bool(wanted and passes), passes * operations)
        works.append(NodeWork(channels[k + 1], (moved, operations), back))
    return tuple(works)
