"""Networks over ranks: y, dx, dW and moved statistics against the plain module on the whole image, in float64; messages
against the plan's; the halo against what gradients reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tests.law.cases import difference
from tests.spatial.twins import Result, copied, loss_weights, start
from tiledseg.comm.mesh import Axes
from tiledseg.geometry.halo import minimum_halo, network_footprint
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.layers.block import tile_places
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.walk.cost import rank_walk
from tiledseg.planning.walk.mode_cost import statistic_sums
from tiledseg.planning.walk.rank_steps import rank_steps
from tiledseg.spatial.halo_exchange import part
from tiledseg.spatial.network import SpatialNetwork

Pair = tuple[int, int]


def distance(found: Result, expected: Result) -> float:
    """Return the largest relative difference: of y, dx, all dW together and all moved statistics together."""
    assert found.gradients.keys() == expected.gradients.keys()
    moved = sorted(found.buffers.keys() & expected.buffers.keys())
    pairs = [({"": a}, {"": b}) for a, b in ((found.y_BCHW, expected.y_BCHW), (found.dx_BCHW, expected.dx_BCHW))]
    pairs.append((found.gradients, expected.gradients))
    pairs += [tuple({name: each.buffers[name] for name in moved} for each in (found, expected))] if moved else []  # type: ignore[list-item]
    return max(difference(*pair) for pair in pairs)


def uneven(size: int, parts: int) -> Partition:
    """Cut a dim so that no two parts are alike."""
    return Partition((*(size * k * (k + 1) // (parts * (parts + 1)) for k in range(parts)), size))


@contextmanager
def counted(axes: Axes) -> Iterator[list[Pair]]:
    """Count this rank's messages and collective calls meanwhile, and the bytes of both."""
    totals, meter, calls = list[Pair](), axes.point_to_point, list[int]()
    before, names = (meter.messages, meter.bytes), ("broadcast", "all_reduce_sum")

    def call(original: Any, tensor: torch.Tensor, *more: int) -> Any:
        calls.append(tensor.nbytes)
        return original(tensor, *more)

    for name in names:
        setattr(axes.image, name, partial(call, getattr(axes.image, name)))
    yield totals
    totals += [(meter.messages - before[0], meter.bytes - before[1]), (len(calls), sum(calls))]
    for name in names:
        delattr(axes.image, name)


def planned(
    network: GraphNetwork, rows: Partition, cols: Partition, at: Pair, size: Pair, further: list[int]
) -> list[Pair]:
    """Return the messages and collective calls that the plan has for the rank at (row, col), in a step, and the bytes
    of both. `further`: bytes of messages that no plan has."""
    graph = network.graph if network.training else network.graph.with_still_statistics()
    steps = rank_steps(graph, rows)[at[0]], rank_steps(graph.along_columns, cols)[at[1]]
    ranks = rows.parts * cols.parts
    forward, backward = statistic_sums(graph, network.bands, ranks, size, 8)
    walk = rank_walk(graph, network.bands, *steps, ranks, 8)
    sent = walk.sent + walk.returned + further
    return [(len(sent), sum(sent)), (forward[0] + backward[0], forward[1] + backward[1])]


def of_input(spatial: SpatialNetwork, x_BCHW: torch.Tensor, rows: Partition, cols: Partition) -> list[int]:
    """Return the bytes of the messages by which the gradient of the input goes back: a plan has none."""
    sizes, sources = list[int](), spatial._rows.sources
    for action, taken in zip(spatial._program(rows, cols), sources, strict=True):
        for bring, source in zip(action.inputs, taken, strict=True):
            if source == 0 and bring.exchange is not None:
                own = x_BCHW.shape[2:] if bring.crop is None else bring.crop.shape
                sides = (side or size for side, size in zip(bring.exchange.window, own, strict=True))
                window = torch.empty(*x_BCHW.shape[:2], *sides, device="meta", dtype=x_BCHW.dtype)
                for patch in bring.exchange.receives.values():
                    sizes.append(part(window, patch).nbytes)
    return sizes


def in_blocks(network: GraphNetwork, x_BCHW: torch.Tensor, axes: Axes, y_shape: torch.Size) -> Result:
    """Return what ranks make together in mode `layer`. Raises AssertionError where messages are not the plan's."""
    assert axes.position is not None
    network = copied(network)  # type: ignore[assignment]
    spatial, size, at = SpatialNetwork(network, axes), tuple(x_BCHW.shape[2:]), axes.position
    rows, cols = spatial.settle(uneven(size[0], axes.shape.rows), uneven(size[1], axes.shape.cols))
    with counted(axes) as totals:
        run = start(spatial, network, x_BCHW, rows, cols)
        run.backward(y_shape)
    further = of_input(spatial, run.part_BCHW, rows, cols)
    plan = planned(network, rows, cols, (at.row, at.col), size, further)  # type: ignore[arg-type]
    found = run.finish(x_BCHW.shape, y_shape)
    assert totals == plan, f"messages {totals}, planned {plan}"
    return found


def in_tiles(network: GraphNetwork, x_BCHW: torch.Tensor, axes: Axes, y_shape: torch.Size) -> Result:
    """Return what ranks make in mode `read`, each of its tiles."""
    network, size = copied(network), tuple(x_BCHW.shape[2:])  # type: ignore[assignment]
    tiling = make_tiling(size, (3, 2), network_footprint(network.graph))  # type: ignore[arg-type]
    y_BCHW, dx_BCHW = torch.zeros(y_shape, dtype=x_BCHW.dtype), torch.zeros_like(x_BCHW)
    for tile in tiling.tiles[axes.image.rank :: axes.image.size]:
        read, core = ((slice(None), slice(None), *box.slices) for box in (tile.context, tile.core))
        part_BCHW = x_BCHW[read].clone().requires_grad_()
        made_BCHW = network(part_BCHW.clone(), tile_places(network.graph, tiling.whole, tile.context))
        own_BCHW = made_BCHW[(slice(None), slice(None), *tile.core_in_output.slices)]
        (own_BCHW * loss_weights(y_shape)[core]).sum().backward()
        assert part_BCHW.grad is not None
        y_BCHW[core] = own_BCHW.detach()
        dx_BCHW[read] += part_BCHW.grad
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}
    for tensor in (y_BCHW, dx_BCHW, *gradients.values()):
        axes.image.all_reduce_sum(tensor).wait()
    return Result(y_BCHW, dx_BCHW, gradients, {})


def reach(network: GraphNetwork, x_BCHW: torch.Tensor) -> list[int]:
    """Return how many pixels before and after an aligned window of outputs gradients reach."""
    halo, unit = max(minimum_halo(network.graph)), network_footprint(network.graph).alignment
    first = -(-halo // unit) * unit
    x_BCHW, at = x_BCHW.clone().requires_grad_(), slice(first, first + unit)
    (gradient_BCHW,) = torch.autograd.grad(network(x_BCHW)[:, :, at].square().sum(), x_BCHW)
    rows = (gradient_BCHW.abs().amax((0, 1, 3)) > 1e-14 * gradient_BCHW.abs().max()).nonzero()
    return [first - int(rows.min()), int(rows.max()) - (first + unit - 1)]
