"""The memory of a backward pass as items: tensors that are kept, recomputed or offloaded, and the peak of a choice.

Moments are the steps of a forward walk; the backward pass meets them from the last to the first. An item is a tensor
that the backward pass needs, or bytes that a node keeps inside, as many as a tensor's (a cast copy, say). From its
first use there, at moment `after`, until it is freed, an item is in memory whatever is chosen (`Walk.base` counts it).
At the moments above `after` it only waits:

- kept, it is in memory at all of them;
- recomputed, at none, but for other items that are recomputed from it at such a moment. If that takes work (`stays`),
  the item is computed then, once, and stays; if not, it is computed for the moment, as often as it is needed. Either
  way its own parents must be there, or are recomputed first;
- offloaded, at none: it is fetched just before its use.

Seconds follow from a node's work and the bytes that it reads and writes, at assumed speeds: only their ratio decides.
Checked against `models.rebuild`, which recomputes so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD, Graph, MemoryPolicy
from tiledseg.geometry.memory_policy import can_rebuild, homes, is_cheap, makers, origins_of, spread
from tiledseg.planning.step.backward_walk import gradients_by_node
from tiledseg.planning.step.cost import FLOPS_PER_MULTIPLY_ADD, INDEX_BYTES, ForwardWalk, LayerCost, loss_bytes

NEVER = 1e6  # seconds that mark a tensor which cannot be recomputed here: it is kept where a recomputed one needs it
BACKWARD = 2  # seconds of a backward pass, in forward passes, about
NO_GRAPH = Graph(())
Words = tuple[str, ...]


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
class Item:
    """A tensor (`home`, see `geometry.memory_policy`), or bytes inside a `node`, that the backward pass needs.

    `after`: the moment of its first use there. `rebuild`: seconds to compute it once, infinite where it cannot be.
    `parents`: the items, by their numbers, all lower than its own, from which it is computed; other tensors for that
    are there anyway. `work`: bytes that this needs for the moment, besides the item. `offload`: seconds of sending it
    away and fetching it, infinite where it cannot be. `used`: the backward pass uses it itself; else only items that
    are recomputed from it do, and it stays, unless it is recomputed, until the last of these, at moment `after`.
    `cheap`: it is computed anew rather than kept for later.
    """

    name: str
    bytes: int
    after: int
    rebuild: float = math.inf
    parents: tuple[int, ...] = ()
    work: int = 0
    offload: float = math.inf
    used: bool = True
    cheap: bool = False
    home: int | None = None
    node: int | None = None

    @property
    def stays(self) -> bool:
        """True if it stays until its own use, once it was recomputed for another item."""
        return self.used and not self.cheap

    @property
    def waits_from(self) -> int:
        """The first moment, counted forward, at which it only waits."""
        return self.after + self.used

    def can_be(self, word: str) -> bool:
        return {KEEP: 0.0, REBUILD: self.rebuild, OFFLOAD: self.offload}[word] < math.inf


class Price(NamedTuple):
    """The cost of a choice: `seconds` more than keeping everything, and the bytes that each moment `needs`."""

    seconds: float
    needs: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.needs)


@dataclass(frozen=True)
class Walk:
    """A backward pass: its items, and at each moment the bytes that are there whatever is chosen.

    `base`: at the node's worst moment, its gradients included. `rebuilding`: before the node's own gradients are made,
    when the items that it needs are recomputed. `forward`: seconds of the forward pass.
    """

    items: tuple[Item, ...]
    base: tuple[int, ...]
    rebuilding: tuple[int, ...]
    graph: Graph = NO_GRAPH
    forward: float = 0.0

    def policy(self, words: Sequence[str]) -> MemoryPolicy:
        """Return the policy of a word for each item."""
        pairs = list(zip(self.items, words, strict=True))
        tensors = {item.home: word for item, word in pairs if item.home is not None}
        inside = {item.node: word for item, word in pairs if item.node is not None}
        every = [inside.get(k, KEEP) for k in range(len(self.graph))]
        return spread(self.graph, lambda home: tensors.get(home, KEEP), every)

    def words(self, policy: MemoryPolicy) -> Words:
        """Return the word of a policy for each item; an item that cannot be recomputed here is kept."""

        def word(item: Item) -> str:
            found = policy.tensors[item.home] if item.home is not None else policy.inside[item.node or 0]
            return KEEP if found == REBUILD and item.rebuild >= NEVER else found

        return tuple(map(word, self.items))

    def needed_words(self, policy: MemoryPolicy) -> Words:
        """Return `words` without the kept items that no backward pass and no recomputed item needs."""
        words, needed = self.words(policy), [item.used for item in self.items]
        for index in reversed(range(len(self.items))):
            if needed[index] and words[index] == REBUILD:
                for parent in self.items[index].parents:
                    needed[parent] = True
        return tuple(word if there else REBUILD for word, there in zip(words, needed, strict=True))

    def kept(self, words: Sequence[str]) -> int:
        """Return the bytes in memory when the forward pass has ended, by a word for each item."""
        kept = sum(item.bytes for item, word in zip(self.items, words, strict=True) if word == KEEP)
        return self.rebuilding[-1] + kept

    def without_insides(self) -> Walk:
        """Return the walk in which nothing kept inside nodes can be recomputed."""
        items = (item if item.node is None else replace(item, rebuild=math.inf) for item in self.items)
        return replace(self, items=tuple(items))


def price(walk: Walk, words: Sequence[str]) -> Price:
    """Price a choice of a word for each item."""
    until, runs = _recomputed(walk, words)
    more = [0] * (len(walk.base) + 1)  # bytes at each moment than at the one before
    for item, word, last in zip(walk.items, words, until, strict=True):
        stop = len(walk.base) if word == KEEP else last + 1
        if (word != REBUILD or item.stays) and item.waits_from < stop:
            more[item.waits_from] += item.bytes
            more[stop] -= item.bytes
    waiting = list(accumulate(more[:-1]))
    needs = [base + here for base, here in zip(walk.base, waiting, strict=True)]
    seconds = sum(item.offload for item, word in zip(walk.items, words, strict=True) if word == OFFLOAD)
    for index, moment in runs:
        taken, work = _run(walk, words, index, moment)
        needs[moment] = max(needs[moment], walk.rebuilding[moment] + waiting[moment] + work)
        seconds += taken
    return Price(seconds, tuple(needs))


def _recomputed(walk: Walk, words: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the last moment, counted forward, at which each item that is not kept waits, and the items that are
    recomputed to stay or to be used, each with its moment."""
    until = [item.after for item in walk.items]
    for_others: list[list[int]] = [[] for _ in walk.items]  # moments at which others are recomputed from an item
    runs = []
    for index in reversed(range(len(walk.items))):
        item, moments = walk.items[index], for_others[index]
        if words[index] == OFFLOAD or item.stays:
            until[index] = max([item.after, *moments])
        if words[index] != REBUILD:
            continue
        own = [until[index]] if item.used else []
        runs += [(index, moment) for moment in own]
        if not item.stays:
            own += [moment for moment in moments if not (item.used and moment <= item.after)]
        for parent in item.parents:
            for_others[parent] += own
    return until, runs


def _run(walk: Walk, words: Sequence[str], index: int, moment: int) -> tuple[float, int]:
    """Return what recomputing an item at a moment takes: seconds, and bytes besides the item. Parents that do not stay
    are recomputed first, one after the other, and freed after their use."""
    item = walk.items[index]
    seconds, held, most = item.rebuild, 0, 0
    for parent in item.parents:
        before = walk.items[parent]
        if words[parent] == REBUILD and not before.stays and not (before.used and moment <= before.after):
            first, work = _run(walk, words, parent, moment)
            most = max(most, held + before.bytes + work)
            seconds, held = seconds + first, held + before.bytes
    return seconds, max(most - item.bytes, held + item.work)


def network_walk(walk: ForwardWalk, speed: Speed = ASSUMED, run: tuple[int, int] | None = None) -> Walk:
    """Return the items of a forward walk of a tile, or of a rank's block. `run`: of the nodes (first, stop) alone,
    those of a stage: tensors that enter it cannot be recomputed there."""
    return _Items(walk, speed, run or (0, len(walk.graph)), run is not None).walk()


class _Items:
    """The nodes `ran` in a run of a forward walk, and how its backward pass uses their data.

    `sizes`: bytes of each tensor by its home; `uses`: the moments at which the backward pass uses it. `large`, `small`:
    bytes kept inside nodes, as large as a tensor or not; `copies`: nodes whose large ones are more than windows.
    """

    def __init__(self, walk: ForwardWalk, speed: Speed, run: tuple[int, int], is_stage: bool) -> None:
        graph = self.graph = walk.graph
        self.first, self.place = run[0], homes(graph)  # a run's moments are counted from its first node
        self.ran = {k: walk.ran[k] for k in range(*run)}
        self.sizes = [walk.input_bytes, *(ran.made.bytes for ran in walk.ran)]
        for k, ran in enumerate(walk.ran):
            self.sizes[self.place[k + 1]] = ran.made.bytes  # of the last node that writes over it
        costs = walk.costs
        self.seconds = {k: sum(map(speed.seconds, costs[ran.first : ran.moment + 1])) for k, ran in self.ran.items()}
        steps = run if is_stage else (0, len(walk.walked))
        self.gradients = gradients_by_node(walk.walked, costs, walk.value_bytes, *steps)
        results = [costs[tensor - 1] for tensor in walk.walked.results] if run[1] == len(graph) else []
        self.loss = loss_bytes(results, walk.value_bytes) if results else 0
        self.uses: list[list[int]] = [[] for _ in graph.names]
        self.large: dict[int, int] = {}
        self.small: dict[int, int] = {}
        self.copies: set[int] = set()
        for k in self.ran:
            if not graph.layers[k].hands_on and graph.wants_gradient[k + 1]:
                self._use(k)

    def moment(self, k: int) -> int:
        return self.ran[k].moment - self.first

    def _use(self, k: int) -> None:
        """Count the data that the backward pass of node `k` uses."""
        ran, kept = self.ran[k], self.ran[k].kept
        inputs = [ran.brought[index] for index in kept.inputs]
        used = [tensor.home for tensor in inputs if tensor.home is not None]
        for home in dict.fromkeys([*used, *([self.place[k + 1]] if kept.output else [])]):
            self.uses[home].append(self.moment(k))
        windows = sum(tensor.bytes for tensor in inputs if tensor.home is None)
        least = INDEX_BYTES * min(math.prod(ran.shape), max(tensor.values for tensor in ran.brought))
        is_large = kept.besides >= least
        inside = kept.copies + windows + kept.besides * is_large
        if inside:
            self.large[k] = inside
        if kept.besides and not is_large:
            self.small[k] = kept.besides
        if inside > windows:
            self.copies.add(k)

    def walk(self) -> Walk:
        after = self._first_uses()
        order = sorted(home for home in after if home)
        number = {home: index for index, home in enumerate(order)}
        items = [self._tensor(home, after[home], number) for home in order]
        items += [self._inside(node, number) for node in self.large]
        noted = [self._again(home)[2] for home in order] + [self.ran[node].noted for node in self.large]
        base, rebuilding = self._always(items, noted)
        return Walk(tuple(items), base, rebuilding, self.graph, sum(self.seconds.values()))

    def _first_uses(self) -> dict[int, int]:
        """Return the moment of the first use of each home in the backward pass, of those that matter."""
        after: dict[int, int] = {}
        using: list[list[int]] = [[] for _ in self.graph.names]  # moments at which something is recomputed from a home
        for node in self.large:
            for source in self.graph.sources[node]:
                using[self.place[source]].append(self.moment(node))
        for home in reversed(range(len(self.graph.names))):
            if self.uses[home]:
                after[home] = max(self.uses[home])
            elif using[home] and self.place[home] == home:
                after[home] = min(using[home])
            if home in after and self._is_made(home):
                for origin in origins_of(self.graph)[home]:
                    using[origin].append(min(self.uses[home], default=after[home]))
        return after

    def _is_made(self, home: int) -> bool:
        """Return True if the nodes of the run alone make the tensor."""
        return all(k in self.ran for k in makers(self.graph)[home])

    def _again(self, home: int) -> tuple[float, int, int]:
        """Return what recomputing a tensor takes: seconds, bytes besides it for the moment, and bytes that arrived for
        it from other ranks, which stay."""
        layers, before, most, seconds, noted = self.graph.layers, 0, 0, 0.0, 0
        for k in (k for k in self.ran if self.place[k + 1] == home):
            ran = self.ran[k]
            writes = before and (layers[k].hands_on or self.graph.overwrites[k])
            most = max(most, before + ran.fresh + (0 if writes else ran.made.bytes))
            before = ran.made.bytes
            seconds += 0.0 if layers[k].hands_on else self.seconds[k]
            noted += ran.noted
        return seconds, max(0, most - self.sizes[home]), noted

    def _tensor(self, home: int, after: int, number: dict[int, int]) -> Item:
        graph, size, used = self.graph, self.sizes[home], bool(self.uses[home])
        name = graph.names[home]
        if not self._is_made(home):
            return Item(name, size, after, math.inf if used else NEVER, used=used, home=home)
        seconds, work, noted = self._again(home)
        parents = tuple(number[origin] for origin in origins_of(graph)[home] if origin in number)
        again, cheap = seconds if can_rebuild(graph, home) else math.inf, is_cheap(graph, home)
        return Item(name, size - noted, after, again, parents, work, used=used, cheap=cheap, home=home)

    def _inside(self, node: int, number: dict[int, int]) -> Item:
        """Return what a node keeps besides its tensors as an item: a second run of the node makes it."""
        graph, ran, size = self.graph, self.ran[node], self.large[node]
        homes_read = dict.fromkeys(self.place[source] for source in graph.sources[node])
        parents = tuple(number[home] for home in homes_read if home in number)
        again = self.seconds[node] if graph.layers[node].can_rebuild else math.inf
        work = max(0, ran.fresh - size) + ran.made.bytes * (node in self.copies)
        name = f"{graph.nodes[node].name} (inside)"
        return Item(name, size - ran.noted, self.moment(node), again, parents, work, node=node)

    def _always(self, items: Sequence[Item], noted: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the bytes of each moment that are there whatever is chosen: in all, and before the node's gradients.
        `noted`: bytes of each item that stay whatever becomes of it. The last moment is that of the loss."""
        last = len(self.gradients)
        more, freed = [0] * (last + 1), [0] * last  # bytes that a node keeps are freed once it has run backward

        def add(size: int, start: int, stop: int = last) -> None:
            more[start] += size
            more[stop] -= size

        for home, moments in enumerate(self.uses):
            if moments:
                add(self.sizes[home], min(moments), last if home == 0 else max(moments) + 1)  # the input stays
                freed[min(moments)] += self.sizes[home]
        for node, size in self.large.items():
            add(size, self.moment(node), self.moment(node) + 1)
            freed[self.moment(node)] += size
        for node, size in self.small.items():
            add(size, self.moment(node))
            freed[self.moment(node)] += size
        for item, size in zip(items, noted, strict=True):
            add(size, min(item.waits_from, last))
        add(self.loss, last - 1)
        used = list(accumulate(more[:-1]))
        every = list(zip(used, freed, self.gradients, strict=True))
        base = tuple(here + max(each.peak, each.after - gone) for here, gone, each in every)
        return base, tuple(here + each.before for here, _, each in every)
