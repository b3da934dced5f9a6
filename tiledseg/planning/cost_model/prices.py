"""Seconds that tiles and blocks of one network take on a machine, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import count_trained, tensor_channels, tensor_shapes
from tiledseg.planning.cost_model.machine import LayerWork, Machine, Pass
from tiledseg.planning.cost_model.step_time import StepTime
from tiledseg.planning.step.cost import backward_passes
from tiledseg.planning.step.halo_traffic import (
    SentBytes,
    TensorAt,
    given_back_in_place,
    inputs_by_node,
    tensors_of,
)
from tiledseg.planning.step.rank_steps import RankSteps
from tiledseg.units.widths import DOUBLE_BYTES, wide_bytes

BUCKET_BYTES = 8 << 20  # of an all-reduce: `gradients.BUCKET_BYTES`
_LOSS, _COPY, _CROP, _ENTERING = (6, 4), 2, 3, 2  # bytes moved, as multiples of a tensor's bytes


@dataclass(frozen=True)
class Prices:
    """Seconds of parts of a step: of a network with `bands`, in values of `width` bytes, on one of `ranks` ranks."""

    graph: Graph
    bands: int
    width: int
    machine: Machine
    ranks: int = 1

    @cached_property
    def weights(self) -> int:
        """Count the weights that are trained."""
        return count_trained(self.graph, self.bands)

    @cached_property
    def weight_tensors(self) -> int:
        channels = tensor_channels(self.graph, self.bands)
        nodes = zip(self.graph.nodes, self.graph.sources, strict=True)
        return sum(2 * bool(node.layer.parameters(channels[s[0]])) for node, s in nodes if not node.frozen)

    def nodes(self, context: tuple[int, int]) -> list[Pass]:
        """Price each node in a training step on one context of shape (height, width): the sum of a weight's gradients
        counts for its node, reading for the first node, the loss for the last one."""
        machine, channels = self.machine, tensor_channels(self.graph, self.bands)
        found = [machine.layer(work) for work in graph_work(self.graph, self.bands, context, self.width)]
        for k, (node, sources) in enumerate(zip(self.graph.nodes, self.graph.sources, strict=True)):
            weights = 0 if node.frozen else node.layer.parameters(channels[sources[0]])
            found[k] = Pass(found[k].forward, found[k].backward + machine.gradient_sum(weights, 2 * bool(weights)))
        pixels, loss = context[0] * context[1], self._loss(context[0] * context[1])
        found[0] = Pass(found[0].forward + self._reading(pixels, True), found[0].backward)
        found[-1] = Pass(found[-1].forward + loss.forward, found[-1].backward + loss.backward)
        return found

    def tile(self, context: tuple[int, int], owned: int, read: bool = True) -> StepTime:
        """Price a training step's work on one context of shape (height, width) that owns so many pixels; `read` from a
        raster."""
        works = graph_work(self.graph, self.bands, context, self.width)
        return self._with_ends(works, context[0] * context[1], owned, read)

    def block(self, row: RankSteps, col: RankSteps) -> StepTime:
        """Price the same of a rank's block of an image in layer mode, without messages."""
        steps = list(zip(row, col, strict=True))
        computed = [r.computed * c.computed for r, c in steps]
        windows = [[a.window * b.window for a, b in zip(r.inputs, c.inputs, strict=True)] for r, c in steps]
        works = nodes_work(self.graph, self.bands, computed, windows, self.width)
        first, last = row[0].inputs[0].held * col[0].inputs[0].held, row[-1].given * col[-1].given
        time = self._with_ends(works, first, last, True)
        return time._replace(copies=self._copies(row, col), norms=self._norms(works))

    def _with_ends(self, works: Sequence[LayerWork], pixels: int, owned: int, read: bool) -> StepTime:
        passes, loss = [self.machine.layer(work) for work in works], self._loss(owned)
        classes = tensor_channels(self.graph, self.bands)[-1]
        crop = self.machine.kernel(_CROP * classes * pixels * self.width) if owned < pixels else 0.0
        return StepTime(
            forward=sum(each.forward for each in passes),
            backward=sum(each.backward for each in passes),
            loss=loss.step + crop,
            reading=self._reading(pixels, read),
            gradients=self.machine.gradient_sum(self.weights, self.weight_tensors),
        )

    def _loss(self, pixels: int) -> Pass:
        size = tensor_channels(self.graph, self.bands)[-1] * pixels * self.width
        return Pass(*(self.machine.kernel(times * size) for times in _LOSS)) if pixels else Pass()

    def _reading(self, pixels: int, read: bool) -> float:
        """Price a context from its raster, unless a free core reads meanwhile, to the network's input."""
        values, machine = self.bands * pixels, self.machine
        entering = machine.kernel(_ENTERING * values * wide_bytes(self.width))
        return entering + (0.0 if not read or machine.has_free_core(self.ranks) else machine.reading * values)

    def _copies(self, row: RankSteps, col: RankSteps) -> float:
        """Price the windows that exchanges copy; each rank copies on its own core, or takes turns."""
        copied = windows_copied(self.graph, self.bands, self.width, row, col)
        sizes = (_COPY * tensor.pixel_bytes * pixels for tensor, pixels in copied)
        return self.machine.taking_turns(self.ranks) * sum(map(self.machine.kernel, sizes))

    def _norms(self, works: Sequence[LayerWork]) -> float:
        """Price the statistics that ranks sum, forward and backward, without the all-reduces: another look at what a
        norm takes and gives."""
        if self.ranks == 1:
            return 0.0
        norms = [work for layer, work in zip(self.graph.layers, works, strict=True) if layer.statistics is not None]
        return (
            2 * self.machine.taking_turns(self.ranks) * sum(self.machine.kernel(work.forward_bytes) for work in norms)
        )

    def messages(self, sent: SentBytes) -> float:
        """Price messages that a rank sends one after the other."""
        return self.machine.message_seconds(sent, self.ranks)

    def step(self, image: StepTime, images: int, backward: float) -> StepTime:
        """Price a step of so many images a rank, one after the other, and what comes once a step; `backward`: seconds
        of the last backward pass, which hides sums of gradients."""
        size = DOUBLE_BYTES * self.weights
        whole = self.machine.all_reduce_seconds(1, size, self.ranks)
        hidden = self.machine.hidden(whole, ceil(size / BUCKET_BYTES), backward, self.ranks)
        once = StepTime(update=self.machine.update(self.weights, self.weight_tensors), all_reduce=whole - hidden)
        return image.times(images).plus(once)

    def seconds(self, step: StepTime) -> float:
        """Return a step's seconds by the clock, where ranks may share cores."""
        return step.longer(self.machine.taking_turns(self.ranks)).seconds

    def longest(self, times: Sequence[StepTime]) -> StepTime:
        return max(times, key=lambda time: time.seconds)


@lru_cache(maxsize=256)
def graph_work(graph: Graph, bands: int, context: tuple[int, int], value_bytes: int) -> tuple[LayerWork, ...]:
    """Count the work of each node on a context of shape (height, width)."""
    pixels = [height * width for _, height, width in tensor_shapes(graph, bands, *context)]
    taken = [[pixels[source] for source in sources] for sources in graph.sources]
    return nodes_work(graph, bands, pixels[1:], taken, value_bytes)


def nodes_work(
    graph: Graph, bands: int, computed: Sequence[int], taken: Sequence[Sequence[int]], value_bytes: int
) -> tuple[LayerWork, ...]:
    """Count the work of nodes that compute so many pixels each, of inputs of so many. A node that hands its input on
    has none."""
    channels, tensors, works = tensor_channels(graph, bands), tensors_of(graph, bands, value_bytes), list[LayerWork]()
    for k, (layer, sources) in enumerate(zip(graph.layers, graph.sources, strict=True)):
        if layer.hands_on or not computed[k]:
            works.append(LayerWork(channels[k + 1], 0, 0, 0, 0))
            continue
        wanted, out = graph.wants_gradient[k + 1], computed[k] * tensors[k + 1].pixel_bytes
        inputs = [pixels * tensors[source].pixel_bytes for source, pixels in zip(sources, taken[k], strict=True)]
        kept = out * layer.keeps_output + sum(inputs[index] for index in layer.kept_inputs)
        multiply_adds = layer.multiply_adds(channels[sources[0]]) * computed[k]
        passes = backward_passes(graph, k) if multiply_adds else int(wanted)
        moved = out + sum(inputs)
        works.append(LayerWork(channels[k + 1], multiply_adds, passes, moved, (moved + kept) * wanted))
    return tuple(works)


def windows_copied(graph: Graph, bands: int, width: int, row: RankSteps, col: RankSteps) -> list[tuple[TensorAt, int]]:
    """List the windows into which a rank copies its block in the exchanges of a training step, or of whose gradient it
    copies the block's: tensor and pixels of each."""
    found = []
    for k, r, c, tensor in inputs_by_node(graph, row, col, tensors_of(graph, bands, width)):
        if r.moves or c.moves:
            back = tensor.has_gradient and not given_back_in_place(graph, k, r, c)
            found += [(tensor, r.window * c.window)] * (1 + back)
    return found
