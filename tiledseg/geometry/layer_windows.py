"""A whole network spread over the ranks of one axis: what each rank holds of each tensor, and where halos travel.

Along one dim, as all of `geometry`. Tensor k is the input of layer k, the last one the network's output. Each rank
owns a block of every tensor. Where a layer's outputs need more than that, an exchange before it brings the rest; layers
behind it that need a halo too can share that exchange, at the price of computing their overlap twice: a *run* of
`fusion` such layers. `fusion` 1 is a thin halo at each layer and nothing computed twice (E = 1); a run as long as the
network is one exchange of its input. The numbers computed are the same for all.

The exchange for a convolution is made before the activation (and whatever else is zero at zero) in front of it. The
activation then works in place on the window, halo and zero padding included, and autograd keeps that one tensor for
both layers in place of two (docs/decisions/0006).

A run does not pass a layer that pops a skip stashed before the run: the skip would need an exchange of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tiledseg.errors import GeometryError
from tiledseg.geometry.decomposition import Partition, WindowExchange, plan_exchange
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer import AveragePool, Convolution, Layer, Norm, Pool, PopConcatenate, Stash, Upsample
from tiledseg.geometry.receptive_field import total_stride

WHOLE = 1 << 30  # a fusion longer than any network: one exchange of the input


@dataclass(frozen=True)
class LayerWindows:
    """One layer over all ranks of the axis; one entry a rank in each tuple.

    `held`: the input it has; `read`: the input it computes from, which may reach beyond the tensor where the layer
    pads, or comes behind the padding of a convolution; `given`: the output. `exchanged`: whether halos travel before
    the layer, or, for a layer that pops a skip, whether the skip's do; `skip`: what it takes of the skip.
    """

    layer: Layer
    input: Partition
    output: Partition
    held: tuple[Interval, ...]
    read: tuple[Interval, ...]
    given: tuple[Interval, ...]
    exchanged: bool
    skip: tuple[Interval, ...] = ()
    skip_partition: Partition | None = None

    def exchange(self, index: int) -> WindowExchange | None:
        """Rank `index`'s part in the exchange before the layer; None where there is none."""
        if not self.exchanged:
            return None
        if self.skip_partition is not None:
            return plan_exchange(self.skip_partition, self.skip, index)
        return plan_exchange(self.input, self.read, index)


@lru_cache(maxsize=64)
def layer_windows(
    layers: tuple[Layer, ...], partition: Partition, fusion: int = 1, early: bool = True
) -> tuple[LayerWindows, ...]:
    """The windows of every layer, for an input that is cut by `partition`. `early` False: exchanges come right before
    the layer that needs them.

    Raises GeometryError where a rank would own nothing of a tensor, a skip does not fit, or `fusion` is below 1.
    """
    if fusion < 1:
        raise GeometryError(f"fusion of {fusion} layers; give at least 1")
    partitions = _partitions(layers, partition)
    exchanges = _exchange_points(layers, partitions, fusion)
    carried = _carriers(layers, exchanges) if early else {}
    return tuple(reversed(list(_walk_back(layers, partitions, exchanges, carried))))


def settle(layers: tuple[Layer, ...], partition: Partition) -> Partition:
    """The partition with each inner edge moved to the nearest place at which the ranks' blocks fit all layers.

    That is: no pooling window lies across it, and a skip is cut where the tensor is that it meets. Then no halo travels
    but what convolutions need. Padded networks fit at every multiple of their alignment; unpadded ones elsewhere. An
    edge without such a place within the alignment stays.
    """
    reach = total_stride(layers)
    inner: list[int] = []
    for edge, low, high in zip(partition.edges[1:-1], partition.edges, partition.edges[2:], strict=False):
        near = sorted(range(max(low + 1, edge - reach), min(high, edge + reach + 1)), key=lambda e: abs(e - edge))
        inner.append(next((e for e in near if _fits(layers, e) and e > (inner or [0])[-1]), edge))
    return Partition((0, *inner, partition.size))


def _fits(layers: Sequence[Layer], edge: int) -> bool:
    stashed: dict[str, int] = {}
    for layer in layers:
        if isinstance(layer, Stash):
            stashed[layer.skip] = edge
        elif isinstance(layer, PopConcatenate) and stashed[layer.skip] - layer.crop != edge:
            return False
        following = layer.output_edge(edge)
        if isinstance(layer, Pool) and layer.required_input(Interval(following, following + 1)).start != edge:
            return False
        edge = following
    return True


def _partitions(layers: Sequence[Layer], partition: Partition) -> list[Partition]:
    """The partition of every tensor. Behind a concatenation it is that of the input, whose size the skip must have."""
    partitions, stashed = [partition], {}
    for layer in layers:
        current = partitions[-1]
        if isinstance(layer, Stash):
            stashed[layer.skip] = current
        elif isinstance(layer, PopConcatenate) and stashed[layer.skip].size - 2 * layer.crop != current.size:
            raise GeometryError(
                f"layer '{layer.name}' concatenates {current.size} positions with a skip of "
                f"{stashed[layer.skip].size}, less 2 x {layer.crop} cropped; choose another input size"
            )
        partitions.append(current.through(layer))
    return partitions


def _exchange_points(layers: Sequence[Layer], partitions: Sequence[Partition], fusion: int) -> set[int]:
    """The layers before which halos travel: the first of each run."""
    points: set[int] = set()
    stashed: dict[str, int] = {}
    run, start = 0, -1
    for k, layer in enumerate(layers):
        if isinstance(layer, Stash):
            stashed[layer.skip] = k
        if isinstance(layer, PopConcatenate) and stashed[layer.skip] < start:
            run = 0
        if not _needs_halo(layer, partitions[k], partitions[k + 1]):
            continue
        if run == 0 or run == fusion:
            run, start = 0, k
            points.add(k)
        run += 1
    return points


def _carriers(layers: Sequence[Layer], exchanges: set[int]) -> dict[int, int]:
    """For each exchange that can come earlier, the layer before which it will, by the layer that needs it."""
    earlier = {}
    for k in exchanges:
        first = k
        while isinstance(layers[k], Convolution | AveragePool) and first > 0 and layers[first - 1].keeps_zero:
            first -= 1
        if first < k:
            earlier[k] = first
    return earlier


def _needs_halo(layer: Layer, source: Partition, target: Partition) -> bool:
    if source.parts == 1 or isinstance(layer, PopConcatenate):
        return False
    wanted = (layer.required_input(out).clip(source.whole) for out in target.blocks)
    return any(not own.contains(want) for own, want in zip(source.blocks, wanted, strict=True))


def _walk_back(
    layers: Sequence[Layer], partitions: Sequence[Partition], exchanges: set[int], carried: Mapping[int, int]
) -> Iterator[LayerWindows]:
    """From the outputs, which each rank gives for its own block, back to what must be held of the input."""
    points = {carried.get(k, k) for k in exchanges}
    padded = {m for k, first in carried.items() for m in range(first, k + 1)}  # layers that read padding made before
    wanted = partitions[-1].blocks  # of the tensor behind the layer at hand
    stashes = {layer.skip: k for k, layer in enumerate(layers) if isinstance(layer, Stash)}
    skips: dict[int, list[tuple[Interval, ...]]] = {}
    for k in reversed(range(len(layers))):
        layer, source, target = layers[k], partitions[k], partitions[k + 1]
        given = wanted if source.parts > 1 else target.blocks  # a dim that is not cut is computed whole
        for skip in skips.pop(k, []):
            given = _hull(given, skip)
        read = tuple(_reads(layer, out, source) for out in given)
        if isinstance(layer, Norm) and layer.kind not in ("none", "pixel"):
            read = given = _hull(given, source.blocks)  # its statistics are those of the owned pixels
        if isinstance(layer, PopConcatenate):
            at = stashes[layer.skip]
            skip_source = partitions[at + 1]
            skip = tuple(out.shift(layer.crop) for out in given)
            travels = any(not own.contains(s) for own, s in zip(skip_source.blocks, skip, strict=True))
            # An exchange before the stash can bring along what the skip needs besides; one between them is too late.
            late = any(at < point < k for point in points)
            travels = travels and (late or not any(point <= at for point in points))
            skips.setdefault(at, []).append(skip_source.blocks if travels else skip)
            yield LayerWindows(layer, source, target, given, given, given, travels, skip, skip_source)
            wanted = given
            continue
        exchanged = k in points
        within = read if k in padded else tuple(r.clip(source.whole) for r in read)
        held = source.blocks if exchanged else within
        yield LayerWindows(layer, source, target, held, read, given, exchanged)
        wanted = held


def _reads(layer: Layer, out: Interval, source: Partition) -> Interval:
    """The input that the outputs `out` are computed from, padding included where a layer fills it in."""
    wanted = layer.required_input(out)
    return wanted.clip(source.whole) if isinstance(layer, Upsample) else wanted


def _hull(one: Sequence[Interval], other: Sequence[Interval]) -> tuple[Interval, ...]:
    return tuple(a.hull(b) for a, b in zip(one, other, strict=True))
