"""The memory of one training step on a tile, a rank's block, a block of a tile, or a stage: one walk for all of them.

Counted are weights, the float64 sums of their gradients (`tiledseg.gradients`), the optimizer's values, all that
autograd keeps (see `walk.cost`), and on top of it the worst moment of the backward pass, whose gradients are walked
node by node. Not counted are the device's context, workspaces of its libraries, fragmentation, and communication
buffers. PyTorch's allocations check the walk.

Seconds follow from a node's work and the bytes that it reads and writes, at assumed speeds: only their ratio decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.joins import Join
from tiledseg.geometry.memory_policy import can_rebuild, is_cheap, makers, origins_of
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.planning.walk.cost import INDEX_BYTES, ForwardWalk, LayerCost, tile_walk
from tiledseg.planning.walk.cost_model import ASSUMED, Machine
from tiledseg.planning.walk.items import NEVER, Item, Walk, price
from tiledseg.units import DOUBLE_BYTES, copy_bytes, wide_bytes

FURTHER_OUTPUT = 3  # bytes that the loss keeps of an output but the first, by its size: measured (`training.objective`)


class Gradients(NamedTuple):
    """Bytes of gradients at a node: at its worst moment, before its own ones are made, and the most once what the node
    keeps is freed."""

    peak: int
    before: int
    after: int


def gradients_by_node(
    graph: Graph, costs: Sequence[LayerCost], bytes_per_value: int, first: int, stop: int, given: bool = False
) -> list[Gradients]:
    """Return the gradients of the nodes `first` to `stop`. The last entry is of the loss, with the bytes that it keeps
    until then, or of gradients that later stages send. `given`: the results' gradients are given, in place of a loss.

    The gradients of a tensor's several readers are added up in a new tensor. A stage receives a gradient of a tensor
    that it has sent from each reader, as if all were on stages of their own, and holds their sum until the end. It
    also holds the gradients of the tensors that it received until the end.
    """
    wants, wide = graph.wants_gradient, wide_bytes(bytes_per_value)
    bytes_of = [0, *[cost.output_bytes for cost in costs]]
    waiting: dict[int, int] = {}  # by tensor: the bytes that its gradient, made but not yet used, holds alone
    scattered: set[int] = set()  # tensors whose gradients are views of larger ones, or the loss's
    kept = sums = 0  # bytes that the loss keeps, and of the sums of gradients that later stages send
    if given or stop == len(graph):
        waiting = {tensor: bytes_of[tensor] for tensor in graph.results}
        scattered.update(() if given else graph.results)
        results = [costs[tensor - 1] for tensor in graph.results]
        start = sum(waiting.values())
        if not given:  # gradients of the outputs, the first one twice in the loss's width, and those of another loss
            (channels, height, width), loss = results[0].shape, graph.loss
            further = sum(result.output_bytes for result in results[1:])
            # Kept: log-probabilities of the first output, the sum of weights and the labels, and of further outputs.
            kept = (channels * height * width + 1) * wide + height * width * INDEX_BYTES
            kept += FURTHER_OUTPUT * further + math.ceil(loss.kept * height * width)
            start = height * width * (2 * channels * wide - INDEX_BYTES) + further  # the labels are freed
            start = max(0, start + math.ceil((loss.peak - loss.kept) * height * width))
    else:
        for tensor in graph.leaving(first, stop):
            if wants[tensor]:
                waiting[tensor] = sum([reader >= stop for reader in graph.readers[tensor]])
        start = sum([count * bytes_of[tensor] for tensor, count in waiting.items()])
        start += max([bytes_of[tensor] for tensor, count in waiting.items() if count > 1], default=0)
        sums, waiting = sum([bytes_of[tensor] for tensor in waiting]), dict.fromkeys(waiting, 0)
    moments = [Gradients(kept + start, kept, 0)]
    for k in reversed(range(first, stop)):
        layer, cost, sources = graph.layers[k], costs[k], graph.sources[k]
        before, gradient = sums + sum(waiting.values()), waiting.pop(k + 1, 0)
        transient = cost.memory.transient
        made = list[tuple[int, int, int]]()  # of each input's gradient: the tensor, bytes allocated, and held alone
        if wants[k + 1]:
            transient += cost.memory.unfolded
            shared = gradient  # a gradient in the output's memory counts for the tensor that is needed longest
            for index in sorted(range(len(sources)), key=sources.__getitem__):
                tensor, size = sources[index], cost.input_bytes[index]
                if not wants[tensor]:
                    continue
                if layer.gradient != "new":
                    crops = layer.crops[index] if isinstance(layer, Join) else 0
                    made.append((tensor, size if crops else 0, size if crops else shared))
                    shared = shared if crops else 0
                    continue
                _, allocated, held, _, _ = cost.memory
                allocated, held = size if allocated is None else allocated, size if held is None else held
                origin = graph.origins[tensor]
                if graph.overwrites[k] and origin > first and graph.layers[origin - 1].returns_view:
                    # Autograd copies the gradient, and twice more; a received one stays beside its copy.
                    allocated = (3 if gradient else 4) * size
                made.append((tensor, allocated, held))
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


ADAM_VALUES = 2  # values an optimizer keeps for each parameter: AdamW 2, SGD with momentum 1


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one training step, by purpose.

    `activations` is all that autograd keeps when the forward pass ends; `backward` is what the backward pass needs on
    top of that at its worst moment. `inputs`: tensors that a stage received, all that a recomputed one keeps.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    backward: int
    inputs: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.backward

    def kept(self, complete: int, inputs_only: int = 0) -> int:
        """Return the bytes of so many micro-batches with all their activations, and so many with their inputs only."""
        return complete * self.activations + inputs_only * self.inputs

    def needed(self, complete: int, inputs_only: int = 0) -> int:
        """Return all bytes, with so many micro-batches kept at once."""
        return self.total - self.activations + self.kept(complete, inputs_only)


@lru_cache(maxsize=1024)
def training_memory(graph: Graph, bands: int, context: tuple[int, int], bytes_per_value: int = 4) -> StepMemory:
    """Return the bytes of one training step on one context of (height, width), at their peak.

    Raises GeometryError where the context is no legal size for the network.
    """
    return memory_of(tile_walk(graph, bands, context, bytes_per_value))


@lru_cache(maxsize=256)
def memory_of(walk: ForwardWalk, run: tuple[int, int] | None = None) -> StepMemory:
    """Return the bytes of a training step that goes forward as `walk` does, by the memory policy of the graph. `run`:
    of the nodes (first, stop) alone, those of a stage. Strips of a rank's block, and its block of the input, do
    not count."""
    policy, uses = walk.graph.memory, _BackwardUses(walk, run)
    if policy is None or policy.keeps_all:
        base, rebuilding = uses.always(None)
        activations, peak = rebuilding[-1], max(base)
    else:
        items = uses.walk(ASSUMED)
        words = items.needed_words(policy)
        activations, peak = items.kept(words), price(items, words).peak
    weights, gradients, optimizer, _ = weight_memory(walk.graph, walk.bands, walk.value_bytes, run)
    inputs = walk.received(*run) if run and run[0] else walk.input_bytes
    return StepMemory(weights, gradients, optimizer, activations, peak - activations, inputs)


def block_peak(walk: ForwardWalk, is_last: bool) -> int:
    """Return the bytes at the worst moment of a block of a tile, beside the tensors that enter it. Gradients of what
    leaves are given, unless a loss follows."""
    return max(_BackwardUses(walk, given=not is_last).always(None)[0])


def network_walk(walk: ForwardWalk, machine: Machine = ASSUMED, run: tuple[int, int] | None = None) -> Walk:
    """Return the items of a forward walk of a tile, or of a rank's block. `run`: of the nodes (first, stop) alone,
    those of a stage: tensors that enter it cannot be recomputed there."""
    return _BackwardUses(walk, run).walk(machine)


class WeightMemory(NamedTuple):
    """Bytes of weights, with the cast copies that autocast makes and that are held: `copies`. Bytes of the sums of
    their gradients, and of the optimizer's values."""

    weights: int
    gradients: int
    optimizer: int
    copies: int


@lru_cache(maxsize=1024)
def weight_memory(graph: Graph, bands: int, width: int, run: tuple[int, int] | None = None) -> WeightMemory:
    """Return the bytes of the weights of a network, or of the nodes of a run, whatever the tiles."""
    channels, every, trained, cast = tensor_channels(graph, bands), 0, 0, 0
    for k in range(*(run or (0, len(graph)))):
        count, frozen = graph.layers[k].counts(channels[graph.sources[k][0]]).weights, graph.nodes[k].frozen
        every, trained = every + count, trained + count * (not frozen)
        # A copy is held of weights that are trained, or that the gradient of an input needs; others last a moment.
        cast += count * (not frozen or any(graph.wants_gradient[source] for source in graph.sources[k]))
    copies, wide = cast * copy_bytes(width), wide_bytes(width)
    return WeightMemory(every * wide + copies, trained * DOUBLE_BYTES, trained * wide * ADAM_VALUES, copies)


def fixed_memory(graph: Graph, bands: int, bytes_per_value: int) -> int:
    """Return the bytes of weights, of the sums of their gradients and of the optimizer's values, whatever the tiles."""
    return sum(weight_memory(graph, bands, bytes_per_value)[:3])


class _BackwardUses:
    """The nodes `ran` in a run of a forward walk, and the uses of their data in its backward pass.

    `sizes`: bytes of each tensor by its home. `uses`: the moments at which the backward pass uses it. `large`: bytes
    kept inside each node that keeps as many as a tensor has.
    """

    def __init__(self, walk: ForwardWalk, run: tuple[int, int] | None = None, given: bool = False) -> None:
        graph = self.graph = walk.graph
        self.forward, self.place = walk, graph.homes
        self.first, stop = run or (0, len(graph))  # a run's moments are counted from its first node
        self.ran = {k: walk.ran[k] for k in range(self.first, stop) if k in walk.ran}
        steps = run or (0, len(walk.nodes))
        self.gradients = gradients_by_node(walk.walked, walk.costs, walk.value_bytes, *steps, given)
        self.sizes: dict[int, int] = {}
        self.uses: dict[int, list[int]] = {}
        self.large = {k: ran.large for k, ran in self.ran.items() if ran.large}
        for ran in self.ran.values():
            used = dict[int, None]()
            for tensor, source in ran.kept:
                assert tensor.home is not None, "a tensor of the network"
                has_entered = run is not None and source <= self.first  # it has memory of its own
                self.sizes[tensor.home] = tensor.bytes if has_entered else tensor.memory
                used[tensor.home] = None
            for home in used:
                self.uses.setdefault(home, []).append(ran.moment - self.first)

    def moment(self, k: int) -> int:
        return self.ran[k].moment - self.first

    def walk(self, machine: Machine) -> Walk:
        """Return the items of the backward pass."""
        costs = self.forward.costs
        spans = {k: costs[ran.first : ran.moment + 1] for k, ran in self.ran.items()}
        self.seconds = {k: sum(machine.node(cost)[0] for cost in span) for k, span in spans.items()}
        for k, ran in self.forward.ran.items():
            self.sizes.setdefault(self.place[k + 1], ran.made.memory)
        self.sizes.setdefault(0, self.forward.input_bytes)
        after = self._first_uses()
        order = sorted(home for home in after if home)
        number = {home: index for index, home in enumerate(order)}
        items = [self._tensor_item(home, after[home], number) for home in order]
        items += [self._inside_item(node, number) for node in self.large]
        received = [self._rebuild_price(home)[2] for home in order] + [self.ran[node].received for node in self.large]
        stays = {item.waits_from: 0 for item in items}
        for item, size in zip(items, received, strict=True):  # bytes that arrived for an item stay
            stays[item.waits_from] += size
        base, rebuilding = self.always(stays)
        return Walk(tuple(items), base, rebuilding, self.graph, sum(self.seconds.values()))

    def _first_uses(self) -> dict[int, int]:
        """Return the moment of the first use of each home that the backward pass or a recomputed item reads."""
        after: dict[int, int] = {}
        using: list[list[int]] = [[] for _ in self.graph.names]  # moments at which something is recomputed from a home
        for node in self.large:
            for source in self.graph.sources[node]:
                using[self.place[source]].append(self.moment(node))
        for home in reversed(range(len(self.graph.names))):
            if home in self.uses:
                after[home] = max(self.uses[home])
            elif using[home] and self.place[home] == home:
                after[home] = min(using[home])
            if home in after and self._is_made(home):
                for origin in origins_of(self.graph)[home]:
                    using[origin].append(min(self.uses.get(home, [after[home]])))
        return after

    def _is_made(self, home: int) -> bool:
        """Return True if the nodes of the run alone make the tensor."""
        return all(k in self.ran for k in makers(self.graph)[home])

    def _rebuild_price(self, home: int) -> tuple[float, int, int]:
        """Return the price of recomputing a tensor: seconds, bytes besides it for the moment, and bytes received for it
        from other ranks, which stay."""
        layers, before, most, seconds, received = self.graph.layers, 0, 0, 0.0, 0
        for k in (k for k in self.ran if self.place[k + 1] == home):
            ran = self.ran[k]
            writes = before and (layers[k].hands_on or self.graph.overwrites[k])
            most = max(most, before + ran.fresh + (0 if writes else ran.made.bytes))
            before = ran.made.bytes
            seconds += self.seconds[k]
            received += ran.received
        return seconds, max(0, most - self.sizes[home]), received

    def _tensor_item(self, home: int, after: int, number: dict[int, int]) -> Item:
        graph, size, used = self.graph, self.sizes[home], home in self.uses
        name = graph.names[home]
        if not self._is_made(home):
            return Item(name, size, after, math.inf if used else NEVER, used=used, home=home)
        seconds, work, received = self._rebuild_price(home)
        parents = tuple(number[origin] for origin in origins_of(graph)[home] if origin in number)
        again, cheap = seconds if can_rebuild(graph, home) else math.inf, is_cheap(graph, home)
        return Item(name, size - received, after, again, parents, work, used=used, cheap=cheap, home=home)

    def _inside_item(self, node: int, number: dict[int, int]) -> Item:
        """Return the item of the bytes that a node keeps besides its tensors; a second run of the node makes them."""
        graph, ran, size = self.graph, self.ran[node], self.large[node]
        homes_read = dict.fromkeys(self.place[source] for source in graph.sources[node])
        parents = tuple(number[home] for home in homes_read if home in number)
        again = self.seconds[node] if graph.layers[node].can_rebuild else math.inf
        work = max(0, ran.fresh - size) + ran.made.bytes * ran.copies
        name = f"{graph.nodes[node].name} (inside)"
        return Item(name, size - ran.received, self.moment(node), again, parents, work, node=node)

    def always(self, stays: dict[int, int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes that each moment holds whatever is chosen: at its worst, and before the node's gradients.
        `stays`: bytes of items that stay from a moment on; None where everything is kept. The last moment is that of
        the loss."""
        last = len(self.gradients)
        more, freed = [0] * (last + 1), [0] * last  # bytes kept for a node are freed once it has run backward
        spans = [(size, min(at, last), last) for at, size in (stays or {}).items()]
        for home, moments in self.uses.items():
            first = min(moments)
            spans.append((self.sizes[home], first, last if home == 0 else max(moments) + 1))  # the input stays
            freed[first] += self.sizes[home]
        for ran in self.ran.values():
            moment = ran.moment - self.first
            if ran.large or ran.small:
                spans += [(ran.large, moment, moment + 1), (ran.small, moment, last)]
                freed[moment] += ran.large + ran.small
        for size, start, stop in spans:
            more[start] += size
            more[last if stays is None else stop] -= size
        used = list(accumulate(more[:-1]))
        every = list(zip(used, freed, self.gradients, strict=True))
        base = tuple([here + max(each.peak, each.after - gone) for here, gone, each in every])
        return base, tuple([here + each.before for here, _, each in every])
