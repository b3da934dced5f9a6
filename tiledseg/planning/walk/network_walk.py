"""The backward pass of a forward walk as items: the tensors that it uses, when, and what recomputing each takes.

There are two kinds of items: tensors (by their `home`, see `geometry.memory_policy`), and bytes that a node keeps
`inside`, as many as a tensor's: a cast copy, say. Smaller ones are always kept. Seconds follow from a node's work and
the bytes that it reads and writes, at assumed speeds: only their ratio decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import can_rebuild, homes, is_cheap, makers, origins_of, spread
from tiledseg.geometry.memory_words import KEEP, REBUILD, MemoryPolicy
from tiledseg.planning.cost_model.machine import FLOPS_PER_MULTIPLY_ADD
from tiledseg.planning.step.backward_walk import gradients_by_node
from tiledseg.planning.step.cost import INDEX_BYTES, ForwardWalk, LayerCost, Ran, loss_bytes
from tiledseg.planning.walk.items import Item, Walk

NEVER = 1e6  # seconds that mark a tensor which cannot be recomputed here: it is kept where a recomputed one needs it


@dataclass(frozen=True)
class Speed:
    """The assumed speed of a rank: operations a second, and bytes a second of its memory."""

    flops: float = 10e12
    memory_bandwidth: float = 600e9

    @property
    def in_words(self) -> str:
        """The speed as words of a log."""
        return f"{self.flops / 1e9:,.0f} Gflop/s and {self.memory_bandwidth / 1e9:,.0f} GB/s of memory"

    def seconds(self, cost: LayerCost) -> float:
        """Return the seconds of a step, forward."""
        moved = sum(cost.input_bytes) + cost.output_bytes
        return max(cost.multiply_adds * FLOPS_PER_MULTIPLY_ADD / self.flops, moved / self.memory_bandwidth)


ASSUMED = Speed()


@dataclass(frozen=True)
class NetworkWalk:
    """A walk, and the tensor (`homes`) or node (`insides`) of each item, else None. `forward`: seconds of the forward
    pass."""

    graph: Graph
    walk: Walk
    homes: tuple[int | None, ...]
    insides: tuple[int | None, ...]
    forward: float

    def policy(self, choices: Sequence[str]) -> MemoryPolicy:
        """Return the policy of a choice for each item."""
        words = {home: choice for home, choice in zip(self.homes, choices, strict=True) if home is not None}
        inside = {node: choice for node, choice in zip(self.insides, choices, strict=True) if node is not None}
        return spread(
            self.graph,
            lambda home: words.get(home, KEEP),
            [inside.get(k, KEEP) for k in range(len(self.graph))],
        )

    def choices(self, policy: MemoryPolicy) -> tuple[str, ...]:
        """Return the word of a policy for each item; an item that cannot be recomputed here is kept."""
        words = (
            policy.tensors[home] if home is not None else policy.inside[node or 0]
            for home, node in zip(self.homes, self.insides, strict=True)
        )
        return tuple(
            KEEP if word == REBUILD and item.rebuild >= NEVER else word
            for item, word in zip(self.walk.items, words, strict=True)
        )

    def kept(self, choices: Sequence[str]) -> int:
        """Return the bytes in memory when the forward pass has ended, by a choice for each item."""
        pairs = zip(self.walk.items, choices, strict=True)
        return self.walk.rebuilding[-1] + sum(item.bytes for item, choice in pairs if choice == KEEP)

    def without_insides(self) -> NetworkWalk:
        """Return the walk in which nothing kept inside nodes can be recomputed."""
        pairs = zip(self.walk.items, self.insides, strict=True)
        items = tuple(item if node is None else replace(item, rebuild=math.inf) for item, node in pairs)
        return replace(self, walk=replace(self.walk, items=items))

    def lying(self, policy: MemoryPolicy) -> tuple[str, ...]:
        """Return `choices` without the kept items that no backward pass and no recomputed item needs."""
        choices, items = self.choices(policy), self.walk.items
        needed = [item.asked for item in items]
        for index in reversed(range(len(items))):
            if needed[index] and choices[index] == REBUILD:
                for parent in items[index].parents:
                    needed[parent] = True
        return tuple(choice if there else REBUILD for choice, there in zip(choices, needed, strict=True))


class WalkPass:
    """A forward pass as its backward pass finds it: of the nodes of a tile, of a rank's block, or of a run of a tile's
    nodes, a stage of a pipeline. Counted by each node alone, as `step.cost.keep_for_backward` counts what autograd
    keeps.

    `ran`: the nodes. `sizes`: bytes of each tensor by its home. `gradients`: their bytes at each moment; `loss`: those
    that the loss keeps. `moments`: of each home those at which the backward pass uses it. `large`, `small`: bytes kept
    inside nodes, as large as a tensor or not; `copies`: nodes whose large ones are more than windows.
    """

    def __init__(self, walk: ForwardWalk, speed: Speed, run: tuple[int, int] | None = None) -> None:
        self.graph, self.width = walk.graph, walk.value_bytes
        first, stop = run or (0, len(walk.graph))
        self.first = first  # a run's moments are counted from its first node
        self.ran = {k: walk.ran[k] for k in range(first, stop)}
        place, costs = homes(self.graph), walk.costs
        self.sizes = [walk.input_bytes, *(ran.made.bytes for ran in walk.ran)]
        for k, ran in enumerate(walk.ran):
            self.sizes[place[k + 1]] = ran.made.bytes  # the last of those that write over it
        self.seconds = {k: sum(map(speed.seconds, costs[ran.first : ran.moment + 1])) for k, ran in self.ran.items()}
        graph, ends = walk.walked, (first, stop) if run else (0, len(walk.walked))
        self.gradients = gradients_by_node(graph, costs, self.width, *ends)
        results = [costs[tensor - 1] for tensor in graph.results] if stop == len(self.graph) else []
        self.loss = loss_bytes(results, self.width) if results else 0
        self.moments: list[list[int]] = [[] for _ in self.graph.names]
        self.large: dict[int, int] = {}
        self.small: dict[int, int] = {}
        self.copies: set[int] = set()
        for k, ran in self.ran.items():
            if not self.graph.layers[k].hands_on and self.graph.wants_gradient[k + 1]:
                self._use(k, ran)

    def moment(self, k: int) -> int:
        return self.ran[k].moment - self.first

    def _use(self, k: int, ran: Ran) -> None:
        """Count what the backward pass of node `k` uses."""
        layer, made, moment = self.graph.layers[k], homes(self.graph)[k + 1], self.moment(k)
        if self.graph.overwrites[k]:
            self._use_tensor(made, moment)
            return
        besides = layer.kept_besides(ran.shape, self.width)
        copies = windows = 0
        for index in layer.kept_inputs:
            tensor = ran.brought[index]
            width = tensor.value_bytes if ran.over_ranks else layer.input_width(tensor.value_bytes, self.width)
            if width != tensor.value_bytes:
                copies += tensor.values * width
            elif tensor.home is None:
                windows += tensor.bytes
            else:
                self._use_tensor(tensor.home, moment)
        if layer.keeps_output:
            self._use_tensor(made, moment)
        is_large = besides >= INDEX_BYTES * min(math.prod(ran.shape), max(tensor.values for tensor in ran.brought))
        inside = copies + windows + besides * is_large
        if inside or is_large:
            self.large[k] = inside
        if not is_large:
            self.small[k] = besides
        if inside > windows:
            self.copies.add(k)

    def _use_tensor(self, home: int, moment: int) -> None:
        if moment not in self.moments[home]:
            self.moments[home].append(moment)

    def makes(self, home: int) -> bool:
        """True if these nodes alone make the tensor."""
        return all(k in self.ran for k in makers(self.graph)[home])

    def again(self, home: int) -> tuple[float, int, int]:
        """Return what recomputing a tensor takes: seconds, bytes besides it for the moment, and bytes that arrived for
        it from other ranks, which stay."""
        place, before, most = homes(self.graph), 0, 0
        nodes = [k for k in self.ran if place[k + 1] == home]
        for k in nodes:
            ran = self.ran[k]
            writes = before and (self.graph.layers[k].hands_on or self.graph.overwrites[k])
            most = max(most, before + ran.fresh + (0 if writes else ran.made.bytes))
            before = ran.made.bytes
        return (
            sum(self.seconds[k] for k in nodes if not self.graph.layers[k].hands_on),
            max(0, most - self.sizes[home]),
            sum(self.ran[k].noted for k in nodes),
        )


def network_walk(walk: ForwardWalk, speed: Speed = ASSUMED, run: tuple[int, int] | None = None) -> NetworkWalk:
    """Return the items of a forward walk. `run`: of the nodes (first, stop) alone, those of a stage: what enters it
    cannot be recomputed there."""
    return walk_of(WalkPass(walk, speed, run))


def walk_of(given: WalkPass) -> NetworkWalk:
    """The items of a pass."""
    graph = given.graph
    after = _after(given)
    order = [home for home in sorted(after) if home > 0]
    number = {home: index for index, home in enumerate(order)}
    items = [_tensor(given, home, after, number) for home in order]
    items += [_inside(given, node, number) for node in given.large]
    noted = [given.again(home)[2] for home in order] + [given.ran[node].noted for node in given.large]
    walk = _walk(items, noted, given)
    inside = tuple(given.large)
    nothing: tuple[None, ...] = (None,)
    seconds = sum(given.seconds.values())
    return NetworkWalk(graph, walk, (*order, *nothing * len(inside)), (*nothing * len(order), *inside), seconds)


def _after(given: WalkPass) -> dict[int, int]:
    """Of each home that matters the moment of its first use in the backward pass."""
    graph, moments = given.graph, given.moments
    place = homes(graph)
    after: dict[int, int] = {}
    inside: dict[int, list[int]] = {}
    for node in given.large:
        for source in graph.sources[node]:
            inside.setdefault(place[source], []).append(given.moment(node))
    children: dict[int, list[int]] = {}
    for home, origins in enumerate(origins_of(graph)):
        for origin in origins if given.makes(home) else ():
            children.setdefault(origin, []).append(home)

    def last(child: int) -> int:
        return min(moments[child], default=after[child])

    for home in reversed(range(len(graph.names))):
        using = [*inside.get(home, ()), *(last(child) for child in children.get(home, ()) if child in after)]
        if moments[home]:
            after[home] = max(moments[home])
        elif using and place[home] == home:
            after[home] = min(using)
    return after


def _tensor(given: WalkPass, home: int, after: Mapping[int, int], number: Mapping[int, int]) -> Item:
    graph = given.graph
    seconds, work, noted = given.again(home)
    asked = bool(given.moments[home])
    if not given.makes(home):
        return Item(graph.names[home], given.sizes[home], after[home], math.inf if asked else NEVER, asked=asked)
    parents = tuple(number[origin] for origin in origins_of(graph)[home] if origin in number)
    return Item(
        graph.names[home],
        given.sizes[home] - noted,
        after[home],
        seconds if can_rebuild(graph, home) else math.inf,
        parents,
        work,
        asked=asked,
        cheap=is_cheap(graph, home),
    )


def _inside(given: WalkPass, node: int, number: Mapping[int, int]) -> Item:
    """What a node keeps besides its tensors: had from a second run of it, which ends when that is there."""
    graph, ran, size = given.graph, given.ran[node], given.large[node]
    place = homes(graph)
    parents = tuple(dict.fromkeys(number[place[s]] for s in graph.sources[node] if place[s] in number))
    again = given.seconds[node] if graph.layers[node].can_rebuild else math.inf
    work = max(0, ran.fresh - size) + ran.made.bytes * (node in given.copies)
    return Item(f"{graph.nodes[node].name} (inside)", size - ran.noted, given.moment(node), again, parents, work)


def _walk(items: Sequence[Item], noted: Sequence[int], given: WalkPass) -> Walk:
    """The last moment is that of the loss. `noted`: of each item the bytes that lie there whatever becomes of it."""
    moments = len(given.gradients)
    used, own = [0] * moments, [0] * moments  # and of it what goes when the node there has run backward
    for home, asking in enumerate(given.moments):
        for moment in range(min(asking), max(asking) + 1) if asking else ():
            used[moment] += given.sizes[home]
        if asking:
            own[min(asking)] += given.sizes[home]
        if home == 0 and asking:  # the network's input is the caller's
            used[max(asking) + 1 :] = [more + given.sizes[0] for more in used[max(asking) + 1 :]]
    for node, size in given.large.items():
        used[given.moment(node)] += size
        own[given.moment(node)] += size
    for node, size in given.small.items():
        first = given.moment(node)
        own[first] += size
        used[first:] = [more + size for more in used[first:]]
    for item, size in zip(items, noted, strict=True):
        used[item.lies_from :] = [more + size for more in used[item.lies_from :]] if size else used[item.lies_from :]
    used[-1] += given.loss
    base = [
        here + max(moment.peak, moment.after - gone)
        for here, gone, moment in zip(used, own, given.gradients, strict=True)
    ]
    rebuilding = [here + moment.before for here, moment in zip(used, given.gradients, strict=True)]
    return Walk(tuple(items), tuple(base), tuple(rebuilding))
