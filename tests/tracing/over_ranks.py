"""Networks that people use, as they are, over ranks: y, dx, dW and moved statistics against the plain module's on the
whole image, in float64; and messages against the plan's.

    python -m tests.tracing.over_ranks [NAME ...]

prints a row of the table in benchmarks/foreign-networks.md for each network of `REAL`, whose name has one of the words.
Each is traced once, and its ranks are forks of this process: 1, 2 and 4, by uneven blocks in mode `layer`; with tiles
in modes `read` and `exchange`, where the halo lets them be small; and in 2 and 4 stages, where it is trained.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.foreign_networks.networks import REAL, Foreign
from benchmarks.forks import import_all, run_ranks
from tests.law.cases import IGNORED, as_batch, difference, gradients
from tests.law.steps import Steps, gathered, train
from tests.spatial.twins import OpenAxes, Result, copied, loss_weights, start, undivided
from tests.tracing.cases import NETWORKS, ForeignCase, traced
from tests.tracing.cases import Foreign as Named
from tiledseg.comm.launch import detect
from tiledseg.comm.mesh import Axes, Mesh, serial_axes
from tiledseg.comm.session import open_mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.errors import ConfigError, GeometryError
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
SECONDS = 900.0  # for the ranks of one job


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
    totals, meter, calls = list[Pair](), axes.point_to_point.meter, list[int]()
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


@dataclass(frozen=True)
class RealCase(ForeignCase):
    """A network of `REAL` on a raster a little smaller than its image."""

    @property
    def raster(self) -> Pair:
        height, width = NETWORKS[self.unet.name].size or (0, 0)
        return height - 3, width - 5


def steps_of(name: str, parallel: ParallelConfig) -> Steps:
    grid = (1, 1) if parallel.stages > 1 else (3, 2)
    return Steps(RealCase(Named(name), grid), parallel, images=((0,),))


def plain_step(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of a training step by the module that its author wrote, on the whole image."""
    module, data = NETWORKS[name].module().train(), steps_of(name, ParallelConfig(stages=2)).dataset((1, 1))
    sample = data.load(0, data.tilings[0].tiles[0])
    rows, cols = sample.tile.core_in_output.slices
    target_BHW = torch.from_numpy(sample.y_HW).long()[None]
    loss = functional.cross_entropy(module(as_batch(sample.x_CHW))[:, :, rows, cols], target_BHW, ignore_index=IGNORED)
    loss.backward()
    return loss.item(), gradients(module)


def in_parts(name: str, mesh: Mesh, parallel: ParallelConfig, plain: tuple[float, dict[str, torch.Tensor]]) -> float:
    """Return how far the loss and gradients of a training step are from those of the plain module."""
    run = gathered(train(steps_of(name, parallel), mesh), mesh)
    assert run.losses[0] is not None
    return max(abs(run.losses[0] / plain[0] - 1), difference(run.gradients, plain[1]))


class Rows:
    """The program: a row a network."""

    def __init__(self, name: str, foreign: Foreign) -> None:
        self.name, self.foreign, self.size = name, foreign, foreign.size or (64, 96)
        draw = torch.Generator().manual_seed(5)
        self.x_BCHW = torch.randn(1, foreign.bands, *self.size, generator=draw, dtype=torch.float64)
        self.errors: dict[str, float | str] = {}

    def line(self) -> str:
        """Return the row."""
        began = time.perf_counter()
        self.expected = undivided(self.foreign.module(), self.x_BCHW)
        try:
            self.network = traced(self.name)
        except (ConfigError, GeometryError) as error:
            return f"| {self.name} | refused: {error} | | |"
        tracing = time.perf_counter() - began
        self.trains = not self.foreign.maps
        self.plain = plain_step(self.name) if self.trains else None
        self._try("1", partial(self._together, in_blocks, serial_axes()))
        for ranks in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                ends = run_ranks(self._rank, ranks, Path(folder), SECONDS)
            self.errors |= dict(json.loads(line[1:]) for line in ends[0].out.splitlines() if line.startswith("="))
            codes = [end.code for end in ends]
            if any(codes):
                self.errors[f"{ranks} ranks"] = f"codes {codes}: {ends[0].err[-300:]} {ends[-1].err[-300:]}"
        halo = f"{max(minimum_halo(self.network.graph))}, {network_footprint(self.network.graph).alignment}"
        seen = f", gradients reach {reach(self.network, self.x_BCHW)}" if self.foreign.tiles else ""
        numbers = [each for each in self.errors.values() if isinstance(each, float)]
        faults = "".join(f"; {way}: {each}" for way, each in self.errors.items() if isinstance(each, str))
        ways = ", ".join(way for way, each in self.errors.items() if isinstance(each, float))
        took = f"{tracing:.0f} of {time.perf_counter() - began:.0f} s"
        worst = f"{max(numbers):.1e}" if numbers else ""
        worst += "".join(
            f"; {way}: {each:.1e}" for way, each in self.errors.items() if isinstance(each, float) and each > 1e-12
        )
        return f"| {self.name} | {self.size[0]} x {self.size[1]} | {halo}{seen} | {ways} | {worst}{faults} | {took}"

    @property
    def shape(self) -> torch.Size:
        return self.expected.y_BCHW.shape

    def _together(self, compute: Callable[..., Result], axes: Axes) -> float:
        return distance(compute(self.network, self.x_BCHW, axes, self.shape), self.expected)

    def _try(self, way: str, run: Callable[[], float]) -> None:
        try:
            self.errors[way] = run()
        except (ConfigError, GeometryError, AssertionError) as error:
            self.errors[way] = f"{type(error).__name__}: {error}"

    def _rank(self) -> int:
        """Run as one of the ranks of a job; rank 0 prints."""
        torch.set_num_threads(1)
        mesh = open_mesh(detect(os.environ), os.environ, "gloo")
        opened, ways = OpenAxes(mesh), dict[str, Callable[[], float]]()
        for rows, cols in [(2, 1), (1, 2)] if mesh.size == 2 else [(2, 2)]:
            ways[f"{rows} x {cols}"] = partial(self._together, in_blocks, opened.of(rows, cols))
        if self.foreign.tiles:
            axes = opened.of(*((2, 1) if mesh.size == 2 else (2, 2)))
            ways[f"read on {mesh.size}"] = partial(self._together, in_tiles, axes)
            if self.plain is not None and mesh.size == 4:
                mode = ParallelConfig(halo="exchange", mesh=[2, 2])
                ways["exchange on 4"] = lambda: in_parts(self.name, mesh, mode, self.plain)
        if self.plain is not None:
            staged = ParallelConfig(stages=mesh.size, balance="modelled")
            ways[f"{mesh.size} stages"] = lambda: in_parts(self.name, mesh, staged, self.plain)
        for way, run in ways.items():
            self._try(way, run)
            mine = self.errors[way]
            found = mesh.communicator.gather_objects(mine)
            faults = [each for each in found if isinstance(each, str)]
            if mesh.rank == 0:
                print("=" + json.dumps((way, faults[0] if faults else max(found))), flush=True)
        opened.close()
        mesh.communicator.close()
        return 0


def main() -> None:
    """Print the rows."""
    import_all()
    torch.set_num_threads(1)
    NETWORKS.update(REAL)
    words = sys.argv[1:]
    for name, foreign in REAL.items():
        if not words or any(word in f"={name}=" for word in words):
            try:
                print(Rows(name, foreign).line(), flush=True)
            except ImportError as error:
                print(f"left out: {name}: {error}", flush=True)


if __name__ == "__main__":
    main()
