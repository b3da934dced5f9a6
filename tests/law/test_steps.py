"""The law for steps: however ranks, stages, tiles and blocks share them, they are those of torch on whole images.

A row of the table combines what changes no result (halo mode, mesh, schedule, recomputing, batches, blocks) with what
does (network, norm, loss, frozen weights, images of a step). Some rows run where communication keeps the order in which
it was posted, as on NCCL: a hang fails within a minute, with what every rank was at (`tests/comm/in_order.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.comm.in_order import in_order
from tests.comm.in_order_queues import Order
from tests.conftest import SIZE
from tests.law.cases import IGNORED, Case, Strip, one_rank
from tests.law.every_layer import EveryLayer, ForeignLayers
from tests.law.losses import LOSSES, K
from tests.law.steps import Steps, check, check_same_bits, gathered, train
from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.presets import PRESETS
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import serial_axes
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.execution.halos.halo_modes import LayerMode
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.geometry.sharing.mesh_shape import MeshPosition, MeshShape
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.spatial.network import SpatialNetwork

THREE, ONE_LAST = (
    ((0, 1, 2), (0, 1, 2)),
    ((0, 1, 2), (1,)),
)  # the last step of an epoch may have fewer images than ranks
UNITS = ((6, 3), (4, 5), (4, 3), (5, 4), (4, 3))
FIVE = ((0, 1, 2, 3, 4), (1,))
ENCODER, PARTS = {"encoder*": 0.0, "bottom*": 0.0}, {"encoder0*": 0.0, "*.bias": 0.0, "decoder*": 0.0}


@dataclass(frozen=True)
class Still(Strip):
    """Batch norms with statistics of other data, which stand still."""

    def network(self, dtype: torch.dtype = torch.float64) -> GraphNetwork:
        network, draw = super().network(dtype), torch.Generator().manual_seed(4)
        for module in network.layers.values():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(generator=draw)
                module.running_var.uniform_(0.5, 2.0, generator=draw)
        return network.hold_statistics()


@dataclass(frozen=True)
class MeanOfSteps(Strip):
    """Batch norms that average the statistics of all steps."""

    def network(self, dtype: torch.dtype = torch.float64) -> GraphNetwork:
        network = super().network(dtype)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        return network


def unet(norm: str = "none", upsampling: str = "transposed", padding: str = "same", convs: int = 1) -> UNet:
    return UNet(3, convs, 3, 4, padding, norm, upsampling, dropout=0.1, bands=2, classes=K)


def small(norm: str = "none", upsampling: str = "transposed", grid: tuple[int, int] = (6, 3)) -> Strip:
    return Strip(unet(norm, upsampling), grid)


def short(network: Any, grid: tuple[int, int] = (8, 2), rows: int = 9) -> Strip:
    return Strip(network, grid, rows, 2)


def larger(norm: str = "none", upsampling: str = "transposed", padding: str = "same") -> Case:
    """Contexts end inside the raster; a block for each of nine ranks."""
    return Case(unet(norm, upsampling, padding, 2), (8, 4))


def segnet(norm: str) -> SegNet:
    return SegNet(3 if norm == "batch" else 2, 4, norm, bands=2, classes=K)


def residual(norm: str, encoder: str = "resnet18", upsampling: str = "nearest") -> ResidualUNet:
    return ResidualUNet(encoder, 4, norm, upsampling, bands=2, classes=K)


def gated(norm: str, image_mean: bool) -> GatedSCNN:
    return GatedSCNN("resnet18", 8, norm, image_mean, bands=2, classes=K)


def loss(name: str) -> dict[str, Any]:
    objective, formula = LOSSES[name]
    return {"objective": objective, "formula": formula}


def exchange(**more: Any) -> ParallelConfig:
    return ParallelConfig(halo="exchange", **more)


def layer(mesh: list[int] | str = "auto", **more: Any) -> ParallelConfig:
    return ParallelConfig(halo="layer", mesh=mesh, **more)


def staged(stages: int, schedule: str, **more: Any) -> ParallelConfig:
    return ParallelConfig(**{"stages": stages, "schedule": schedule, "balance": "modelled", **more})


class Row(NamedTuple):
    """Steps, the numbers of ranks that show something of their own, and whether communication keeps its order there."""

    steps: Steps
    ranks: tuple[int, ...]
    ordered: bool = False


def preset(name: str, schedule: str, recompute: str | list[str]) -> Row:
    """The paper's network, cut by its balance; without a norm, which tiles would change."""
    network = UNet(PRESETS[name].levels, base_channels=1, dropout=0.1, bands=2, classes=K)
    balance = "modelled" if schedule == "folded" else list(PRESETS[name].balance)
    return Row(
        Steps(
            Strip(network, (4, 1), 3, 1),
            staged(6, schedule, balance=balance, recompute=recompute),
            ((0,),) * 4,
            update="adamw",
        ),
        (6,),
    )


ROWS: dict[str, Row] = {
    # Tiles, each with its context.
    "read": Row(Steps(small("pixel", "bilinear"), images=ONE_LAST, batch=2), (1, 2, 3, 4), True),
    "read, all tiles at once": Row(Steps(small(), images=THREE, batch=100, update="adamw", **loss("focal")), (2,)),
    "read, whole images at once": Row(Steps(small("instance", grid=(1, 1)), images=ONE_LAST, batch=2), (1, 2)),
    "read, tversky": Row(Steps(small("pixel"), **loss("tversky")), (3,)),
    "read, all losses": Row(Steps(short(gated("pixel", False)), batch=4, **loss("all")), (2,)),
    "read, frozen": Row(Steps(small("pixel"), update="adamw", factors=PARTS), (2,)),
    "read, still statistics": Row(Steps(Still(unet("batch"), (4, 3)), factors=ENCODER), (3,)),
    "exchange": Row(Steps(larger(), exchange(), update="adamw"), (2, 9)),
    "exchange, valid": Row(Steps(larger("pixel", "bilinear", "valid"), exchange(), batch=3, **loss("both")), (3, 4)),
    "exchange, valid nearest": Row(Steps(larger("none", "nearest", "valid"), exchange()), (4, 9)),
    "exchange, replicas": Row(Steps(small(), exchange(mesh=[2, 1]), THREE, factors=ENCODER), (4, 6), True),
    "exchange, tiles of two images": Row(Steps(small(), exchange(), ((0, 1), (1,))), (2, 3), True),
    "exchange, still statistics": Row(Steps(Still(unet("batch"), (4, 3)), exchange(), factors=PARTS), (2,)),
    "exchange, every layer": Row(Steps(Case(EveryLayer(), (8, 4)), exchange()), (2, 9)),
    "exchange, foreign layers": Row(Steps(Case(ForeignLayers(), (4, 4)), exchange()), (4,)),
    "exchange, segnet": Row(Steps(short(segnet("none")), exchange(), **loss("smoothed")), (3,)),
    "exchange, residual": Row(Steps(short(residual("pixel")), exchange()), (2,)),
    "exchange, gated": Row(Steps(short(gated("pixel", False)), exchange(), **loss("edges")), (4,)),
    # Halos of layers.
    "layer, batch": Row(Steps(larger("batch", "bilinear"), layer(), **loss("both")), (2, 4, 9)),
    "layer, pixel fused": Row(Steps(larger("pixel", "bilinear"), layer(fusion=4)), (3,)),
    "layer, whole network fused": Row(Steps(larger("none", "nearest", "valid"), layer(fusion=WHOLE)), (4,)),
    "layer, valid batch": Row(Steps(larger("batch", "bilinear", "valid"), layer(overlap=True)), (2, 9)),
    "layer, valid fused": Row(
        Steps(larger("none", "transposed", "valid"), layer(fusion=2, overlap=True), update="adamw"), (3, 9)
    ),
    "layer, valid instance": Row(Steps(larger("instance", "bilinear", "valid"), layer(fusion=3)), (4,)),
    "layer, boundaries": Row(Steps(small("batch"), layer(), **loss("boundary")), (4,)),
    "layer, in order": Row(Steps(small("batch", "bilinear"), layer(), **loss("both")), (2, 3), True),
    "layer, overlap in order": Row(Steps(small("instance"), layer(overlap=True), ((0, 1),) * 2), (2, 4), True),
    "layer, fused in order": Row(Steps(small("group", "nearest"), layer(fusion=3)), (3, 4), True),
    "layer, replicas": Row(Steps(small("instance"), layer([2, 1]), THREE), (4, 6), True),
    "layer, statistics of a step": Row(Steps(small("batch"), layer([1, 1]), ONE_LAST), (1, 2, 3), True),
    "layer, statistics of shared images": Row(Steps(small("batch"), layer([2, 1], overlap=True), ONE_LAST), (4,)),
    "layer, statistics over columns": Row(
        Steps(small("batch"), layer([1, 2], overlap=True), ONE_LAST, batch=2), (2, 4), True
    ),
    "layer, statistics of four": Row(Steps(small("batch"), layer([2, 2]), ONE_LAST), (4,), True),
    "layer, images at once": Row(Steps(small("batch"), layer([1, 1]), ONE_LAST, batch=3), (1, 2)),
    "layer, frozen": Row(Steps(small("batch"), layer([2, 1], overlap=True), ONE_LAST, factors=ENCODER), (2,)),
    "layer, frozen parts": Row(Steps(small("batch"), layer([1, 1]), ONE_LAST, factors=PARTS), (4,)),
    "layer, still statistics": Row(Steps(Still(unet("batch"), (4, 3)), layer(overlap=True), factors=ENCODER), (3,)),
    "layer, every layer": Row(Steps(Case(EveryLayer(True), (8, 4)), layer(overlap=True)), (2, 9)),
    "layer, every layer fused": Row(Steps(Case(EveryLayer(True), (8, 4)), layer(fusion=3)), (4,)),
    "layer, foreign layers": Row(Steps(Case(ForeignLayers(True), (8, 4)), layer(fusion=3)), (3, 9)),
    "layer, foreign overlap": Row(Steps(Case(ForeignLayers(True), (8, 4)), layer(overlap=True)), (4,)),
    "layer, segnet": Row(Steps(short(segnet("batch")), layer()), (2, 4)),
    "layer, residual": Row(Steps(short(residual("batch")), layer()), (3,)),
    "layer, residual50": Row(
        Steps(short(residual("group", "resnet50", "bilinear")), layer(fusion=2, overlap=True)), (2,)
    ),
    "layer, gated": Row(Steps(short(gated("batch", True)), layer(), **loss("all")), (4,)),
    "layer, gated fused": Row(Steps(short(gated("pixel", True)), layer(fusion=2), **loss("edges")), (2,)),
    # Stages.
    **{
        f"stages, {schedule}": Row(Steps(small(), staged(2, schedule), update="adamw"), (2, 4), True)
        for schedule in ("1f1b", "gpipe", "folded")
    },
    **{
        f"three stages, {schedule}": Row(Steps(small(), staged(3, schedule), ((0, 1),) * 2, **more), (3, 6), True)
        for schedule, more in (("1f1b", loss("both")), ("gpipe", {}), ("folded", loss("tversky")))
    },
    "stages, exchange": Row(Steps(small(), staged(2, "1f1b", halo="exchange", mesh=[2, 1]), ((0, 1),) * 2), (4,), True),
    **{
        f"stages, layer {schedule}": Row(
            Steps(small("instance"), staged(2, schedule, halo="layer", mesh=[2, 1]), THREE), (4,), True
        )
        for schedule in ("1f1b", "gpipe", "folded")
    },
    **{
        f"stages of six, layer {schedule}": Row(
            Steps(small("instance"), staged(3, schedule, halo="layer", mesh=[2, 1]), THREE), (6,), True
        )
        for schedule in ("1f1b", "folded")
    },
    "stages of nine": Row(
        Steps(small("instance"), staged(2, "1f1b", halo="layer", mesh=[2, 1], idle_ranks=True), THREE), (9,), True
    ),
    "stages, frozen": Row(
        Steps(small("pixel"), staged(2, "1f1b", recompute="always", balance=[16, 13]), factors=ENCODER), (2, 4)
    ),
    "stages, layer frozen": Row(
        Steps(small("pixel"), staged(2, "1f1b", halo="layer", balance=[16, 13]), factors=ENCODER), (4,)
    ),
    "stages, still statistics": Row(
        Steps(Still(unet("batch"), (4, 3)), staged(2, "1f1b", recompute="always"), factors={"*.bias": 0.0}), (2,)
    ),
    # Between indices and unpooling, shortcut and sum, before a branch of the input; a mirrored border and what is
    # convolved, and where channels are in other layouts.
    "stages, every layer": Row(Steps(Case(EveryLayer(), (4, 2)), staged(2, "1f1b", balance=[10, 22])), (2,)),
    "stages, every layer in three": Row(
        Steps(Case(EveryLayer(), (4, 2)), staged(3, "gpipe", balance=[5, 6, 21], recompute="always")), (3,)
    ),
    "stages, every layer in four": Row(
        Steps(Case(EveryLayer(), (4, 2)), staged(4, "1f1b", balance=[5, 5, 11, 11], recompute="always")), (4,)
    ),
    "stages, foreign layers": Row(
        Steps(Case(ForeignLayers(), (4, 2)), staged(2, "1f1b", balance=[4, 23], recompute="always")), (2,)
    ),
    "stages, foreign layers in four": Row(
        Steps(Case(ForeignLayers(), (4, 2)), staged(4, "gpipe", balance=[4, 4, 14, 5])), (4,)
    ),
    **{
        f"stages, {name}": Row(
            Steps(short(network, (3, 1), 3), staged(ranks, "1f1b", recompute="except_last"), **more), (ranks,)
        )
        for name, network, more, ranks in (
            ("segnet", segnet("none"), {}, 2),
            ("residual", residual("none"), {}, 3),
            ("gated", gated("none", False), loss("all"), 2),
            ("gated in three", gated("none", False), loss("edges"), 3),
        )
    },
    "small preset, 1f1b": preset("small", "1f1b", "never"),
    "small preset, folded": preset("small", "folded", "always"),
    "medium preset, gpipe": preset("medium-2", "gpipe", "except_last"),
    "large preset, 1f1b": preset("large", "1f1b", ["always", "never", "except_last", "never", "always", "never"]),
    # Blocks: of tiles, of whole images, and of what ranks share.
    "blocks of tiles": Row(Steps(small("pixel", "bilinear", (2, 2)), blocks=(2, 2), **loss("both")), (1, 2)),
    "blocks of tiles of foreign layers": Row(Steps(Case(ForeignLayers(), (2, 2)), blocks=(2, 2)), (3,)),
    "blocks of images": Row(Steps(small("batch", grid=(1, 1)), images=FIVE, units=UNITS, blocks=(2, 3)), (2, 3, 4)),
    "blocks of images, frozen": Row(
        Steps(small("batch", grid=(1, 1)), images=FIVE, units=UNITS, blocks=(2, 1), factors=ENCODER, **loss("both")),
        (3,),
    ),
    "blocks of images of every layer": Row(
        Steps(Strip(EveryLayer(True), (1, 1)), images=FIVE, units=UNITS, blocks=(2, 1)), (2,)
    ),
    "blocks of two images in order": Row(
        Steps(small("batch", grid=(1, 1)), images=((0, 1), (0, 1)), blocks=(2, 2)), (2, 3), True
    ),
    "blocks of shared images": Row(
        Steps(small("batch", grid=(2, 1)), layer([2, 1]), FIVE, UNITS, blocks=(1, 3), **loss("both")), (2, 3, 4)
    ),
    "blocks of images of four": Row(
        Steps(small("batch", grid=(2, 2)), layer([2, 2]), FIVE, UNITS, blocks=(2, 1)), (4,)
    ),
    "blocks in layer": Row(Steps(small("instance"), layer([2, 1]), THREE, blocks=(2, 2)), (2, 4), True),
    "blocks in layer, every layer": Row(Steps(Case(EveryLayer(True), (4, 2)), layer(), blocks=(2, 2)), (3,)),
    # torch.compile: traced and differentiated as for a GPU, by torch's own kernels.
    "compiled": Row(Steps(small("pixel", "bilinear"), exchange(), ((0, 1),) * 2, batch=2, compiles=True), (1, 2)),
}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many sums of gradients, to go astray."""
    monkeypatch.setattr("tiledseg.gradients.BUCKET_BYTES", 600)
    monkeypatch.setattr("tiledseg.models.compiled.INDUCTOR", "aot_eager")
    yield
    torch._dynamo.reset()


def orders(row: Row) -> tuple[Order | None, ...]:
    """One queue a rank cannot hang where a queue a communicator does not; several under way carry the right sums."""
    if not row.ordered:
        return (None,)
    return tuple(Order) if min(row.ranks) == SIZE else (Order.ANY,)


def marks(ranks: tuple[int, ...]) -> list[pytest.MarkDecorator]:
    large = [mark for size, mark in ((6, pytest.mark.six), (9, pytest.mark.nine)) if size in ranks]
    return [pytest.mark.ranks(*ranks), *large]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "order"),
    [
        pytest.param(name, order, marks=marks(row.ranks), id=f"{name}{f' {order.name}' if order else ''}")
        for name, row in ROWS.items()
        for order in orders(row)
    ],
)
def test_steps_are_those_of_whole_images(name: str, order: Order | None, meshes: dict[str, Mesh]) -> None:
    steps, ranks, _ = ROWS[name]
    if SIZE not in ranks and not (9 in ranks and SIZE > 4):
        pytest.skip(f"not for {SIZE} ranks")
    real = meshes["mpi" if steps.parallel.halo != "read" and steps.parallel.stages == 1 else "gloo"]
    with in_order(meshes["gloo"], order, turns=order is Order.ANY) if order and SIZE > 1 else nullcontext(real) as mesh:
        check(steps, mesh)


BLOCKS = {
    "unet": Steps(Strip(unet("none"), (1, 1)), blocks=(2, 3)),
    "group": Steps(Strip(unet("group", "nearest"), (1, 1)), blocks=(1, 2)),
    "instance": Steps(Strip(unet("instance"), (1, 1)), blocks=(4, 3)),
    "valid-instance": Steps(Case(unet("instance", "bilinear", "valid"), (1, 1)), blocks=(2, 2)),
    "valid-batch": Steps(Case(unet("batch", "transposed", "valid"), (1, 1)), images=ONE_LAST, blocks=(3, 2)),
    "segnet": Steps(short(segnet("batch"), (1, 1)), blocks=(3, 2)),
    "residual": Steps(short(residual("batch"), (1, 1)), blocks=(3, 2)),
    "residual50": Steps(short(residual("group", "resnet50", "bilinear"), (1, 1)), blocks=(2, 1)),
    "gated": Steps(short(gated("batch", True), (1, 1)), blocks=(2, 2), **loss("edges")),
    "every-layer": Steps(Case(EveryLayer(True), (1, 1)), blocks=(3, 2)),
    "foreign-layers": Steps(Case(ForeignLayers(True), (1, 1)), blocks=(2, 3)),
    "ratios": Steps(small("batch", grid=(1, 1)), images=FIVE, units=UNITS, blocks=(1, 2), **loss("both")),
    "one-block": Steps(small("batch", "bilinear", (1, 1)), images=FIVE, units=UNITS, blocks=(1, 1)),
    "mean-of-all-steps": Steps(MeanOfSteps(unet("batch"), (1, 1)), images=ONE_LAST, blocks=(2, 2)),
    "frozen": Steps(small("batch", grid=(1, 1)), images=THREE, blocks=(2, 1), factors=ENCODER),
}


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


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "steps",
    [
        Steps(small("pixel", "bilinear"), images=THREE, precision="fp32"),
        Steps(small("pixel", "bilinear"), images=THREE, precision="fp32", batch=3),
        Steps(small("batch"), layer([1, 1]), ONE_LAST, precision="fp32", batch=2),
        pytest.param(Steps(small("pixel"), precision="fp32", compiles=True), marks=pytest.mark.ranks(2)),
    ],
    ids=["one-by-one", "batches", "batch-norm", "compiled"],
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


POLICIES = {
    "exchange": (Steps(small("pixel"), exchange()), (2,)),
    "layer": (Steps(small("batch", "bilinear"), layer()), (2, 4)),
    "every layer": (Steps(Case(EveryLayer(True), (8, 4)), layer()), (4,)),
    "foreign layers": (Steps(Case(ForeignLayers(), (8, 4)), layer(fusion=2)), (2,)),
    "valid overlap": (Steps(larger("none", "nearest", "valid"), layer(overlap=True)), (3,)),
    "1f1b": (Steps(small(), staged(2, "1f1b")), (2,)),
    "folded": (Steps(small(), staged(2, "folded", recompute="except_last")), (4,)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(ranks)) for name, (_, ranks) in POLICIES.items()])
def test_memory_policies_change_no_bit_and_no_message(
    name: str, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    steps, mesh, sent = POLICIES[name][0], meshes["gloo"], []
    if mesh.size % steps.parallel.stages:
        pytest.skip("pipelines of two")
    from tiledseg.spatial.halo_exchange import HaloExchanger

    post = HaloExchanger._post

    def noted(self: Any, way: Any, x_BCHW: Any, made_BCHW: Any, *others: Any, **more: Any) -> Any:
        sent.append(f"{tuple(made_BCHW.shape)} from {tuple(x_BCHW.shape)}")
        return post(self, way, x_BCHW, made_BCHW, *others, **more)

    monkeypatch.setattr(HaloExchanger, "_post", noted)
    wanted, messages = train(steps, mesh), sent[:]
    for policy in ("compaction", "everything", "drawn1"):
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
        assert objective.value(torch.cat([part.reshape(-1) for part in sums])) is None
