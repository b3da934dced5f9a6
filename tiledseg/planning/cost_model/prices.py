"""What tiles and blocks of one network take on a machine, in seconds, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import count_trained, tensor_channels
from tiledseg.planning.cost_model.layer_work import LayerWork, graph_work, nodes_work
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.profile import Pass, Profile
from tiledseg.planning.cost_model.step_time import StepTime
from tiledseg.planning.step.halo_traffic import (
    Sent,
    TensorAt,
    given_back_in_place,
    inputs_by_node,
    inputs_of,
    made_by_activation,
    statistic_sums,
    tensors_of,
)
from tiledseg.planning.step.rank_steps import RankSteps
from tiledseg.records import dataclass
from tiledseg.units.widths import DOUBLE_BYTES, wide_bytes

BUCKET_BYTES = 8 << 20  # of an all-reduce: `gradients.BUCKET_BYTES`
_LOSS, _COPY = (6.0, 4.0), (2.0, 2.0)  # times its values' bytes that a loss moves, and a copy, forward and backward


@dataclass(frozen=True)
class Prices:
    """Of a network with `bands`, in values of `width` bytes, on one of `ranks` ranks of a machine."""

    graph: Graph
    bands: int
    width: int
    machine: Machine
    ranks: int = 1

    @cached_property
    def _known(self) -> Profile | None:
        """Of the machine, with so many ranks at work."""
        return self.machine.profile.of(self.ranks) if self.machine.profile else None

    @cached_property
    def weights(self) -> int:
        """That are trained."""
        return count_trained(self.graph, self.bands)

    @cached_property
    def weight_tensors(self) -> int:
        channels = tensor_channels(self.graph, self.bands)
        nodes = zip(self.graph.nodes, self.graph.sources, strict=True)
        return sum(2 * bool(node.layer.parameters(channels[s[0]])) for node, s in nodes if not node.frozen)

    def nodes(self, context: tuple[int, int]) -> list[Pass]:
        """A training step's work on one context, of each node by itself: with a weight's gradient, added up, the first
        one with reading, the last one with the loss. Where there is no profile as without those."""
        machine, shapes = self.machine, tensor_channels(self.graph, self.bands)
        works = graph_work(self.graph, self.bands, context, self.width)
        found = [machine.layer(work, self.ranks) for work in works]
        for k, (node, sources) in enumerate(zip(self.graph.nodes, self.graph.sources, strict=True)):
            weights = 0 if node.frozen else node.layer.parameters(shapes[sources[0]])
            found[k] = found[k].plus(Pass(0.0, machine.gradient_sum(weights, 2 * bool(weights))))
        found[0] = found[0].plus(Pass(self._reading(context[0] * context[1], True)))
        loss = machine.values("loss", shapes[-1], works[-1].pixels, self.width, _LOSS, self.ranks)
        return [*found[:-1], found[-1].plus(loss)]

    def tile(self, context: tuple[int, int], owned: int, read: bool = True) -> StepTime:
        """A training step's work on one context of shape (height, width) that owns so many pixels; `read` from a
        raster."""
        found = self.machine.layers(graph_work(self.graph, self.bands, context, self.width), self.ranks)
        return self._with_ends(found, context[0] * context[1], owned, read)

    def block(self, row: RankSteps, col: RankSteps) -> StepTime:
        """The same of a rank's block of an image in layer mode, without messages."""
        computed = [r.computed * c.computed for r, c in zip(row, col, strict=True)]
        given = [
            [a.window * b.window for a, b in zip(r.inputs, c.inputs, strict=True)]
            for r, c in zip(row, col, strict=True)
        ]
        works = nodes_work(self.graph, self.bands, computed, given, self.width)
        found = self.machine.layers(works, self.ranks)
        first, last = (row[0].inputs[0].held * col[0].inputs[0].held), row[-1].given * col[-1].given
        time = self._with_ends(found, first, last, True)
        return time._replace(norms=self._norms(works), copies=self._windows(row, col))

    def _with_ends(self, found: Pass, pixels: int, owned: int, read: bool) -> StepTime:
        machine, classes = self.machine, tensor_channels(self.graph, self.bands)[-1]
        loss = machine.values("loss", classes, owned, self.width, _LOSS, self.ranks)
        cropped = pixels if owned < pixels else 0  # the gradient of what is cropped: zeros, and a copy
        crop = machine.values("copy", classes, cropped, self.width, (0.0, 3.0), self.ranks)
        return StepTime(
            forward=found.forward,
            backward=found.backward,
            loss=loss.step + crop.backward,
            reading=self._reading(pixels, read),
            gradients=machine.gradient_sum(self.weights, self.weight_tensors),
        )

    def _reading(self, pixels: int, read: bool) -> float:
        """From a raster, and what is made of it before the network."""
        machine = self.machine
        entering = machine.values("entering", self.bands, pixels, wide_bytes(self.width), (2.0, 0.0), self.ranks)
        return entering.forward + (machine.reading(self.bands * pixels, 1, self.ranks) if read else 0.0)

    def _windows(self, row: RankSteps, col: RankSteps) -> float:
        """Of exchanges: each takes its time, and copies."""
        known = self._known
        if known is None:
            return 0.0
        moved = windows_copied(self.graph, self.bands, self.width, row, col)
        fixed = known.exchange * exchanges_made(self.graph, self.bands, row, col)
        if known.window:
            return fixed + known.window * sum(tensor.pixel_bytes * pixels for tensor, pixels in moved)
        copies = (
            self.machine.values("copy", tensor.channels, pixels, tensor.value_bytes, _COPY, self.ranks)
            for tensor, pixels in moved
        )
        return fixed + self.machine.by_the_clock(self.ranks) * sum(copy.forward for copy in copies)

    def _norms(self, works: Sequence[LayerWork]) -> float:
        """Of statistics that ranks sum, besides the all-reduces."""
        known = self._known
        if known is None or self.ranks == 1:
            return 0.0
        calls = statistic_sums(self.graph, self.bands, self.ranks).step.messages
        return known.norm * calls + known.summed * summed_bytes(self.graph, works)

    def messages(self, sent: Sent) -> float:
        return self.machine.message_seconds(sent, self.ranks)

    def step(self, image: StepTime, images: int, backward: float) -> StepTime:
        """Of a step of so many images a rank, one after the other, with what comes once a step; `backward`: seconds of
        the last backward pass, in which sums of gradients start."""
        size = DOUBLE_BYTES * self.weights
        whole = self.machine.all_reduce_seconds(1, size, self.ranks)
        hidden = self.machine.hidden(whole, ceil(size / BUCKET_BYTES), backward, self.ranks)
        once = StepTime(update=self.machine.update(self.weights, self.weight_tensors), all_reduce=whole - hidden)
        return image.times(images).plus(once)

    def seconds(self, step: StepTime) -> float:
        """By the clock, where ranks may share cores."""
        return step.longer(self.machine.by_the_clock(self.ranks)).seconds

    def longest(self, times: Sequence[StepTime]) -> StepTime:
        return max(times, key=lambda time: time.seconds)


def exchanges_made(graph: Graph, bands: int, row: RankSteps, col: RankSteps) -> int:
    """In which a rank takes part in a training step."""
    inputs = inputs_of(graph, row, col, tensors_of(graph, bands))
    return sum(1 + tensor.has_gradient for r, c, tensor in inputs if r.moves or c.moves)


def windows_copied(graph: Graph, bands: int, width: int, row: RankSteps, col: RankSteps) -> list[tuple[TensorAt, int]]:
    """Each window into which a rank copies its block in the exchanges of a training step, or of whose gradient it
    copies the block's, of which tensor and of how many pixels."""
    found = []
    for k, r, c, tensor in inputs_by_node(graph, row, col, tensors_of(graph, bands, width)):
        if (r.moves or c.moves) and not made_by_activation(graph, k, r, c):
            back = tensor.has_gradient and not given_back_in_place(graph, k, r, c)
            found += [(tensor, r.window * c.window)] * (1 + back)
    return found


def summed_bytes(graph: Graph, works: Sequence[LayerWork]) -> int:
    """Of the tensors whose statistics ranks sum."""
    return sum(
        work.forward_bytes for layer, work in zip(graph.layers, works, strict=True) if layer.statistics is not None
    )
