"""Loops that are not ours, of docs/how-to/own-loop.md: tiles, torch's DDP; and
what a program's exit makes of process groups that were opened for it, where it closes none."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import tiledseg
from tests.comm.launching import mpirun, needs_mpirun, run_job
from tests.conftest import NIGHTLY
from tests.foreign.modules import Somebody
from tests.law.cases import relative
from tests.small_files import write_raster
from tiledseg.comm.mesh import Mesh

SHAPE, GRID, STEPS = (66, 80), (3, 4), 2
PIXELS, TILES = SHAPE[0] * SHAPE[1], GRID[0] * GRID[1]


def write(folder: Path) -> None:
    draw = np.random.default_rng(2)
    write_raster(folder / "image.tif", draw.integers(0, 200, (2, *SHAPE)).astype(np.uint8))
    write_raster(folder / "labels.tif", draw.integers(0, 3, (1, *SHAPE)).astype(np.uint8))


def tiles(folder: Path, module: torch.nn.Module, grid: Any = GRID) -> tiledseg.TileDataset:
    halo = tiledseg.halo(module)
    norm = [100.0, 100.0], [60.0, 60.0]
    return tiledseg.TileDataset(folder / "image.tif", folder / "labels.tif", halo=halo, grid=grid, normalize=norm)


def module() -> Somebody:
    torch.manual_seed(5)
    return Somebody().double()


def summed(scores_BKHW: torch.Tensor, item: dict[str, Any]) -> torch.Tensor:
    return functional.cross_entropy(scores_BKHW, item["mask"][None], ignore_index=255, reduction="sum")


def whole(folder: Path) -> torch.nn.Module:
    """Steps of the whole image at once, in one process."""
    network = module()
    (item,) = tiles(folder, network, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (summed(network(item["image"][None].double()), item) / PIXELS).backward()
        optimizer.step()
    return network


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_loop_over_tiles_takes_the_steps_of_the_whole_image(meshes: dict[str, Mesh], tmp_path: Path) -> None:
    """Each rank its tiles, gradients by torch's DDP."""
    mesh = meshes["gloo"]
    folder = Path(mesh.communicator.broadcast_object(str(tmp_path)))
    mesh.on_root(lambda: write(folder))
    network = module()
    data = tiles(folder, network)
    sampler = tiledseg.TileSampler(data, seed=0)
    assert (sampler.rank, sampler.size) == (mesh.rank, mesh.size)
    runs = network if mesh.size == 1 else DistributedDataParallel(network, find_unused_parameters=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(STEPS):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for left, item in zip(
            range(len(sampler))[::-1], DataLoader(data, batch_size=None, sampler=sampler), strict=True
        ):
            with runs.no_sync() if left and mesh.size > 1 else nullcontext():
                (summed(runs(item["image"][None].double()), item) * mesh.size / PIXELS).backward()
        optimizer.step()
    expected = dict(whole(folder).named_parameters())
    for name, parameter in network.named_parameters():
        assert relative(parameter, expected[name]) < 1e-12, name


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_map_with_a_norm_over_the_image_is_the_modules(meshes: dict[str, Mesh], tmp_path: Path) -> None:
    """The ranks compute it together, whatever the grid."""
    mesh = meshes["gloo"]
    folder = Path(mesh.communicator.broadcast_object(str(tmp_path)))
    mesh.on_root(lambda: write(folder))
    torch.manual_seed(1)
    layers = torch.nn.Conv2d(2, 6, 3, padding=1), torch.nn.GroupNorm(3, 6), torch.nn.ReLU(), torch.nn.Conv2d(6, 3, 1)
    network = torch.nn.Sequential(*layers).double()
    tiledseg.predict_raster(network, folder / "image.tif", folder / "map.tif", grid=GRID, precision="fp64")
    with rasterio.open(folder / "image.tif") as image, rasterio.open(folder / "map.tif") as found, torch.no_grad():
        expected_HW = network(torch.from_numpy(image.read())[None].double())[0].argmax(0)
        np.testing.assert_array_equal(found.read(1), expected_HW.numpy())


THREADS = """
import atexit
import os
from pathlib import Path

def threads_of_gloo():
    return [one for one in Path("/proc/self/task").iterdir() if "gloo" in (one / "comm").read_text()]

atexit.register(lambda: threads_of_gloo() and os._exit(3))  # other handlers have run before
"""
UNCLOSED = f"""{THREADS}
import torch
from torch import nn
import tiledseg

module = tiledseg.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)), mesh=(2, 1))
for _ in range(2):
    module(torch.ones(1, 3, *module.block(16, 16).shape)).square().mean().backward()
    module.reduce_gradients()
assert threads_of_gloo() or torch.__version__ < "2.13"  # older ones give threads no names
"""
COMMAND = f"""{THREADS}
import sys
import torch
from tiledseg.comm.mesh import MeshShape, open_axes
from tiledseg.comm.session import run_on_mesh

def body(mesh):
    global axes
    axes = open_axes(mesh, MeshShape(1, 2, 1))  # never closed
    axes.image.gather_objects(mesh.rank)
    assert threads_of_gloo() or torch.__version__ < "2.13"

code = run_on_mesh(body)
sys.exit(code or 3 * bool(threads_of_gloo()))
"""

GONE = """
import torch
import torch.distributed as dist
from torch import nn
import tiledseg

module = tiledseg.parallelize(nn.Conv2d(3, 2, 3, padding=1), mesh=(2, 1))
x = torch.ones(1, 3, *module.block(16, 16).shape)
module(x)
if dist.get_rank() == 1:
    raise SystemExit(3)
module(x)
"""

OWN_GROUP = """
import atexit
import os
import torch
import torch.distributed as dist
from torch import nn
import tiledseg

@atexit.register
def last():
    dist.all_reduce(torch.ones(1))
    print("it is there", len(dist.distributed_c10d._world.pg_map), flush=True)
    os._exit(0)  # a thread of the program's own Gloo aborts one end of ten, without tiledseg too

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = tiledseg.parallelize(nn.Conv2d(3, 2, 3, padding=1), mesh=(1, 1), verify=False)
module(torch.ones(1, 3, 16, 16))
"""


@needs_mpirun
@pytest.mark.timeout(1200)  # at night
@pytest.mark.parametrize("program", [UNCLOSED, COMMAND], ids=["loop", "command"])
def test_no_thread_of_gloos_is_left_at_the_end(program: str) -> None:
    """Such a thread aborted one of ten loops that close nothing, and once a command called as a function."""
    for _ in range(40 if NIGHTLY else 1):
        done = mpirun(2, "-c", program, seconds=100)
        assert done.code == 0, done.err


@needs_mpirun
def test_an_exit_waits_for_no_rank_that_is_gone() -> None:
    """Ranks that have talked: Gloo waits a year for a first connection, while MPI's end waits for all ranks."""
    assert mpirun(2, "-c", GONE, seconds=100).code != 0


def test_a_group_of_the_program_is_left_to_it() -> None:
    """Those that were made beside it are closed by then. Under torch 2.8 Gloo speaks of the program's own."""
    done = run_job([sys.executable, "-c", OWN_GROUP])
    said = [re.sub(r"^\[Gloo\].*\n", "", text, flags=re.MULTILINE) for text in (done.out, done.err)]
    assert (done.code, *said) == (0, "it is there 1\n", "")
