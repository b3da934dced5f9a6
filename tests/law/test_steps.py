"""The law for steps: however ranks, stages, tiles and blocks share them, they are those of torch on whole images.

A row of the table combines what changes no result (halo mode, mesh, schedule, recomputing, batches, blocks) with what
does (network, norm, loss, frozen weights, images of a step). Some rows check that NCCL would run all operations too
(`tests/comm/in_order.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comm.in_order import in_order
from tests.conftest import SIZE
from tests.law.cases import IGNORED, one_rank
from tests.law.step_rows import BLOCKS, LOSSES, ONE_LAST, POLICIES, ROWS, THREE, K, layer, small, unet
from tests.law.steps import Steps, check, check_same_bits, gathered, train
from tiledseg.comm.mesh import Mesh, serial_axes
from tiledseg.execution.halo_modes import LayerMode
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.decomposition import MeshPosition, MeshShape
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.network import build_modules
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.spatial import halo_exchange
from tiledseg.spatial.network import SpatialNetwork


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many sums of gradients, to go astray."""
    monkeypatch.setattr("tiledseg.gradients.BUCKET_BYTES", 600)
    monkeypatch.setattr("tiledseg.models.compiled.INDUCTOR", "aot_eager")
    yield
    torch._dynamo.reset()


def marks(ranks: tuple[int, ...]) -> list[pytest.MarkDecorator]:
    large = [mark for size, mark in ((6, pytest.mark.six), (9, pytest.mark.nine)) if size in ranks]
    return [pytest.mark.ranks(*ranks), *large]


@pytest.mark.mpi
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(row.ranks)) for name, row in ROWS.items()])
def test_steps_are_those_of_whole_images(name: str, meshes: dict[str, Mesh]) -> None:
    steps, ranks, ordered = ROWS[name]
    if SIZE not in ranks and not (9 in ranks and SIZE > 4):
        pytest.skip(f"not for {SIZE} ranks")
    if ordered:
        with in_order(meshes["gloo"]) as mesh:
            check(steps, mesh)
    else:
        check(steps, meshes["mpi" if steps.parallel.halo != "read" and steps.parallel.stages == 1 else "gloo"])


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_one_rank_are_steps_of_whole_images(name: str) -> None:
    check(BLOCKS[name], one_rank())


def test_one_block_and_a_file_have_the_bits_of_the_whole_and_of_memory(tmp_path: Path) -> None:
    """In one block no node is in two segments."""
    torch.set_num_threads(1)
    steps = BLOCKS["instance"]
    one_block, whole = (train(replace(steps, blocks=blocks), one_rank()) for blocks in ((1, 1), None))
    check_same_bits(one_block, whole)
    for each in (steps, BLOCKS["ratios"]):
        check_same_bits(*(train(replace(each, store=store), one_rank()) for store in (str(tmp_path), "host")))
    assert not list(tmp_path.iterdir()), "the file has no name"


FLOAT32 = {
    "one-by-one": (Steps(small("pixel", "bilinear"), images=THREE, precision="fp32"), (3,)),
    "batches": (Steps(small("pixel", "bilinear"), images=THREE, precision="fp32", batch=3), (2,)),
    "batch-norm": (Steps(small("batch"), layer([1, 1]), ONE_LAST, precision="fp32", batch=2), (3,)),
    "compiled": (Steps(small("pixel"), precision="fp32", compiles=True), ()),  # at night
}


@pytest.mark.mpi
@pytest.mark.parametrize(
    "steps", [pytest.param(steps, id=name, marks=marks(ranks)) for name, (steps, ranks) in FLOAT32.items()]
)
def test_ranks_do_not_change_a_bit_of_float32(steps: Steps, meshes: dict[str, Mesh]) -> None:
    """Each tile, and each batch, gives the same numbers on any rank, and their sums are float64."""
    torch.set_num_threads(1)
    found = train(steps, meshes["gloo"])
    alone = meshes["gloo"].on_root(lambda: train(steps, one_rank()))
    assert found.losses == pytest.approx(alone.losses, rel=1e-13)
    assert all(torch.equal(tensor, alone.state[name]) for name, tensor in found.state.items())
    if steps.batch > 1 and steps.case.unet.norm == "pixel":
        single = meshes["gloo"].on_root(lambda: train(replace(steps, batch=1), one_rank()))
        assert found.losses == pytest.approx(single.losses, rel=1e-6)
        assert any(not torch.equal(tensor, single.state[name]) for name, tensor in found.state.items())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(ranks)) for name, (_, ranks) in POLICIES.items()])
def test_memory_policies_change_no_bit_and_no_message(
    name: str, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    steps, mesh, sent = POLICIES[name][0], meshes["gloo"], []
    if mesh.size % steps.parallel.stages:
        pytest.skip("pipelines of two")
    post = halo_exchange._post

    def noted(axes: Any, x_BCHW: Any, made_BCHW: Any, *patches: Any) -> Any:
        sent.append(f"{tuple(made_BCHW.shape)} from {tuple(x_BCHW.shape)}")
        return post(axes, x_BCHW, made_BCHW, *patches)

    monkeypatch.setattr(halo_exchange, "_post", noted)
    wanted, messages = train(steps, mesh), sent[:]
    for policy in ("recomputation", "everything", "drawn1"):
        sent.clear()
        found = train(replace(steps, policy=policy), mesh)
        check_same_bits(gathered(found, mesh), gathered(wanted, mesh))
        assert sent == messages, "the same messages in the same order"


def test_images_of_one_cut_run_at_once_whatever_a_rank_has_of_them() -> None:
    """The first of two ranks has 16 rows of each image, the second has 16 of one, and 20 of the others."""
    network, heights = unet("batch", "bilinear"), (36, 32, 34, 36)
    tilings = tuple(make_tiling((height, 20), (2, 1), network_footprint(network.graph())) for height in heights)
    dealt = []
    for rank in range(4):
        axes = replace(serial_axes(), shape=MeshShape(2, 2, 1), position=MeshPosition(rank // 2, rank % 2, 0))
        modules = build_modules(network, seed=0)
        mode = LayerMode(SpatialNetwork(modules, axes), modules, one_rank(), tilings, "fp64", batch=2)
        parts = mode.share([TileReference(image, 0) for image in range(len(heights))])
        dealt.append([[part.image for part in batch] for batch in mode.batches(parts)])
    assert dealt == [[[1], [3]], [[1], [3]], [[0, 2]], [[0, 2]]]


@pytest.mark.parametrize("name", ["tversky", "both"])
def test_a_step_without_a_pixel_that_counts_has_no_loss(name: str) -> None:
    scores_BKHW, (objective, _) = torch.randn(1, K, 3, 3, dtype=torch.float64), LOSSES[name]
    for target in (IGNORED, 2):  # the weight of class 2 is 0
        sums = objective.sums((scores_BKHW,), torch.full((1, 3, 3), target, dtype=torch.uint8))
        assert objective.value(sums) is None
