"""The backward pass of a network on one context as items: what it asks for, when, and what computing it again takes.

Two kinds of items: the tensors (by their `home`, see `geometry.memory_policy`), and what a node keeps `inside` of as
many values: a cast copy, say. Small things stay. Seconds follow from a node's work and from the bytes
that it takes and gives, at assumed speeds: only their ratio decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import can_rebuild, homes, is_cheap, makers, origins_of, spread
from tiledseg.geometry.memory_words import KEEP, REBUILD, MemoryPolicy
from tiledseg.planning.cost_model.machine import FLOPS_PER_MULTIPLY_ADD
from tiledseg.planning.step.backward_walk import Gradients, gradients_by_node
from tiledseg.planning.step.cost import LayerCost, loss_bytes
from tiledseg.planning.step.unfolding import unfolded_bytes
from tiledseg.planning.walk.asked import Asked, Computed, Taken, asked_of
from tiledseg.planning.walk.items import Item, Walk

NEVER = 1e6
"""Seconds of what nobody would wait for: a tensor made by others, that only who is rebuilt of it needs. It is
not there where nobody is; else it is kept."""


@dataclass(frozen=True)
class Speed:
    """What a rank is assumed to reach: operations a second, and bytes a second between its memory and itself."""

    flops: float = 10e12
    memory_bandwidth: float = 600e9

    @property
    def in_words(self) -> str:
        """For the user, who knows the machine."""
        return f"{self.flops / 1e9:,.0f} Gflop/s and {self.memory_bandwidth / 1e9:,.0f} GB/s of memory"

    def seconds(self, cost: LayerCost) -> float:
        """Of a node, run forward."""
        moved = sum(cost.input_bytes) + cost.output_bytes
        return max(cost.multiply_adds * FLOPS_PER_MULTIPLY_ADD / self.flops, moved / self.memory_bandwidth)


@dataclass(frozen=True)
class NetworkWalk:
    """A walk, and of which tensor (`homes`) or node (`insides`) each item is, None of none. `forward`: seconds of the
    forward pass."""

    graph: Graph
    walk: Walk
    homes: tuple[int | None, ...]
    insides: tuple[int | None, ...]
    forward: float

    def policy(self, choices: Sequence[str]) -> MemoryPolicy:
        """That of a choice for each item."""
        words = {home: choice for home, choice in zip(self.homes, choices, strict=True) if home is not None}
        inside = {node: choice for node, choice in zip(self.insides, choices, strict=True) if node is not None}
        return spread(
            self.graph,
            lambda home: words.get(home, KEEP),
            [inside.get(k, KEEP) for k in range(len(self.graph))],
        )

    def choices(self, policy: MemoryPolicy) -> tuple[str, ...]:
        """For each item that of a policy; what cannot be computed once more here is kept."""
        words = (
            policy.tensors[home] if home is not None else policy.inside[node or 0]
            for home, node in zip(self.homes, self.insides, strict=True)
        )
        return tuple(
            KEEP if word == REBUILD and item.rebuild >= NEVER else word
            for item, word in zip(self.walk.items, words, strict=True)
        )

    def kept(self, choices: Sequence[str]) -> int:
        """Bytes that lie there when the forward pass has ended, by a choice for each item."""
        pairs = zip(self.walk.items, choices, strict=True)
        return self.walk.rebuilding[-1] + sum(item.bytes for item, choice in pairs if choice == KEEP)

    def without_insides(self) -> NetworkWalk:
        """The same, but that what is kept inside nodes cannot be computed once more."""
        pairs = zip(self.walk.items, self.insides, strict=True)
        items = tuple(item if node is None else replace(item, rebuild=math.inf) for item, node in pairs)
        return replace(self, walk=replace(self.walk, items=items))

    def lying(self, policy: MemoryPolicy) -> tuple[str, ...]:
        """The same, but that what nobody needs does not lie there: it is not asked for, nor is anybody rebuilt of it
        who is needed."""
        choices, items = self.choices(policy), self.walk.items
        needed = [item.asked for item in items]
        for index in reversed(range(len(items))):
            if needed[index] and choices[index] == REBUILD:
                for parent in items[index].parents:
                    needed[parent] = True
        return tuple(choice if there else REBUILD for choice, there in zip(choices, needed, strict=True))


@dataclass(frozen=True)
class Pass:
    """A forward pass as its backward pass will find it: each node that a rank computes, bytes of each tensor by its
    home, bytes of gradients at each moment, and what the loss keeps."""

    graph: Graph
    computed: Mapping[int, Computed]
    sizes: tuple[int, ...]
    gradients: tuple[Gradients, ...]
    loss: int
    width: int  # bytes of a value

    @cached_property
    def asked(self) -> Asked:
        return asked_of(self.graph, self.computed, self.width)

    def makes(self, home: int) -> bool:
        """Whether it is made by these nodes alone."""
        return all(k in self.computed for k in makers(self.graph)[home])

    def again(self, home: int) -> tuple[float, int, int]:
        """What computing a home once more takes: seconds, bytes besides it for the moment, and bytes of what has
        arrived for it, which stays."""
        place, before, most = homes(self.graph), 0, 0
        nodes = [k for k in self.computed if place[k + 1] == home]
        for k in nodes:
            each = self.computed[k]
            writes = before and (self.graph.layers[k].hands_on or self.graph.overwrites[k])
            most = max(most, before + each.fresh + (0 if writes else each.made))
            before = each.made
        return (
            sum(self.computed[k].seconds for k in nodes if not self.graph.layers[k].hands_on),
            max(0, most - self.sizes[home]),
            sum(self.computed[k].noted for k in nodes),
        )


def network_walk(
    graph: Graph,
    costs: Sequence[LayerCost],
    input_bytes: int,
    bytes_per_value: int,
    speed: Speed,
    run: tuple[int, int] | None = None,
) -> NetworkWalk:
    """Of nodes with these costs, as `planning.step.cost.layer_costs` gives them, on an input of `input_bytes`. `run`:
    of these nodes alone (first, stop), those of a stage: what enters it cannot be computed once more there."""
    first, stop = run or (0, len(graph))
    place, widths = homes(graph), _widths(graph, bytes_per_value)
    computed = {
        k: Computed(
            k - first,
            tuple(
                Taken(place[s], size, widths[s]) for s, size in zip(graph.sources[k], costs[k].input_bytes, strict=True)
            ),
            costs[k].shape,
            costs[k].output_bytes,
            speed.seconds(costs[k]),
            unfolded_bytes(graph.layers[k], costs[k], bytes_per_value),
        )
        for k in range(first, stop)
    }
    sizes = input_bytes, *(cost.output_bytes for cost in costs)
    gradients = tuple(gradients_by_node(graph, costs, bytes_per_value, first, stop))
    results = [costs[tensor - 1] for tensor in graph.results] if stop == len(graph) else []
    loss = loss_bytes(results, bytes_per_value) if results else 0
    return walk_of(Pass(graph, computed, sizes, gradients, loss, bytes_per_value))


def _widths(graph: Graph, width: int) -> list[int]:
    """Of all tensors the bytes of a value."""
    found = [width]

    def step(k: int, given: list[int]) -> int:
        layer = graph.layers[k]
        same = layer.hands_on or graph.overwrites[k]
        found.append(given[0] if same else layer.output_width(given[0], width))
        return found[-1]

    graph.fold(width, step)
    return found


def walk_of(given: Pass) -> NetworkWalk:
    """The items of a pass."""
    graph, asked = given.graph, given.asked
    after = _after(given)
    order = [home for home in sorted(after) if home > 0]
    number = {home: index for index, home in enumerate(order)}
    items = [_tensor(given, home, after, number) for home in order]
    items += [_inside(given, node, number) for node in asked.large]
    noted = [given.again(home)[2] for home in order] + [given.computed[node].noted for node in asked.large]
    walk = _walk(items, noted, given)
    inside = tuple(asked.large)
    nothing: tuple[None, ...] = (None,)
    seconds = sum(each.seconds for each in given.computed.values())
    return NetworkWalk(graph, walk, (*order, *nothing * len(inside)), (*nothing * len(order), *inside), seconds)


def _after(given: Pass) -> dict[int, int]:
    """Of each home that matters the moment of its first use in the backward pass."""
    graph, moments = given.graph, given.asked.moments
    place = homes(graph)
    after: dict[int, int] = {}
    inside: dict[int, list[int]] = {}
    for node in given.asked.large:
        for source in graph.sources[node]:
            inside.setdefault(place[source], []).append(given.computed[node].moment)
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


def _tensor(given: Pass, home: int, after: Mapping[int, int], number: Mapping[int, int]) -> Item:
    graph = given.graph
    seconds, work, noted = given.again(home)
    asked = bool(given.asked.moments[home])
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


def _inside(given: Pass, node: int, number: Mapping[int, int]) -> Item:
    """What a node keeps besides its tensors: had from a second run of it, which ends when that is there."""
    graph, each, size = given.graph, given.computed[node], given.asked.large[node]
    place = homes(graph)
    parents = tuple(dict.fromkeys(number[place[s]] for s in graph.sources[node] if place[s] in number))
    again = each.seconds if graph.layers[node].can_rebuild else math.inf
    work = max(0, each.fresh - size) + each.made * (node in given.asked.copies)
    return Item(f"{graph.nodes[node].name} (inside)", size - each.noted, each.moment, again, parents, work)


def _walk(items: Sequence[Item], noted: Sequence[int], given: Pass) -> Walk:
    """The last moment is that of the loss. `noted`: of each item the bytes that lie there whatever becomes of it."""
    asked, moments = given.asked, len(given.gradients)
    used, own = [0] * moments, [0] * moments  # and of it what goes when the node there has run backward
    for home, asking in enumerate(asked.moments):
        for moment in range(min(asking), max(asking) + 1) if asking else ():
            used[moment] += given.sizes[home]
        if asking:
            own[min(asking)] += given.sizes[home]
        if home == 0 and asking:  # the network's input is the caller's
            used[max(asking) + 1 :] = [more + given.sizes[0] for more in used[max(asking) + 1 :]]
    for node, size in asked.large.items():
        used[given.computed[node].moment] += size
        own[given.computed[node].moment] += size
    for node, size in asked.small.items():
        first = given.computed[node].moment
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
