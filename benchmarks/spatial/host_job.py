"""Host time that an exchange of layer mode adds, where tensors are so small that nothing else takes any.

    [mpirun -n 4] python -m benchmarks.spatial.host_job [ROUNDS]

A chain of 3 x 3 convolutions on an image of 16 px, forward and backward: on one rank without an exchange, and spread
over a mesh of 2 x 1 and of 2 x 2. The difference, over the exchanges, is what one costs, each way. By itself a process
stands for the first rank of each mesh with messages that go nowhere (`silent`): what is left is the library's work.
Started by mpirun it is a rank of one of them, whose messages travel (`real`). All take turns; thread time of the rank's
own thread, process time with the transport's threads; one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tiledseg.comm.axes import Axes, open_axes, serial_axes
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.session import leave, run_on_mesh
from tiledseg.comm.transports.exchange import BytePointToPoint
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.mesh_shape import MeshPosition, MeshShape
from tiledseg.spatial.network import SpatialNetwork

LAYERS, SIDE, CHANNELS = 12, 16, 4
SHAPES = {2: (2, 1), 4: (2, 2)}
Times = tuple[float, float, float]  # wall, thread, process


class Silent(BytePointToPoint):
    """Messages that go nowhere."""

    def _post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        return lambda: None

    def close(self) -> None:
        """Nothing to end."""


def silent_axes(rows: int, cols: int) -> Axes:
    """Those of the first rank of a mesh whose other ranks do not exist."""
    halos = Silent(0, rows * cols, reads_gpu=False)
    return replace(serial_axes(), shape=MeshShape(1, rows, cols), position=MeshPosition(0, 0, 0), point_to_point=halos)


def passes(axes: Axes) -> Callable[[], None]:
    """Forward and backward of the chain, on this rank's block."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(*(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(LAYERS)))
    for weight in network.parameters():
        weight.requires_grad_(False)
    spatial = SpatialNetwork(network.to(memory_format=torch.channels_last), axes)  # type: ignore[call-overload]
    at = axes.position
    assert at is not None, "every rank has a block"
    rows, cols = Partition.even(SIDE, axes.shape.rows), Partition.even(SIDE, axes.shape.cols)
    shape = (1, CHANNELS, rows.owned(at.row).size, cols.owned(at.col).size)
    x_BCHW = torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last).requires_grad_()

    def run() -> None:
        torch.autograd.grad(spatial(x_BCHW, rows, cols).sum(), x_BCHW)

    return run


def timed(run: Callable[[], None], times: int = 20) -> Times:
    """Microseconds of one run."""
    begun = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(times):
        run()
    ended = time.perf_counter(), time.thread_time(), time.process_time()
    wall, thread, process = (1e6 * (after - before) / times for before, after in zip(begun, ended, strict=True))
    return wall, thread, process


def measure(axes: dict[str, Axes], rounds: int, together: Callable[[], object]) -> dict[str, list[Times]]:
    """Microseconds an exchange, each way, of each axes, round by round; `together` brings ranks to one point."""
    plain, runs = passes(serial_axes()), {name: passes(one) for name, one in axes.items()}
    for run in (plain, *runs.values()):
        timed(run, 5)
    found: dict[str, list[Times]] = {name: [] for name in runs}
    for _ in range(rounds):
        alone = timed(plain)
        for name, run in runs.items():
            together()
            wall, thread, process = ((s - a) / (2 * LAYERS) for s, a in zip(timed(run), alone, strict=True))
            found[name].append((wall, thread, process))
    return found


def body(mesh: Mesh, rounds: int) -> None:
    torch.set_num_threads(1)
    axes: dict[str, Any] = {f"silent {rows} x {cols}": silent_axes(rows, cols) for rows, cols in SHAPES.values()}
    if mesh.size > 1:
        rows, cols = SHAPES[mesh.size]
        axes = {f"real {rows} x {cols}": open_axes(mesh, MeshShape(1, rows, cols))}
    found = measure(axes, rounds, mesh.communicator.barrier)
    if mesh.is_root:
        print(json.dumps(found), flush=True)
    for one in axes.values():
        one.close()


if __name__ == "__main__":
    leave(run_on_mesh(partial(body, rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 10)))
