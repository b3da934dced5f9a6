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
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import NodeWindows, layer_windows


@dataclass(frozen=True)
class SentBytes:
    """Messages and bytes."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(self.messages + other.messages, self.bytes + other.bytes)

    def __mul__(self, times: int) -> SentBytes:
        return SentBytes(self.messages * times, self.bytes * times)


@dataclass(frozen=True)
class Traffic:
    """Messages of one rank, or of all together, in the forward and in the backward pass of one image."""

    forward: SentBytes = SentBytes()
    backward: SentBytes = SentBytes()

    @property
    def step(self) -> SentBytes:
        """Both passes: the messages of training. Validation and prediction send `forward` alone."""
        return self.forward + self.backward

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.forward * times, self.backward * times)


class Swap(NamedTuple):
    """One rank's part in an exchange along one dim: positions of each part that it sends and receives, and `kept`:
    those of its own that are in its window."""

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    kept: int = 0


class InputStep(NamedTuple):
    """One input of a node on one rank along one dim; sizes in positions.

    `held`: all that the rank has of the tensor. `source`: the part of it that goes on, into the exchange where
    `exchanged`, else into the node. `swap`: its part in the exchange. `moves`: its window is more than its own block,
    or its neighbours need of that. `window`: all that is there after the exchange. `read`: the same with the layer's
    padding, which a dim that is not cut leaves to the layer. `owned`: the rank's own part of the tensor.
    """

    held: int
    source: int
    exchanged: bool
    swap: Swap
    moves: bool
    window: int
    read: int
    owned: int


class DimStep(NamedTuple):
    """One node on one rank along one dim: outputs `computed`, and those of them that go on, `given`."""

    inputs: tuple[InputStep, ...]
    computed: int
    given: int


RankSteps = tuple[DimStep, ...]
_Swaps = Sequence[Sequence[list[Swap] | None]]


@dataclass(frozen=True)
class RankKinds:
    """The different ranks of an axis, and how many there are of each."""

    steps: tuple[RankSteps, ...]
    counts: tuple[int, ...]


@lru_cache(maxsize=64)
def rank_kinds(graph: Graph, partition: Partition, fusion: int = 1) -> RankKinds:
    """Return the kinds of ranks along one axis. Raises GeometryError where the network cannot be so cut."""
    found = Counter(rank_steps(graph, partition, fusion))
    return RankKinds(tuple(found), tuple(found.values()))


def rank_steps(graph: Graph, partition: Partition, fusion: int = 1) -> list[RankSteps]:
    """Return the steps of all ranks along an axis, in order. Raises GeometryError where it cannot be cut so."""
    windows = layer_windows(graph, partition, fusion)
    swapped = [[swaps(one.partition, one.read) if one.exchanged else None for one in at.inputs] for at in windows]
    nodes = range(len(graph))
    return [
        dim_steps(graph, nodes, windows, {0: partition.owned(index)}, index, swapped)
        for index in range(partition.parts)
    ]


def swaps(partition: Partition, windows: Sequence[Interval]) -> list[Swap]:
    """Return every rank's part in the exchange after which rank i holds `windows[i]`, as `plan_exchange` does."""
    edges = partition.edges
    sent: list[list[int]] = [[] for _ in windows]
    received: list[list[int]] = [[] for _ in windows]
    kept = [0 for _ in windows]
    for taker, window in enumerate(windows):
        wanted = window.clip(partition.whole)
        giver = bisect_right(edges, wanted.start) - 1
        while giver < partition.parts and edges[giver] < wanted.stop:
            size = min(edges[giver + 1], wanted.stop) - max(edges[giver], wanted.start)
            if size and giver == taker:
                kept[taker] = size
            elif size:
                sent[giver].append(size)
                received[taker].append(size)
            giver += 1
    return [Swap(tuple(s), tuple(r), k) for s, r, k in zip(sent, received, kept, strict=True)]


def dim_steps(
    graph: Graph,
    nodes: Sequence[int],
    windows: Sequence[NodeWindows],
    held: dict[int, Interval],
    index: int,
    swapped: _Swaps | None = None,
) -> RankSteps:
    """Return the steps of `nodes` on rank or block `index`, which has `held` of the tensors that enter them; what it
    then has of those that they make is put there too."""
    steps = []
    for place, (k, at) in enumerate(zip(nodes, windows, strict=True)):
        parts = [None] * len(at.inputs) if swapped is None else swapped[place]
        taken = tuple(
            input_step(at, number, index, held[tensor], None if part is None else part[index])
            for number, (tensor, part) in enumerate(zip(graph.sources[k], parts, strict=True))
        )
        whole, given = at.output.parts == 1, at.given[index]
        computed = given.size if whole else at.node.layer.computed(taken[0].read, given.size)
        steps.append(DimStep(taken, computed, given.size))
        held[k + 1] = given
    return tuple(steps)


def whole_steps(graph: Graph, size: int) -> RankSteps:
    """Return the steps of a tile of `size` positions, which nobody shares: each node reads its inputs whole."""
    sizes = graph.fold(size, lambda k, given: graph.layers[k].output_size(*given))
    taken = {each: InputStep(each, each, False, Swap(kept=each), False, each, each, each) for each in set(sizes)}
    return tuple(
        DimStep(tuple(taken[sizes[source]] for source in sources), sizes[k + 1], sizes[k + 1])
        for k, sources in enumerate(graph.sources)
    )


def input_step(at: NodeWindows, number: int, index: int, held: Interval, swap: Swap | None) -> InputStep:
    """Return the step of one input of a node on rank `index`, which has `held` of it."""
    one = at.inputs[number]
    whole = one.partition.parts == 1 and len(at.inputs) == 1
    read = one.partition.whole if whole else one.read[index]
    start, stop = one.partition.edges[index : index + 2]
    size, block = read.stop - read.start, stop - start
    if swap is None:
        inside = read.clip(held).size  # it may have the padding of a layer after it
        return InputStep(held.size, inside, False, Swap(kept=inside), False, inside, size, block)
    moves = start != read.start or stop != read.stop or len(swap.sent) > 0
    return InputStep(held.size, block, True, swap, moves, size, size, block)


def given_back_in_place(graph: Graph, k: int, row: InputStep, col: InputStep) -> bool:
    """Return True if the gradient of the block that goes into an exchange before node `k` is a part of the window's."""
    stays = row.source == row.swap.kept and col.source == col.swap.kept
    whole = (row.read, col.read) == (row.window, col.window)
    return graph.layers[k].owns_gradient and (row.moves or col.moves) and stays and whole


def sent(row: Swap, col: Swap) -> list[int]:
    """Return the pixels of each piece that a rank sends in an exchange: of all pieces but the first, which it keeps."""
    rows, cols = (row.kept, *row.sent), (col.kept, *col.sent)
    return [height * width for height, width in list(product(rows, cols))[1:] if height * width]


def received(row: Swap, col: Swap) -> list[int]:
    """Return those of each piece that it receives: its adjoint sends them back."""
    return sent(row._replace(sent=row.received), col._replace(sent=col.received))


def exchange_bytes(row: Swap, col: Swap, pixel_bytes: int, passes: int) -> tuple[Traffic, int]:
    """Return the messages of a rank in an exchange, whose gradients go back in so many `passes`, and the bytes of its
    strips. The network's input, which has no gradient, is not cast before."""
    out, back = sent(row, col), received(row, col)
    backward = SentBytes(len(back), sum(back) * pixel_bytes) * passes
    strips = (sum(out) + sum(back)) * (1 + passes) * pixel_bytes
    return Traffic(SentBytes(len(out), sum(out) * pixel_bytes), backward), strips
