"""Mode scatter: who reads what, that everybody has what it would have read itself, and what was sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.law.cases import ArrayReader, Case
from tests.law.test_halo_modes import unet
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.passes.part_passes import read_ahead
from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.decomposition import decompose
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.modes.mode_cost import Task, scatter_cost
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.spread import Spread, choose_spread
from tiledseg.planning.step.halo_traffic import Sent
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.tile_reference import TileReference


class Counting(ArrayReader):
    """An array that counts how often each of its pixels is read, some of which are not valid."""

    def __init__(self, pixels_CHW: np.ndarray) -> None:
        super().__init__(pixels_CHW)
        self.info = replace(self.info, has_mask=True)
        self.times_HW = np.zeros(pixels_CHW.shape[1:], np.int64)

    def _read_inside(self, box: Box) -> tuple[np.ndarray, np.ndarray]:
        self.times_HW[box.slices] += 1
        pixels_CHW, valid_HW = super()._read_inside(box)
        return pixels_CHW, valid_HW & (pixels_CHW[0] > -1)


def data_of(case: Case, images: int, margin: int) -> Dataset:
    draw = np.random.default_rng(7)
    plain, shape = case.dataset(), case.raster
    pixels = [Counting(draw.normal(size=(case.unet.bands, *shape)).astype(np.float32)) for _ in range(images)]
    labels = [Counting(draw.integers(0, case.unet.classes, (1, *shape)).astype(np.uint8)) for _ in range(images)]
    tilings = [case.tiling()] * images
    return replace(plain, images=pixels, labels=labels, tilings=tilings, margin=margin, dtype=np.float32)


@pytest.mark.mpi
@pytest.mark.parametrize("margin", [0, 3])
def test_one_rank_reads_each_pixel_once_and_all_have_what_they_would_have_read(
    margin: int, meshes: dict[str, Mesh]
) -> None:
    mesh, case = meshes["mpi"], Case(unet("same", "nearest"), (8, 4))
    graph, asked = case.unet.graph(), parallelism(ParallelConfig(halo="scatter"))
    counted, twin = (data_of(case, 2, margin) for _ in range(2))
    spread = choose_spread(asked, graph, counted.tilings, mesh.size, 1, 3, 4)
    run = ParallelRun.open(spread, case.network(), mesh, "fp32")
    passes = run.over(counted.tilings)
    parts = passes.mode.share([TileReference(i, t) for i in range(2) for t in range(len(counted.tilings[i]))])
    samples = []
    for sample in read_ahead(passes, counted, parts, 2, 2):
        samples.append(sample)
        list(passes.mode.inputs(sample))
    meter = run.axes.point_to_point.meter
    sent = mesh.communicator.gather_objects(Sent(meter.messages, meter.bytes))
    run.close()
    assert len(samples) == len(parts)
    for sample, part in zip(samples, parts, strict=True):
        own = twin.load(part.image, part.tile)
        assert (sample.image, sample.tile, sample.around) == (own.image, own.tile, own.around)
        for name in ("x_CHW", "y_HW", "valid_HW", "around_HW"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(own, name), name)
    for reader in (*counted.images, *(counted.labels or ())):
        assert isinstance(reader, Counting)
        assert (reader.times_HW == 0).all() if mesh.rank else (reader.times_HW >= 1).all()
        assert margin or reader.times_HW.max() <= 1
    if margin == 0:  # what is planned; a margin of labels is more
        cut = decompose(counted.tilings[0], (spread.mesh.rows, spread.mesh.cols))
        cost = scatter_cost(Task(graph, 3, cut), Machine())
        assert sum(sent, Sent()) == cost.traffic.step * 2
        assert max(one.bytes for one in sent) == 2 * cost.busiest.step.bytes


def test_the_first_ranks_of_images_read_before_the_first_step() -> None:
    shape = MeshShape(2, 2, 1, 2)  # 8 ranks: images begin at ranks 0 and 4
    scatter, exchange = Spread("scatter", shape), Spread("exchange", shape)
    assert [scatter.reading(rank, 9) for rank in range(9)] == [(0, 2), *[(2, 2)] * 3, (1, 2), *[(2, 2)] * 4]
    assert [exchange.reading(rank, 9) for rank in range(9)] == [(rank, 9) for rank in range(9)]
