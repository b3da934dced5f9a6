"""Steps of one rank along one dim at each layer of a network spread over an axis, as sizes.

The same for rows and columns; the cost of a block is then a sum of products of its row's and its column's sizes.
Ranks whose steps are equal cost the same, so costs are worked out once for each kind of rank.

A convolution of 3 on the rank that owns positions 4 to 7, and a pooling of 2 after it; positions run to the right:

    held, source        4========8        what the rank has of the tensor; all of it goes into the exchange
    swap              <-4        7->      it sends 2 parts of a position each, receives as many, and keeps 4
    window, read      3-========-9        after the exchange; where a dim is not cut, `read` has the layer's padding too
    computed, given     4========8        the outputs; where the next layer needs a halo too, more of them
    held, source        4========8        of the pooling, which exchanges nothing
    computed, given       2====4

Messages are those of `spatial.halo_exchange`. Each part that a rank sends or keeps along rows, with each along columns,
is a message of as many pixels x channels, but for the part that it keeps along both. The backward pass is the adjoint:
a rank sends back as much as it has received.

Tensors too large for a kernel are found here too, and refused before a run starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_shapes, tensor_sizes
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import NodeWindows, layer_windows


class Swap(NamedTuple):
    """One rank's part in an exchange along one dim: positions of each part that it sends and receives, and `kept`:
    those of its own that are in its window."""

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    kept: int = 0


class InputStep(NamedTuple):
    """One input of a node on one rank along one dim; sizes in positions.

    `held`: all that the rank has of the tensor. `source`: the part of it that goes on, into an exchange or into the
    node. `swap`: its part in the exchange. `moves`: its window is more than its own block, or its neighbours need a
    part of that. `window`: all that it has after the exchange. `read`: the same with the layer's padding, which a dim
    that is not cut leaves to the layer.
    """

    held: int
    source: int
    swap: Swap
    moves: bool
    window: int
    read: int


class DimStep(NamedTuple):
    """One node on one rank along one dim: outputs `computed`, and those of them that go on, `given`."""

    inputs: tuple[InputStep, ...]
    computed: int
    given: int


RankSteps = tuple[DimStep, ...]


@lru_cache(maxsize=64)
def rank_steps(graph: Graph, partition: Partition, fusion: int = 1) -> tuple[RankSteps, ...]:
    """Return the steps of all ranks along an axis, in order. Raises GeometryError where it cannot be cut so."""
    windows, nodes = layer_windows(graph, partition, fusion), range(len(graph))
    swapped = {
        (k, number): swaps(one.partition, one.read)
        for k, at in enumerate(windows)
        for number, one in enumerate(at.inputs)
        if one.exchanged
    }
    held = [{0: block} for block in partition.blocks]
    return tuple(dim_steps(graph, nodes, windows, each, index, swapped) for index, each in enumerate(held))


def swaps(partition: Partition, windows: Sequence[Interval]) -> list[Swap]:
    """Return every rank's part in the exchange after which rank i holds `windows[i]`, as `block_exchange` does."""
    taken = [{giver: part.size for giver, part in partition.owners(window).items()} for window in windows]
    kept = [sizes.pop(rank, 0) for rank, sizes in enumerate(taken)]
    sent: list[list[int]] = [[] for _ in windows]
    for giver, size in (pair for sizes in taken for pair in sizes.items()):
        sent[giver].append(size)
    return [Swap(tuple(s), tuple(r.values()), k) for s, r, k in zip(sent, taken, kept, strict=True)]


def dim_steps(
    graph: Graph,
    nodes: Sequence[int],
    windows: Sequence[NodeWindows],
    held: dict[int, Interval],
    index: int,
    swapped: Mapping[tuple[int, int], Sequence[Swap]],
) -> RankSteps:
    """Return the steps of `nodes` on rank or block `index`. `held`: its part of each tensor that enters; its parts of
    the tensors that the nodes make are added. `swapped`: by node and input, the ranks' parts in exchanges."""
    steps = []
    for k, at in zip(nodes, windows, strict=True):
        inputs = []
        for number, (one, tensor) in enumerate(zip(at.inputs, graph.sources[k], strict=True)):
            edges, has = one.partition.edges, held[tensor]
            whole = len(edges) == 2 and len(at.inputs) == 1
            read = one.partition.whole if whole else one.read[index]
            size, swap = read.stop - read.start, swapped.get((k, number))
            if swap is None:
                inside = read.clip(has).size  # it may have the padding of a layer after it
                inputs.append(InputStep(has.size, inside, Swap(kept=inside), False, inside, size))
            else:
                start, stop = edges[index], edges[index + 1]
                moves = start != read.start or stop != read.stop or len(swap[index].sent) > 0
                inputs.append(InputStep(has.size, stop - start, swap[index], moves, size, size))
        given = held[k + 1] = at.given[index]
        computed = given.size if at.output.parts == 1 else at.node.layer.computed(inputs[0].read, given.size)
        steps.append(DimStep(tuple(inputs), computed, given.size))
    return tuple(steps)


def whole_steps(graph: Graph, size: int) -> RankSteps:
    """Return the steps of a tile of `size` positions, which nobody shares: each node reads its inputs whole. Raises
    GeometryError where the network does not take that size."""
    sizes = tensor_sizes(graph, size)
    taken = {each: InputStep(each, each, Swap(kept=each), False, each, each) for each in set(sizes)}
    return tuple(
        [
            DimStep(tuple([taken[sizes[source]] for source in sources]), made, made)
            for sources, made in zip(graph.sources, sizes[1:], strict=True)
        ]
    )


def pieces(rows: Sequence[int], cols: Sequence[int]) -> list[int]:
    """Return the pixels of each piece that a rank sends, or receives, in an exchange. `rows`, `cols`: the positions of
    its parts, first those that it keeps: the piece that it keeps along both dims is left out."""
    return [height * width for height, width in list(product(rows, cols))[1:] if height * width]


# Kernels of torch and cuDNN count values in 32 bits, and fail at 2^31 of them in one tensor. Channels-last bilinear
# upsampling fails on GPUs (pytorch#185788); nearest fails or gives zeros without a word (#81665, #141831: "less than
# INT_MAX"). Convolutions fail that can be cut along the batch only, where the batch is one image (#80020, #117736,
# #95024). The limit holds for every tensor of every layer, forward and backward (a gradient is as large as its tensor),
# on GPUs and CPUs alike: a plan knows no device, and on a CPU such a tensor takes 8 GiB of float32.
MOST_VALUES = 2**31 - 2


class TensorShape(NamedTuple):
    """The output of a layer, of a batch of one image."""

    layer: str
    channels: int
    height: int
    width: int

    @property
    def values(self) -> int:
        return self.channels * self.height * self.width

    @property
    def is_countable(self) -> bool:
        """True if kernels take the tensor."""
        return self.values <= MOST_VALUES


def largest_tensor(graph: Graph, bands: int, context: tuple[int, int]) -> TensorShape:
    """Return the largest tensor of a network on a context: the input or an output, concatenations included."""
    shapes = zip(graph.names, tensor_shapes(graph, bands, *context), strict=True)
    return max((TensorShape(name, *shape) for name, shape in shapes), key=lambda shape: shape.values)


def check_countable(shape: TensorShape, remedy: str) -> None:
    """Raise GeometryError for a shape of too many values; `remedy`: what to do, without a full stop."""
    if not shape.is_countable:
        raise GeometryError(
            f"{shape.layer} would make a tensor of {shape.channels} x {shape.height} x {shape.width} = "
            f"{shape.values} values, but kernels count to {MOST_VALUES}; {remedy}"
        )
