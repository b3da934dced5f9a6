"""What one rank does along one dim at each layer of a network spread over an axis, as sizes: what costs follow from.

The same for rows and columns; the cost of a block is then a sum of products of its row's and its column's sizes.
Ranks whose steps are equal cost the same, so costs are worked out once for each kind of rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tiledseg.geometry.decomposition import Partition
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer import Layer, PopConcatenate, Stash, TransposedConvolution, Upsample
from tiledseg.geometry.layer_windows import LayerWindows, layer_windows


class Swap(NamedTuple):
    """One rank's part in an exchange along one dim: positions and messages that it sends and receives."""

    sent: int = 0
    sends: int = 0
    received: int = 0
    receives: int = 0


class DimStep(NamedTuple):
    """One layer on one rank along one dim; sizes in positions.

    `held`: what the rank has of the tensor; `source`: what of it goes on, into the exchange where `exchanged`, else
    into the layer; `swap`: its part in the exchange; `moves`: whether its window is more than its own block, or its
    neighbours need of that; `window`: what is there behind the exchange; `read`: the same with the layer's padding,
    which a dim that is not cut leaves to the layer; `computed`: outputs made; `given`: those of them that go on;
    `owned`: the rank's own part of the tensor. For a layer that pops a skip all but `given` are the skip's, and
    `joined` is what the rank has of the other tensor.
    """

    held: int
    source: int
    exchanged: bool
    swap: Swap
    moves: bool
    window: int
    read: int
    computed: int
    given: int
    owned: int
    joined: int


RankSteps = tuple[DimStep, ...]


@dataclass(frozen=True)
class RankKinds:
    """The different ranks of an axis, and how many there are of each."""

    steps: tuple[RankSteps, ...]
    counts: tuple[int, ...]


@lru_cache(maxsize=64)
def rank_kinds(layers: tuple[Layer, ...], partition: Partition, fusion: int = 1) -> RankKinds:
    """The kinds of ranks along one axis. Raises GeometryError where the network cannot be so cut."""
    found = Counter(rank_steps(layers, partition, fusion))
    return RankKinds(tuple(found), tuple(found.values()))


def rank_steps(layers: tuple[Layer, ...], partition: Partition, fusion: int = 1) -> list[RankSteps]:
    """The steps of every rank along one axis, in order. Raises GeometryError where the network cannot be so cut."""
    windows = layer_windows(layers, partition, fusion)
    parts = [_exchange(w) for w in windows]
    return [tuple(_walk(windows, parts, index)) for index in range(partition.parts)]


def swaps(partition: Partition, windows: Sequence[Interval]) -> list[Swap]:
    """Every rank's part in the exchange after which rank i holds `windows[i]`: what `plan_exchange` says, at once."""
    edges = partition.edges
    found = [[0, 0, 0, 0] for _ in windows]
    for taker, window in enumerate(windows):
        wanted = window.clip(partition.whole)
        giver = bisect_right(edges, wanted.start) - 1
        while giver < partition.parts and edges[giver] < wanted.stop:
            size = min(edges[giver + 1], wanted.stop) - max(edges[giver], wanted.start)
            if size and giver != taker:
                sender, receiver = found[giver], found[taker]
                sender[0] += size
                sender[1] += 1
                receiver[2] += size
                receiver[3] += 1
            giver += 1
    return [Swap(*counts) for counts in found]


def _exchange(windows: LayerWindows) -> list[Swap] | None:
    if not windows.exchanged:
        return None
    if windows.skip_partition is not None:
        return swaps(windows.skip_partition, windows.skip)
    return swaps(windows.input, windows.read)


def _walk(windows: Sequence[LayerWindows], parts: Sequence[list[Swap] | None], index: int) -> Iterator[DimStep]:
    """The steps of rank `index`, as `spatial.network` compiles them."""
    held = windows[0].input.owned(index)
    stashed: dict[str, Interval] = {}
    for at, part in zip(windows, parts, strict=True):
        whole = at.input.parts == 1
        given = at.output.whole if whole else at.given[index]
        tensor, partition = held, at.input
        read = at.input.whole if whole else at.read[index]
        inside = read.clip(held)  # which may have the padding of a layer behind it
        if isinstance(at.layer, PopConcatenate):
            assert at.skip_partition is not None, "a layer that pops a skip knows how the skip is cut"
            tensor, partition, read = stashed[at.layer.skip], at.skip_partition, at.skip[index]
            inside = read
        block, swap = partition.owned(index), Swap() if part is None else part[index]
        yield DimStep(
            held=tensor.size,
            source=inside.size if part is None else block.size,
            exchanged=part is not None,
            swap=swap,
            moves=part is not None and (block != read or swap.sends > 0),
            window=inside.size if part is None else read.size,
            read=read.size,
            computed=_computed(at.layer, read, given, whole),
            given=given.size,
            owned=block.size,
            joined=held.size,
        )
        held = given
        if isinstance(at.layer, Stash):
            stashed[at.layer.skip] = given


def _computed(layer: Layer, read: Interval, given: Interval, whole: bool) -> int:
    """Outputs that a layer makes of what it reads; those of a cut dim may be cropped behind it."""
    if whole:
        return given.size
    if isinstance(layer, TransposedConvolution):
        return (read.size - 1) * layer.step + layer.reach + 1
    return layer.output_size(read.size) if isinstance(layer, Upsample) else given.size
