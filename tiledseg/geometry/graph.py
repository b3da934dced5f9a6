"""A network as a value: an ordered list of nodes, each a layer with a name and the names of its input tensors.

Nodes run in this order, which is also that of balance lists. A node makes one tensor, with the node's name; the
network's input is called `input`. All else follows from the edges: tensors that cross a cut, lifetimes of tensors,
in-place operations.

    input -> conv0 -> act0 -> pool -> conv1 -> up -> join -> head
                        \\_________________________/

The node `join` is `Node("join", Concatenate(), ("act0", "up"))`; every other node takes the tensor before it. Tensors
are numbered: 0 is the network's input, k + 1 the output of node k.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

from tiledseg.errors import ConfigError
from tiledseg.geometry.layers.declared import Crops
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import stilled

INPUT = "input"
Value = TypeVar("Value")
KEEP, REBUILD, OFFLOAD = "keep", "rebuild", "offload"
WORDS = KEEP, REBUILD, OFFLOAD


class LossBytes(NamedTuple):
    """Bytes for each pixel of the first output that a loss needs beyond the usual loss: `kept` until its gradients are
    computed, and at the `peak` until then."""

    kept: float = 0.0
    peak: float = 0.0


USUAL_LOSS = LossBytes()


@dataclass(frozen=True)
class MemoryPolicy:
    """A word of `WORDS` for each tensor, and (`inside`) for each node."""

    tensors: tuple[str, ...]
    inside: tuple[str, ...]

    @property
    def keeps_all(self) -> bool:
        """True if autograd keeps all that it saves."""
        return {*self.tensors, *self.inside} <= {KEEP}


@dataclass(frozen=True)
class Node:
    """A layer in its place.

    `inputs`: the names of its input tensors; by default the output of the node before it. `cols`: the layer along
    columns if its geometry differs there (a kernel that is no square). `frozen`: none of its weights is trained.
    """

    name: str
    layer: Layer
    inputs: tuple[str, ...] = ()
    cols: Layer | None = None
    frozen: bool = False


@dataclass(frozen=True)
class Graph:
    """Nodes in the order in which they run, and the names of the `outputs`: by default that of the last node.

    `memory`: the policy of tensors kept for a backward pass; None: all. `loss`: the memory of the first output's loss
    beyond the usual one. Raises ConfigError that lists every fault: two nodes of one name, an input that no earlier
    node makes, a wrong number of inputs, a tensor that no node reads.

    By node. `layers`. `sources`: its input tensors. `released`: the tensors whose last reader it is. `overwrites`: it
    overwrites its input: its layer can, no other node reads that tensor under any name, and no backward pass needs it.

    By tensor. `names`: the input first. `readers`: the nodes that read it, in order; tensors of `outputs` have a last
    reader, number len(self). `wants_gradient`: it depends on trained weights, and is no integer. `origins`: the first
    tensor in the same memory, as some layers return their input itself; `homes`: the same, overwritten inputs included.

    `results`: the tensors of `outputs`. `is_untraced`: a node is a user's untraced module, on crops or whole images.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...] = ()
    memory: MemoryPolicy | None = None
    loss: LossBytes = USUAL_LOSS
    layers: tuple[Layer, ...] = field(init=False, compare=False, repr=False)
    sources: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)
    released: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)
    overwrites: tuple[bool, ...] = field(init=False, compare=False, repr=False)
    names: tuple[str, ...] = field(init=False, compare=False, repr=False)
    readers: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)
    wants_gradient: tuple[bool, ...] = field(init=False, compare=False, repr=False)
    origins: tuple[int, ...] = field(init=False, compare=False, repr=False)
    homes: tuple[int, ...] = field(init=False, compare=False, repr=False)
    results: tuple[int, ...] = field(init=False, compare=False, repr=False)
    is_untraced: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = (INPUT, *(node.name for node in self.nodes))
        pairs = zip(names[:-1], self.nodes, strict=True)
        nodes = tuple(node if node.inputs else replace(node, inputs=(before,)) for before, node in pairs)
        outputs = self.outputs or names[-1:]
        faults = list(_faults(nodes, outputs))
        if faults:
            raise ConfigError(f"the network's nodes do not fit: {'; '.join(faults)}; name each input after its node")
        number = {name: tensor for tensor, name in enumerate(names)}
        layers, results = tuple(node.layer for node in nodes), tuple(number[name] for name in outputs)
        sources = tuple(tuple(number[name] for name in node.inputs) for node in nodes)
        readers: list[list[int]] = [[] for _ in names]
        wants_gradient, origins = [False], [0]
        for k, (node, layer, taken) in enumerate(zip(nodes, layers, sources, strict=True)):
            for tensor in dict.fromkeys(taken):
                readers[tensor].append(k)
            wanted = any(wants_gradient[tensor] for tensor in taken)
            wanted = wanted or (not node.frozen and layer.counts(1).weights > 0)
            wants_gradient.append(wanted and layer.gradient != "none")
            origins.append(origins[taken[0]] if layer.hands_on else k + 1)
        for tensor in dict.fromkeys(results):
            readers[tensor].append(len(nodes))
        released: list[list[int]] = [[] for _ in nodes]
        of_origin: list[list[int]] = [[] for _ in names]  # its readers under any name
        for tensor, origin in enumerate(origins):
            of_origin[origin] += [k for k in readers[tensor] if k == len(nodes) or not layers[k].hands_on]
            if readers[tensor][-1] < len(nodes):
                released[readers[tensor][-1]].append(tensor)
        overwrites, homes = list[bool](), [0]
        for k, (layer, taken) in enumerate(zip(layers, sources, strict=True)):
            first = origins[taken[0]]
            alone, maker = layer.overwrites and first > 0 and of_origin[first] == [k], layers[first - 1]
            overwrites.append(alone and not (maker.protects_output or maker.keeps_output or maker.overwrites))
            homes.append(homes[taken[0]] if layer.hands_on or overwrites[k] else k + 1)
        vars(self).update(
            nodes=nodes,
            outputs=outputs,
            layers=layers,
            sources=sources,
            released=tuple(map(tuple, released)),
            overwrites=tuple(overwrites),
            names=names,
            readers=tuple(map(tuple, readers)),
            wants_gradient=tuple(wants_gradient),
            origins=tuple(origins),
            homes=tuple(homes),
            results=results,
            is_untraced=any(isinstance(layer, Crops) for layer in layers),
        )

    def __len__(self) -> int:
        return len(self.nodes)

    def __hash__(self) -> int:
        """Return the hash, computed once: results of a graph are cached by it."""
        if "_hash" not in vars(self):
            vars(self)["_hash"] = hash((self.nodes, self.outputs, self.memory, self.loss))
        return int(vars(self)["_hash"])

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the hash, which differs in another process."""
        return {key: value for key, value in vars(self).items() if key != "_hash"}

    def entering(self, first: int, stop: int) -> tuple[int, ...]:
        """Return the tensors that nodes `first` to `stop` (half-open) read and do not make."""
        return tuple(sorted({source for k in range(first, stop) for source in self.sources[k] if source <= first}))

    def leaving(self, first: int, stop: int) -> tuple[int, ...]:
        """Return the tensors made by these nodes that later nodes or the caller read."""
        return tuple(tensor for tensor in range(first + 1, stop + 1) if self.readers[tensor][-1] >= stop)

    def overwritten(self, first: int, stop: int) -> tuple[int, ...]:
        """Return the tensors entering these nodes that they overwrite."""
        origins = [self.sources[k][0] for k in range(first, stop) if self.overwrites[k]]
        for place, tensor in enumerate(origins):
            while tensor > first and self.layers[tensor - 1].hands_on:
                tensor = self.sources[tensor - 1][0]
            origins[place] = tensor
        return tuple(sorted({tensor for tensor in origins if tensor <= first}))

    def fold(self, value: Value, step: Callable[[int, list[Value]], Value]) -> list[Value]:
        """Return a value for each tensor: `value` for the input, `step(node, values of its inputs)` for others."""
        values = [value]
        for k, sources in enumerate(self.sources):
            values.append(step(k, [values[source] for source in sources]))
        return values

    @cached_property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """Edges that pass over nodes: (tensor, reading node)."""
        return tuple((s, k) for k, sources in enumerate(self.sources) for s in sources if s != k)

    @cached_property
    def along_columns(self) -> Graph:
        """The network along columns. If all kernels are squares: the graph itself, which describes rows."""
        if all(node.cols is None for node in self.nodes):
            return self
        nodes = (replace(node, layer=node.cols or node.layer, cols=None) for node in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def with_frozen(self, names: Collection[str]) -> Graph:
        """Return the graph with only these nodes frozen."""
        nodes = tuple(replace(node, frozen=node.name in names) for node in self.nodes)
        return self if nodes == self.nodes else replace(self, nodes=nodes)

    def with_still_statistics(self) -> Graph:
        """Return the graph with running statistics that are constant, also in training."""
        return replace(self, nodes=tuple(replace(node, layer=stilled(node.layer)) for node in self.nodes))


@lru_cache(maxsize=16)
def one_of_equals(graph: Graph) -> Graph:
    """Return the first graph equal to this one, so that caches compare by identity."""
    return graph


def _faults(nodes: Sequence[Node], outputs: Sequence[str]) -> Iterable[str]:
    names, used = {INPUT}, set(outputs)
    for node in nodes:
        if node.name in names:
            yield f"two nodes are called '{node.name}'"
        if len(node.inputs) != node.layer.arity:
            yield f"'{node.name}' takes {node.layer.arity} tensors and is given {len(node.inputs)}"
        missing = [name for name in node.inputs if name not in names]
        yield from (f"'{node.name}' takes '{name}', which no node before it makes" for name in missing)
        names.add(node.name)
        used.update(node.inputs)
    yield from (f"'{name}' is an output that no node makes" for name in outputs if name not in names)
    yield from (f"nobody takes '{name}'" for name in (INPUT, *(n.name for n in nodes)) if name not in used)
