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
from dataclasses import dataclass, replace
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
    """

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...] = ()
    memory: MemoryPolicy | None = None
    loss: LossBytes = USUAL_LOSS

    def __post_init__(self) -> None:
        names = (INPUT, *(node.name for node in self.nodes))
        pairs = zip(names[:-1], self.nodes, strict=True)
        named = [node if node.inputs else replace(node, inputs=(before,)) for before, node in pairs]
        object.__setattr__(self, "nodes", tuple(named))
        object.__setattr__(self, "outputs", self.outputs or names[-1:])
        faults = list(_faults(self))
        if faults:
            raise ConfigError(f"the network's nodes do not fit: {'; '.join(faults)}; name each input after its node")

    def __len__(self) -> int:
        return len(self.nodes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once: results of a graph are cached by it."""
        return hash((self.nodes, self.outputs, self.memory, self.loss))

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the hash, which differs in another process."""
        return {key: value for key, value in vars(self).items() if key != "_hash"}

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(node.layer for node in self.nodes)

    @property
    def is_untraced(self) -> bool:
        """True if a node is a user's untraced module, on crops or on whole images."""
        return any(isinstance(layer, Crops) for layer in self.layers)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, the input first."""
        return (INPUT, *(node.name for node in self.nodes))

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """The input tensors of each node."""
        number = {name: tensor for tensor, name in enumerate(self.names)}
        return tuple(tuple(number[name] for name in node.inputs) for node in self.nodes)

    @cached_property
    def results(self) -> tuple[int, ...]:
        return tuple(self.names.index(name) for name in self.outputs)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that read each tensor, in order. Tensors of `outputs` have a last reader, number len(self)."""
        readers: list[list[int]] = [[] for _ in self.names]
        for index, sources in enumerate((*self.sources, self.results)):
            for source in sources:
                readers[source].append(index)
        return tuple(tuple(dict.fromkeys(nodes)) for nodes in readers)

    @cached_property
    def released(self) -> tuple[tuple[int, ...], ...]:
        """The tensors whose last reader is each node."""
        released: list[list[int]] = [[] for _ in self.nodes]
        for tensor, nodes in enumerate(self.readers):
            if nodes[-1] < len(self):
                released[nodes[-1]].append(tensor)
        return tuple(map(tuple, released))

    @cached_property
    def wants_gradient(self) -> tuple[bool, ...]:
        """True for each tensor that has a gradient: it depends on trained weights, and is no integer."""
        has_weights = [not node.frozen and node.layer.parameters(1) > 0 for node in self.nodes]

        def step(k: int, inputs: list[bool]) -> bool:
            return self.layers[k].gradient != "none" and (any(inputs) or has_weights[k])

        return tuple(self.fold(False, step))

    @cached_property
    def origins(self) -> tuple[int, ...]:
        """The first tensor in the same memory as each: some layers return their input itself."""
        return tuple(self.fold(0, lambda k, inputs: inputs[0] if self.layers[k].hands_on else k + 1))

    @cached_property
    def overwrites(self) -> tuple[bool, ...]:
        """True for each node that overwrites its input: its layer can, no other node reads that tensor under any name,
        and no backward pass needs it."""
        readers: dict[int, list[int]] = {}
        for tensor, nodes in enumerate(self.readers):
            own = [k for k in nodes if k == len(self) or not self.layers[k].hands_on]
            readers.setdefault(self.origins[tensor], []).extend(own)
        firsts = [self.origins[sources[0]] for sources in self.sources]
        return tuple(
            layer.overwrites and readers[first] == [k] and first > 0 and not self.layers[first - 1].protects_output
            for k, (layer, first) in enumerate(zip(self.layers, firsts, strict=True))
        )

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
        return self.with_layers([node.cols or node.layer for node in self.nodes])

    def with_layers(self, layers: Sequence[Layer]) -> Graph:
        """Return the same nodes with other layers, alike along rows and columns."""
        nodes = (replace(node, layer=layer, cols=None) for node, layer in zip(self.nodes, layers, strict=True))
        return replace(self, nodes=tuple(nodes))

    def with_frozen(self, names: Collection[str]) -> Graph:
        """Return the graph with only these nodes frozen."""
        return replace(self, nodes=tuple(replace(node, frozen=node.name in names) for node in self.nodes))

    def with_still_statistics(self) -> Graph:
        """Return the graph with running statistics that are constant, also in training."""
        return replace(self, nodes=tuple(replace(node, layer=stilled(node.layer)) for node in self.nodes))


@lru_cache(maxsize=16)
def one_of_equals(graph: Graph) -> Graph:
    """Return the first graph equal to this one, so that caches compare by identity."""
    return graph


def _faults(graph: Graph) -> Iterable[str]:
    names, used = {INPUT}, set(graph.outputs)
    for node in graph.nodes:
        if node.name in names:
            yield f"two nodes are called '{node.name}'"
        if len(node.inputs) != node.layer.arity:
            yield f"'{node.name}' takes {node.layer.arity} tensors and is given {len(node.inputs)}"
        missing = [name for name in node.inputs if name not in names]
        yield from (f"'{node.name}' takes '{name}', which no node before it makes" for name in missing)
        names.add(node.name)
        used.update(node.inputs)
    yield from (f"'{name}' is an output that no node makes" for name in graph.outputs if name not in names)
    yield from (f"nobody takes '{name}'" for name in (INPUT, *(n.name for n in graph.nodes)) if name not in used)
