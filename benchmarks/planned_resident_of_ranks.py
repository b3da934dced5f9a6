"""Planned peaks of ranks that share an image in layer mode, beside what their processes hold in memory.

    mpirun -n 4 python -m benchmarks.planned_resident_of_ranks [--kept] [--side 1024] [--norm none]

As `planned_resident`: each rank takes a step on a small image, by which libraries and threads are there, notes what it
holds, and takes two steps on the large one. Also what PyTorch allocates meanwhile. The first rank's, MiB.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from benchmarks.planned_peaks import in_channels_last, step
from benchmarks.planned_resident import status
from tiledseg.architecture.options import NORMS
from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import Axes, open_axes
from tiledseg.comm.launch import detect
from tiledseg.comm.session import open_mesh
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.models.network import build_modules
from tiledseg.planning.step.rank_steps import rank_steps
from tiledseg.planning.walk.block_pass import block_memory
from tiledseg.planning.walk.layer_memory import strip_bytes
from tiledseg.spatial.network import SpatialNetwork
from tiledseg.system.freed_memory import keep_freed_memory, keep_no_more
from tiledseg.tracing.allocations import AllocationMeter

SMALL = 128
SHAPES = {1: (1, 1), 2: (2, 1), 4: (2, 2)}  # of the mesh, by ranks


def planned(unet: UNet, axes: Axes, side: int) -> int:
    """Bytes of a step, with the strips and the block of the input, without weights and their gradients."""
    assert axes.position is not None, "every rank has a block"
    graph, at = unet.graph(), (axes.position.row, axes.position.col)
    cuts = [Partition.even(side, parts) for parts in (axes.shape.rows, axes.shape.cols)]
    row, col = (rank_steps(graph, cut)[index] for cut, index in zip(cuts, at, strict=True))
    memory = block_memory(graph, unet.bands, row, col, axes.shape.ranks_per_image, 4)
    block = 4 * unet.bands * cuts[0].owned(at[0]).size * cuts[1].owned(at[1]).size
    return memory.activations + memory.backward + strip_bytes(graph, unet.bands, row, col, 4) + block


def take_step(network: SpatialNetwork, unet: UNet, side: int) -> None:
    at, shape = network.axes.position, network.axes.shape
    assert at is not None, "every rank has a block"
    rows, cols = Partition.even(side, shape.rows), Partition.even(side, shape.cols)
    height, width = rows.owned(at.row).size, cols.owned(at.col).size
    x_BCHW = torch.empty(1, unet.bands, height, width, memory_format=torch.channels_last)
    step(network, x_BCHW.normal_(), rows, cols)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024, help="of the image, pixels (default 1024)")
    parser.add_argument("--norm", choices=NORMS, default="none")
    parser.add_argument("--kept", action="store_true", help="freed memory is kept")
    options = parser.parse_args()
    (keep_freed_memory if options.kept else keep_no_more)(os.environ)
    torch.set_num_threads(1)
    mesh = open_mesh(detect(os.environ), os.environ)
    axes = open_axes(mesh, MeshShape(1, *SHAPES[mesh.size]))
    unet = UNet(4, base_channels=8, norm=options.norm)
    module = in_channels_last(build_modules(unet, seed=0))
    weights = list(module.parameters())
    for parameter in weights:
        parameter.grad = torch.zeros_like(parameter)
    network = SpatialNetwork(module, axes)
    take_step(network, unet, SMALL)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
    before = status("VmRSS")
    for _ in range(2):
        take_step(network, unet, options.side)
    resident, plan = status("VmHWM") - before, planned(unet, axes, options.side)
    with AllocationMeter([*weights, *(p.grad for p in weights if p.grad is not None)]) as meter:
        take_step(network, unet, options.side)
    if mesh.is_root:
        sizes = (plan / 2**20, meter.peak / 2**20, resident / 2**20)
        print("planned {:.1f}, allocated without strips {:.1f}, resident {:.1f} MiB".format(*sizes), flush=True)
    mesh.communicator.barrier()


if __name__ == "__main__":
    main()
