"""What becomes of each tensor of a network between its forward and its backward pass: a policy, as a value.

A word for each tensor: `keep`; `rebuild`: it is dropped, and computed once more from its node's inputs when the
backward pass asks for it; `offload`: it is moved out of the way, and comes back. A word for each node of what it keeps
besides, if that is as large as a tensor: windows with halos, padded copies, casts. Small things
(statistics, a value a channel) are always kept.

Several tensors may be one in memory, where a node hands its input on or writes over it: the first of them is their
`home`, and one word is about them all. What somebody needs to rebuild another tensor is held as well, if it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_words import KEEP, REBUILD, MemoryPolicy
from tiledseg.geometry.receptive_field import scales
from tiledseg.geometry.shapes import tensor_channels

FEW_NODES = 6  # that are run for a tensor which is rebuilt for next to nothing


def keep_all(graph: Graph) -> MemoryPolicy:
    """Everything is kept."""
    return MemoryPolicy((KEEP,) * len(graph.names), (KEEP,) * len(graph))


@lru_cache(64)
def homes(graph: Graph) -> tuple[int, ...]:
    """Of each tensor the first that is the same in memory."""
    layers = zip(graph.layers, graph.overwrites, strict=True)
    same = [layer.hands_on or overwrites for layer, overwrites in layers]
    return tuple(graph.fold(0, lambda k, given: given[0] if same[k] else k + 1))


@lru_cache(64)
def makers(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Of each home the nodes that compute what is in it in the end, in order; none of other tensors."""
    found: list[list[int]] = [[] for _ in graph.names]
    for k, layer in enumerate(graph.layers):
        if not layer.hands_on:
            found[homes(graph)[k + 1]].append(k)
    return tuple(map(tuple, found))


@lru_cache(64)
def origins_of(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Of each home those that it is computed from."""
    return tuple(
        tuple(dict.fromkeys(h for k in nodes for s in graph.sources[k] if (h := homes(graph)[s]) != home))
        for home, nodes in enumerate(makers(graph))
    )


@lru_cache(64)
def asked(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Of each home the nodes whose backward passes ask for it, in order."""
    found: list[list[int]] = [[] for _ in graph.names]
    for k, layer in enumerate(graph.layers):
        if layer.hands_on or not graph.wants_gradient[k + 1]:
            continue
        given = () if graph.overwrites[k] else tuple(graph.sources[k][index] for index in layer.kept_inputs)
        made = (k + 1,) if layer.keeps_output or graph.overwrites[k] else ()
        for home in dict.fromkeys(homes(graph)[tensor] for tensor in (*given, *made)):
            found[home].append(k)
    return tuple(map(tuple, found))


def can_rebuild(graph: Graph, tensor: int) -> bool:
    """True if a tensor can be computed once more: it is not the network's input, nor a sum over an image."""
    nodes = makers(graph)[homes(graph)[tensor]]
    return bool(nodes) and all(graph.layers[k].can_rebuild for k in nodes)


def is_cheap(graph: Graph, home: int) -> bool:
    """True if computing it once more costs a few operations a value."""
    return can_rebuild(graph, home) and all(graph.layers[k].is_cheap for k in makers(graph)[home])


def check_policy(graph: Graph, policy: MemoryPolicy) -> None:
    """Raise ConfigError that lists every fault of a policy for this network."""
    faults = list(_faults(graph, policy))
    if faults:
        raise ConfigError(f"the memory policy does not fit the network: {'; '.join(faults)}; keep them")


def _faults(graph: Graph, policy: MemoryPolicy) -> Iterator[str]:
    if (len(policy.tensors), len(policy.inside)) != (len(graph.names), len(graph)):
        yield (
            f"it has {len(policy.tensors)} words for {len(graph.names)} tensors and {len(policy.inside)} for "
            f"{len(graph)} nodes"
        )
        return
    for tensor, (name, word, home) in enumerate(zip(graph.names, policy.tensors, homes(graph), strict=True)):
        if word != policy.tensors[home]:
            yield (
                f"'{name}' and '{graph.names[home]}' are one in memory, but the words are {word} and "
                + (policy.tensors[home])
            )
        elif word == REBUILD and not can_rebuild(graph, tensor):
            yield f"'{name}' cannot be computed once more"


def spread(graph: Graph, word: Callable[[int], str], inside: Sequence[str] | str = KEEP) -> MemoryPolicy:
    """The policy with these words of homes, for all tensors."""
    words = tuple(word(home) for home in homes(graph))
    return MemoryPolicy(words, (inside,) * len(graph) if isinstance(inside, str) else tuple(inside))


def held(graph: Graph, policy: MemoryPolicy) -> tuple[bool, ...]:
    """Of each home, whether it is there when the forward pass ends (in its place, or offloaded): it is not rebuilt, and
    a backward pass asks for it or for what is rebuilt from it."""
    found = [False] * len(graph.names)
    needed = [bool(nodes) for nodes in asked(graph)]
    for home in reversed(range(len(graph.names))):
        if needed[home] and policy.tensors[home] == REBUILD:
            for source in origins_of(graph)[home]:
                needed[source] = True
        found[home] = needed[home] and policy.tensors[home] != REBUILD
    return tuple(found)


def passing(graph: Graph, policy: MemoryPolicy) -> tuple[bool, ...]:
    """Of each tensor, whether it is let go where it was made on the way to another that is rebuilt, though somebody is
    still to ask for it: it is cheap, and made from what stays by `FEW_NODES` at most, one after the other."""
    longest = [0] * len(graph.names)
    for home, sources in enumerate(origins_of(graph)):
        if is_cheap(graph, home) and policy.tensors[home] == REBUILD:
            run = len(makers(graph)[home]) + max((longest[source] for source in sources), default=0)
            longest[home] = run if run <= FEW_NODES else 0
    return tuple(longest[home] > 0 for home in homes(graph))


def compaction(graph: Graph, bands: int) -> MemoryPolicy:
    """What is nearly free: tensors that few operations a value make of what is there anyway, or of what is smaller than
    they are: concatenations, upsamplings, pooled tensors, norms with their activations. At most `FEW_NODES` nodes run
    for each."""
    return _chosen(graph, bands, lambda home: True)


def recomputation(graph: Graph, bands: int) -> MemoryPolicy:
    """Besides, convolutions are computed once more: kept is what several nodes take (skips, residuals), and what goes
    to another resolution; all within such a run of nodes is rebuilt from its beginning."""
    anchors = _anchors(graph)
    return _chosen(graph, bands, lambda home: home in anchors or not can_rebuild(graph, home))


def _anchors(graph: Graph) -> frozenset[int]:
    """Where runs of nodes end; of a tensor that cheap nodes make of one other, that other."""
    place = homes(graph)
    steps = list(zip(scales(graph), scales(graph.along_columns), strict=True))
    readers: dict[int, set[int]] = {}
    for k, sources in enumerate((*graph.sources, graph.results)):
        if k == len(graph) or not (graph.layers[k].hands_on or graph.overwrites[k]):
            for source in sources:
                readers.setdefault(place[source], set()).add(k)
    moved = {place[s] for k, sources in enumerate(graph.sources) for s in sources if steps[s] != steps[k + 1]}
    found = {home for home, nodes in readers.items() if len(nodes) > 1} | moved
    return frozenset(_before_cheap(graph, home) for home in found)


def _before_cheap(graph: Graph, home: int) -> int:
    while is_cheap(graph, home) and len(origins_of(graph)[home]) == 1 and not _enlarges(graph, home):
        home = origins_of(graph)[home][0]
    return home


def _enlarges(graph: Graph, home: int) -> bool:
    source = origins_of(graph)[home][0]
    return scales(graph)[source] != scales(graph)[home]


@dataclass(frozen=True)
class _Way:
    """How a home comes about in the backward pass: what must be held for it that else is not, and the nodes to run."""

    hold: frozenset[int] = frozenset()
    run: frozenset[int] = frozenset()


def _chosen(graph: Graph, bands: int, keeps: Callable[[int], bool]) -> MemoryPolicy:
    """`keeps`: of a home that takes work, whether it is kept if it is asked for."""
    values = _values(graph, bands)
    ways: dict[int, _Way] = {0: _Way()}
    words = [KEEP] * len(graph.names)
    for home, sources in enumerate(origins_of(graph)):
        if not sources:
            continue
        is_asked = bool(asked(graph)[home])
        if not is_cheap(graph, home):
            words[home] = KEEP if keeps(home) else REBUILD
            there = is_asked or words[home] == REBUILD
            ways[home] = _Way() if there else _Way(frozenset({home}))
            continue
        given = [ways[source] for source in sources]
        hold = frozenset[int]().union(*(way.hold for way in given))
        run = frozenset(makers(graph)[home]).union(*(way.run for way in given))
        if len(run) <= FEW_NODES and sum(values[each] for each in hold) < values[home]:
            words[home] = REBUILD
            ways[home] = _Way(frozenset() if is_asked else hold, run)
            if is_asked:  # from now on what it is rebuilt from is there
                ways.update({source: _Way() for source in hold})
        else:
            ways[home] = _Way() if is_asked else _Way(frozenset({home}))
    policy = spread(graph, words.__getitem__)
    at_hand = [is_held or word == REBUILD for is_held, word in zip(held(graph, policy), policy.tensors, strict=True)]
    inside = [_looks_inside(graph, k, at_hand) for k in range(len(graph))]
    return spread(graph, words.__getitem__, inside)


def _looks_inside(graph: Graph, k: int, at_hand: Sequence[bool]) -> str:
    """What a node keeps besides is had from its inputs, where these are there anyway; the network's own is not."""
    sources = [homes(graph)[source] for source in graph.sources[k]]
    free = graph.layers[k].can_rebuild and all(source and at_hand[source] for source in sources)
    return REBUILD if free else KEEP


def _values(graph: Graph, bands: int) -> list[float]:
    """Of each tensor, for an input pixel."""
    rows, cols = scales(graph), scales(graph.along_columns)
    return [float(c / (r * q)) for c, r, q in zip(tensor_channels(graph, bands), rows, cols, strict=True)]


def named_policy(graph: Graph, bands: int, word: str) -> MemoryPolicy:
    """The policy that a configuration names: `compact` or `all`; everything is kept by `none`, and by `auto`, which
    leaves it to the plan."""
    if word in ("auto", "none"):
        return keep_all(graph)
    return {"compact": compaction, "all": recomputation}[word](graph, bands)
