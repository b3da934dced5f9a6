"""The backward pass of a network on one context as items: what it asks for, when, and what computing it again takes.

Two kinds of items: the tensors (by their `home`, see `geometry.memory_policy`), and what a node keeps `inside` of as
many values: a cast copy, say. Small things stay. Seconds follow from a node's work and from the bytes
that it takes and gives, at assumed speeds: only their ratio decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import can_rebuild, homes, is_cheap, makers, origins_of, spread
from tiledseg.geometry.memory_words import KEEP, MemoryPolicy
from tiledseg.planning.backward_walk import Gradients, gradients_by_node
from tiledseg.planning.cost import INDEX_BYTES, LayerCost, loss_bytes
from tiledseg.planning.machine import FLOPS_PER_MULTIPLY_ADD
from tiledseg.planning.memory.items import Item, Walk


@dataclass(frozen=True)
class Speed:
    """What a rank is assumed to reach: operations a second, and bytes a second between its memory and itself."""

    flops: float = 10e12
    memory_bandwidth: float = 600e9

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
        """For each item that of a policy."""
        return tuple(
            policy.tensors[home] if home is not None else policy.inside[node or 0]
            for home, node in zip(self.homes, self.insides, strict=True)
        )


@dataclass
class _Asked:
    """Of the homes the nodes that ask for them, in order; and bytes kept inside nodes: large ones, and others."""

    nodes: list[list[int]]
    bytes: list[int]
    large: dict[int, int] = field(default_factory=dict)
    small: dict[int, int] = field(default_factory=dict)


def network_walk(
    graph: Graph, costs: Sequence[LayerCost], input_bytes: int, bytes_per_value: int, speed: Speed
) -> NetworkWalk:
    """Of nodes with these costs, as `planning.cost.layer_costs` gives them, on an input of `input_bytes`."""
    asked = _asked(graph, costs, input_bytes, bytes_per_value)
    after = _after(graph, asked)
    order = [home for home in sorted(after) if home > 0]
    number = {home: index for index, home in enumerate(order)}
    seconds = [speed.seconds(cost) for cost in costs]
    items = [_tensor(graph, home, asked, after, number, seconds) for home in order]
    place = homes(graph)
    for node, size in asked.large.items():
        parents = tuple(dict.fromkeys(number[place[s]] for s in graph.sources[node] if place[s] in number))
        again = seconds[node] if graph.layers[node].can_rebuild else math.inf
        work = costs[node].output_bytes
        items.append(Item(f"{graph.nodes[node].name} (inside)", size, node, again, parents, work))
    walk = _walk(items, graph, asked, gradients_by_node(graph, costs, bytes_per_value), costs, bytes_per_value)
    inside = tuple(asked.large)
    nothing: tuple[None, ...] = (None,)
    return NetworkWalk(graph, walk, (*order, *nothing * len(inside)), (*nothing * len(order), *inside), sum(seconds))


def _asked(graph: Graph, costs: Sequence[LayerCost], input_bytes: int, width: int) -> _Asked:
    """As `planning.cost.keep_for_backward` counts what autograd keeps, each by itself."""
    place, sizes = homes(graph), [input_bytes, *(cost.output_bytes for cost in costs)]
    found = _Asked([[] for _ in sizes], sizes)

    def ask(tensor: int, k: int) -> None:
        if k not in found.nodes[place[tensor]]:
            found.nodes[place[tensor]].append(k)

    def step(k: int, given: list[int]) -> int:
        """From the widths of a node's inputs, in bytes of a value, that of its output."""
        layer = graph.layers[k]
        made = given[0] if layer.hands_on or graph.overwrites[k] else layer.output_width(given[0], width)
        if layer.hands_on or not graph.wants_gradient[k + 1]:
            return made
        if graph.overwrites[k]:
            ask(k + 1, k)
            return made
        besides = layer.kept_besides(costs[k].shape, width)
        copies = 0
        for index in layer.kept_inputs:
            needed = layer.input_width(given[index], width)
            if needed == given[index]:
                ask(graph.sources[k][index], k)
            else:
                copies += costs[k].input_bytes[index] // given[index] * needed
        if layer.keeps_output:
            ask(k + 1, k)
        taken = max(size // each for size, each in zip(costs[k].input_bytes, given, strict=True))
        is_large = besides >= INDEX_BYTES * min(math.prod(costs[k].shape), taken)
        found.large |= {k: copies + besides * is_large} if copies or is_large else {}
        found.small |= {} if is_large else {k: besides}
        return made

    graph.fold(width, step)
    return found


def _after(graph: Graph, asked: _Asked) -> dict[int, int]:
    """Of each home that matters the moment of its first use in the backward pass."""
    place = homes(graph)
    after: dict[int, int] = {}
    inside: dict[int, list[int]] = {}
    for node in asked.large:
        for source in graph.sources[node]:
            inside.setdefault(place[source], []).append(node)
    children: dict[int, list[int]] = {}
    for home, origins in enumerate(origins_of(graph)):
        for origin in origins:
            children.setdefault(origin, []).append(home)

    def last(child: int) -> int:
        return min(asked.nodes[child], default=after[child])

    for home in reversed(range(len(graph.names))):
        using = [*inside.get(home, ()), *(last(child) for child in children.get(home, ()) if child in after)]
        if asked.nodes[home]:
            after[home] = max(asked.nodes[home])
        elif using and place[home] == home:
            after[home] = min(using)
    return after


def _tensor(
    graph: Graph,
    home: int,
    asked: _Asked,
    after: Mapping[int, int],
    number: Mapping[int, int],
    seconds: Sequence[float],
) -> Item:
    again = sum(seconds[k] for k in makers(graph)[home]) if can_rebuild(graph, home) else math.inf
    parents = tuple(number[origin] for origin in origins_of(graph)[home] if origin in number)
    return Item(
        graph.names[home],
        asked.bytes[home],
        after[home],
        again,
        parents,
        asked=bool(asked.nodes[home]),
        cheap=is_cheap(graph, home),
    )


def _walk(
    items: Sequence[Item],
    graph: Graph,
    asked: _Asked,
    gradients: Sequence[Gradients],
    costs: Sequence[LayerCost],
    width: int,
) -> Walk:
    """The last moment is that of the loss."""
    used = [0] * (len(graph) + 1)
    for home, nodes in enumerate(asked.nodes):
        for moment in range(min(nodes), max(nodes) + 1) if nodes else ():
            used[moment] += asked.bytes[home]
        if home == 0 and nodes:  # the network's input is the caller's
            used[max(nodes) + 1 :] = [more + asked.bytes[0] for more in used[max(nodes) + 1 :]]
    for node, size in asked.large.items():
        used[node] += size
    for node, size in asked.small.items():
        used[node:] = [more + size for more in used[node:]]
    used[-1] += loss_bytes([costs[tensor - 1] for tensor in graph.results], width)
    base = [here + moment.peak for here, moment in zip(used, gradients, strict=True)]
    rebuilding = [here + moment.before for here, moment in zip(used, gradients, strict=True)]
    return Walk(tuple(items), tuple(base), tuple(rebuilding))
