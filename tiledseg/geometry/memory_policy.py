"""Memory policies: a word for each tensor of a network between the forward and the backward pass.

`keep`; `rebuild`: the tensor is dropped, and recomputed from its node's inputs when the backward pass needs it;
`offload`: it is moved to other memory, and back. A node has a word too, for large tensors that it keeps besides:
windows with halos, padded copies, casts. Small ones (statistics, a value a channel) are always kept.

Several tensors may share one memory, if a node returns or overwrites its input: the first of them is their `home`, and
they share one word. A kept tensor from which another is rebuilt is held as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from tiledseg.geometry.graph import KEEP, REBUILD, Graph, MemoryPolicy
from tiledseg.geometry.shapes import scales

FEW_NODES = 6  # most nodes that run to rebuild a cheap tensor


def keep_all(graph: Graph) -> MemoryPolicy:
    return MemoryPolicy((KEEP,) * len(graph.names), (KEEP,) * len(graph))


@lru_cache(64)
def makers(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return, for each home, the nodes that compute its final values, in order; for other tensors none."""
    nodes: list[list[int]] = [[] for _ in graph.names]
    for k, layer in enumerate(graph.layers):
        if not layer.hands_on:
            nodes[graph.homes[k + 1]].append(k)
    return tuple(map(tuple, nodes))


@lru_cache(64)
def origins_of(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return, for each home, the homes from which it is computed."""
    return tuple(
        tuple(dict.fromkeys(h for k in nodes for s in graph.sources[k] if (h := graph.homes[s]) != home))
        for home, nodes in enumerate(makers(graph))
    )


@lru_cache(64)
def asked(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return, for each home, the nodes whose backward passes need it, in order."""
    nodes: list[list[int]] = [[] for _ in graph.names]
    for k, layer in enumerate(graph.layers):
        if layer.hands_on or not graph.wants_gradient[k + 1]:
            continue
        inputs = [graph.sources[k][index] for index in layer.kept_inputs]
        output = [k + 1] if layer.keeps_output or graph.overwrites[k] else []
        for home in dict.fromkeys(graph.homes[tensor] for tensor in (*inputs, *output)):
            nodes[home].append(k)
    return tuple(map(tuple, nodes))


def can_rebuild(graph: Graph, tensor: int) -> bool:
    """Return True if a tensor can be recomputed: it is not the network's input, nor a sum over an image."""
    nodes = makers(graph)[graph.homes[tensor]]
    return bool(nodes) and all(graph.layers[k].can_rebuild for k in nodes)


def is_cheap(graph: Graph, home: int) -> bool:
    """Return True if recomputing a home takes a few operations a value."""
    return can_rebuild(graph, home) and all(graph.layers[k].is_cheap for k in makers(graph)[home])


def spread(graph: Graph, word: Callable[[int], str], inside: Sequence[str] | str = KEEP) -> MemoryPolicy:
    """Return the policy with `word(home)` for all tensors of each home. `inside`: the words of nodes, or one for
    all."""
    words = tuple(word(home) for home in graph.homes)
    return MemoryPolicy(words, (inside,) * len(graph) if isinstance(inside, str) else tuple(inside))


def held(graph: Graph, policy: MemoryPolicy) -> tuple[bool, ...]:
    """Return True for each home that is kept or offloaded when the forward pass ends: it is not rebuilt, and a backward
    pass needs it or a tensor that is rebuilt from it."""
    result = [False] * len(graph.names)
    needed = [bool(nodes) for nodes in asked(graph)]
    for home in reversed(range(len(graph.names))):
        if needed[home] and policy.tensors[home] == REBUILD:
            for source in origins_of(graph)[home]:
                needed[source] = True
        result[home] = needed[home] and policy.tensors[home] != REBUILD
    return tuple(result)


def passing(graph: Graph, policy: MemoryPolicy) -> tuple[bool, ...]:
    """Return True for each rebuilt tensor that is freed after another was rebuilt from it, though a later backward pass
    needs it too: it is cheap, and at most `FEW_NODES` nodes compute it from tensors that stay."""
    longest = [0] * len(graph.names)
    for home, sources in enumerate(origins_of(graph)):
        if is_cheap(graph, home) and policy.tensors[home] == REBUILD:
            run = len(makers(graph)[home]) + max((longest[source] for source in sources), default=0)
            longest[home] = run if run <= FEW_NODES else 0
    return tuple(longest[home] > 0 for home in graph.homes)


def recomputation(graph: Graph) -> MemoryPolicy:
    """Return the policy that rebuilds all but convolutions' outputs that several nodes read (skips, residuals) or that
    change resolution; the nodes between two of these are rebuilt from the first. If cheap nodes compute such a tensor
    from a single other one, that one is kept instead."""
    place, origins = graph.homes, origins_of(graph)
    steps = list(zip(scales(graph), scales(graph.along_columns), strict=True))
    readers: dict[int, set[int]] = {}
    for k, sources in enumerate((*graph.sources, graph.results)):
        if k == len(graph) or not (graph.layers[k].hands_on or graph.overwrites[k]):
            for source in sources:
                readers.setdefault(place[source], set()).add(k)
    moved = {place[s] for k, sources in enumerate(graph.sources) for s in sources if steps[s] != steps[k + 1]}
    anchors = set()
    for home in {home for home, nodes in readers.items() if len(nodes) > 1} | moved:
        while is_cheap(graph, home) and len(origins[home]) == 1 and steps[origins[home][0]][0] == steps[home][0]:
            home = origins[home][0]
        anchors.add(home)
    rebuilt = [can_rebuild(graph, home) and (is_cheap(graph, home) or home not in anchors) for home in place]
    policy = spread(graph, lambda home: REBUILD if rebuilt[home] else KEEP)
    at_hand = [is_held or again for is_held, again in zip(held(graph, policy), rebuilt, strict=True)]
    at_hand[0] = False  # the network's input
    free = [  # nodes whose inputs exist anyway in the backward pass
        layer.can_rebuild and all(at_hand[place[source]] for source in sources)
        for layer, sources in zip(graph.layers, graph.sources, strict=True)
    ]
    return replace(policy, inside=tuple(REBUILD if each else KEEP for each in free))


def named_policy(graph: Graph, word: str) -> MemoryPolicy:
    """Return the policy of a configuration's word. `none` keeps all, as does `auto`, which the plan decides later."""
    return recomputation(graph) if word == "all" else keep_all(graph)
