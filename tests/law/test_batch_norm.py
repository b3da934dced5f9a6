"""The law of a batch norm that learns: its statistics are of all pixels of all images of a step, on any ranks.

Against torch's own network on the stacked images: losses, weights and running statistics after two steps. The second
step has one image, as the last of an epoch may: then ranks have none, and take part in every sum.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import rasterio
import torch
from torch import nn
from torch.nn import functional

from tests.comm.in_order import Order, in_order
from tests.law.cases import IGNORED, KEY, Case
from tests.law.test_halo_modes import difference
from tests.law.test_in_order import Strip, dataset
from tests.law.test_training_steps import alone, configuration, losses, run
from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import serial_axes
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.config.memory import MemoryConfig
from tiledseg.config.run import Config, ParallelConfig, TilingConfig
from tiledseg.execution.agreement import agree_on_buffers, check_agreement
from tiledseg.execution.halos.halo_modes import LayerMode
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.precision import INPUT_DTYPES, PARAMETER_DTYPES
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.mesh_shape import MeshPosition, MeshShape
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.dropout import set_dropout_key
from tiledseg.models.frozen import factor_of, freeze
from tiledseg.models.network import build_modules
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.spread import choose_spread
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.spatial.network import SpatialNetwork
from tiledseg.training.steps.step import Stepper, StepRules

IMAGES = 3
STEPS = ((0, 1, 2), (1,))
MESHES = ([1, 1], [2, 1], [1, 2], [2, 2])
CASE = Strip(UNet(3, 1, 3, 4, "same", "batch", "bilinear", bands=2, classes=3), (4, 3))
Found = tuple[list[float | None], dict[str, torch.Tensor]]


def whole(case: Case, frozen: Mapping[str, float] = MappingProxyType({})) -> Found:
    """By torch alone: a batch of all images, each with channels of its own dropped. `frozen`: factors by pattern;
    weights of 0 are not trained."""
    network, data = case.network().train(), dataset(case, IMAGES)
    network.layers.update({name: native(module) for name, module in network.layers.items()})
    for name, parameter in network.parameters_by_node():
        parameter.requires_grad = factor_of(name, frozen) != 0
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    tile = case.tiling((1, 1)).tiles[0]
    losses: list[float | None] = []
    for number, images in enumerate(STEPS):
        set_dropout_key(network, *(replace(KEY, step=number, image=image) for image in images))
        samples = [data.load(image, tile) for image in images]
        x_BCHW = torch.stack([torch.from_numpy(sample.x_CHW) for sample in samples])
        y_BHW = torch.stack([torch.from_numpy(sample.y_HW).long() for sample in samples])
        optimizer.zero_grad()
        rows, cols = tile.core_in_output.slices
        loss = functional.cross_entropy(network(x_BCHW)[:, :, rows, cols], y_BHW, ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, network.state_dict()


@cache
def whole_case() -> Found:
    """By which every mesh and order is judged."""
    return whole(CASE)


def native(module: nn.Module) -> nn.Module:
    """torch's own batch norm in place of the project's."""
    return nn.BatchNorm2d(module.num_features).double() if isinstance(module, nn.BatchNorm2d) else module


def ours(
    case: Case,
    mesh: Mesh,
    rows_cols: list[int],
    overlap: bool,
    frozen: Mapping[str, float] = MappingProxyType({}),
    batch: int = 1,
    precision: str = "fp64",
) -> Found:
    asked = parallelism(ParallelConfig(halo="layer", mesh=rows_cols, overlap=overlap))
    tilings = [case.tiling()] * IMAGES
    spread = choose_spread(asked, case.unet.graph(), tilings, mesh.size, IMAGES, case.unet.bands, 8)
    assert spread.together
    network = freeze(case.network(PARAMETER_DTYPES[precision]), frozen).train()
    data = dataset(case, IMAGES, INPUT_DTYPES[precision])
    run = ParallelRun.open(spread, network, mesh, precision)
    passes = run.over(data.tilings, batch)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    stepper = Stepper(optimizer, mesh, passes, run.axes, StepRules(IGNORED, KEY.seed))
    losses = []
    for number, images in enumerate(STEPS):
        parts = passes.mode.share([TileReference(i, t) for i in images for t in range(len(tilings[i]))])
        samples = (data.load(part.image, part.tile) for part in parts)
        losses.append(stepper.run(number, samples, parts, stop=False).loss)
        agree_on_buffers(network, run.axes.weights, passes.mode.speaks(parts))
    check_agreement(network, mesh, run.axes.weights)
    stepper.close()
    run.close()
    return losses, network.state_dict()


@pytest.mark.mpi
@pytest.mark.parametrize("order", [None, Order.QUEUE, Order.ANY], ids=["gloo", "queue", "turns"])
@pytest.mark.parametrize("rows_cols", MESHES, ids=str)
def test_statistics_are_of_the_whole_step(rows_cols: list[int], order: Order | None, meshes: dict[str, Mesh]) -> None:
    """On gloo while halos travel, and where communication keeps the order in which it was posted, as on NCCL."""
    real = meshes["gloo"]
    if rows_cols[0] * rows_cols[1] > real.size:
        pytest.skip("needs more ranks")
    expected, state = whole_case()
    with nullcontext(real) if order is None else in_order(real, order, turns=order is Order.ANY) as mesh:
        found, own = ours(CASE, mesh, rows_cols, overlap=order is None)
    assert found == pytest.approx(expected, rel=1e-12)
    assert difference(own, state) < 1e-12


@pytest.mark.mpi
@pytest.mark.parametrize("frozen", [{"encoder*": 0}, {"encoder0*": 0, "decoder*": 0}], ids=["encoder", "parts"])
@pytest.mark.parametrize("rows_cols", MESHES[:2], ids=str)
def test_frozen_norms_sum_alike(rows_cols: list[int], frozen: dict[str, float], meshes: dict[str, Mesh]) -> None:
    """A rank without an image sums for those norms alone whose input wants a gradient, as the others do."""
    mesh = meshes["gloo"]
    if rows_cols[0] * rows_cols[1] > mesh.size:
        pytest.skip("needs more ranks")
    expected, state = whole(CASE, frozen)
    found, own = ours(CASE, mesh, rows_cols, overlap=True, frozen=frozen)
    assert found == pytest.approx(expected, rel=1e-12)
    assert difference(own, state) < 1e-12


@pytest.mark.mpi
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("rows_cols", [[1, 1], [1, 2]], ids=str)
def test_images_at_once_are_a_step(rows_cols: list[int], batch: int, meshes: dict[str, Mesh]) -> None:
    """Each with its own dropout. Of three images two at once, or all; the second step has one."""
    mesh = meshes["gloo"]
    if rows_cols[0] * rows_cols[1] > mesh.size:
        pytest.skip("needs more ranks")
    case = replace(CASE, unet=replace(CASE.unet, dropout=0.3))
    expected, state = whole(case)
    found, own = ours(case, mesh, rows_cols, overlap=True, batch=batch)
    assert found == pytest.approx(expected, rel=1e-12)
    assert difference(own, state) < 1e-12


@pytest.mark.mpi
@pytest.mark.parametrize("batch", [1, 2])
def test_ranks_do_not_change_a_float32_loss_line(batch: int, meshes: dict[str, Mesh]) -> None:
    """A kernel sums the gradients of a batch in float32: so which images make one follows from the step alone."""
    torch.set_num_threads(1)
    mesh = meshes["gloo"]
    found, own = ours(CASE, mesh, [1, 1], overlap=False, batch=batch, precision="fp32")
    expected, state = mesh.on_root(
        lambda: ours(CASE, mesh_alone(), [1, 1], overlap=False, batch=batch, precision="fp32")
    )
    assert found == pytest.approx(expected, rel=1e-13)
    assert all(torch.equal(tensor, state[name]) for name, tensor in own.items())


def test_images_of_one_cut_run_at_once_whatever_a_rank_has_of_them() -> None:
    """The first of two ranks has 16 rows of each image, the second has 16 of one, and 20 of the others."""
    unet, heights = CASE.unet, (36, 32, 34, 36)
    tilings = tuple(make_tiling((height, 20), (2, 1), network_footprint(unet.graph())) for height in heights)
    dealt = []
    for rank in range(4):
        axes = replace(serial_axes(), shape=MeshShape(2, 2, 1), position=MeshPosition(rank // 2, rank % 2, 0))
        network = build_modules(unet, seed=0)
        mode = LayerMode(SpatialNetwork(network, axes), network, mesh_alone(), tilings, "fp64", batch=2)
        parts = mode.share([TileReference(image, 0) for image in range(len(heights))])
        dealt.append([[part.image for part in batch] for batch in mode.batches(parts)])
    assert dealt == [[[1], [3]], [[1], [3]], [[0, 2]], [[0, 2]]]


def mesh_alone() -> Mesh:
    return Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")


def turned(path: Path, turns: int) -> None:
    """Another image beside one: its rows from another one on."""
    other = shutil.copy(path, path.with_stem(path.stem + "-turned" * turns))
    with rasterio.open(other, "r+") as file:
        file.write(np.roll(file.read(), 11 * turns, axis=1))


@pytest.mark.mpi
@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("fp64", marks=pytest.mark.ranks(1, 3)),
        pytest.param("fp32", marks=pytest.mark.ranks(2, 4)),
    ],
)
def test_a_run_is_that_of_one_rank(precision: str, shared: Path, meshes: dict[str, Mesh]) -> None:
    """Three images, two a step: the second step of an epoch has one. Stopped after two epochs, it goes on. In float32
    too to the last digits: each image's gradients come by themselves into sums in float64."""
    mesh = meshes["gloo"]
    names = {"image": "images", "labels": "labels"}
    files = [(shared / f"{name}.tif", turns) for name in names for turns in range(1, IMAGES)]
    mesh.on_root(lambda: [turned(*file) for file in files] and None)

    def several(output: str, epochs: int, **given: Any) -> Config:
        config = configuration(shared, shared / f"{output}-{precision}", precision, "sgd", None)
        stems = {key: [name + "-turned" * turns for turns in range(IMAGES)] for name, key in names.items()}
        paths = {key: [str(shared / f"{stem}.tif") for stem in own] for key, own in stems.items()}
        return replace(
            config,
            data=replace(config.data, **paths),
            model=replace(config.model, norm="batch"),
            train=replace(config.train, epochs=epochs, images_per_step=2),
            **({"parallel": ParallelConfig(halo="layer", mesh=[1, 1], idle_ranks=True)} | given),
        )

    expected = mesh.on_root(lambda: run(several("steps-alone", 3), alone()))
    run(several("steps", 2), mesh)
    found = run(several("steps", 3), mesh)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-10 if precision == "fp64" else 1e-12)
    assert len(losses(found)) == 6
    if precision == "fp64":  # and each image whole on a rank of mode `read`, in blocks
        in_blocks = {"parallel": ParallelConfig(), "tiling": TilingConfig(grid=1), "memory": MemoryConfig(blocks=2)}
        assert losses(run(several("blocks", 3, **in_blocks), mesh)) == pytest.approx(losses(expected), rel=1e-10)
