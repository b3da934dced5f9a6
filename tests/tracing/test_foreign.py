"""Networks that nobody here wrote (`benchmarks.foreign_networks`), and others in the styles of many (`styles`).

Exact to 1e-12 in float64, or refused in words: on the whole image they give what their own modules give; tiled, over
ranks and in stages, what they give on the whole.
"""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch
from torch.nn import functional

from benchmarks.foreign_networks.networks import REAL
from tests.conftest import NIGHTLY
from tests.law.cases import IGNORED, as_batch, difference, gradients, relative
from tests.law.steps import Steps, by_one_rank, check, gathered, tiled_logits, train
from tests.spatial.drawn import image
from tests.spatial.twins import OpenAxes, copied, undivided
from tests.tracing.cases import NETWORKS, Foreign, ForeignCase, installed, traced
from tests.tracing.over_ranks import distance, in_blocks, in_tiles, reach
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import minimum_halo, network_footprint
from tiledseg.geometry.sharing.layer_windows import layer_blocks
from tiledseg.geometry.tiling import make_tiling
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.models.layers.times import TimeSeries
from tiledseg.pipeline.partition import tensor_dtypes
from tiledseg.planning.run.spread import measuring
from tiledseg.planning.walk.cost_model import ASSUMED, Prices
from tiledseg.planning.walk.mode_cost import layer_cost, whole_bytes
from tiledseg.planning.walk.step_memory import fixed_memory
from tiledseg.spatial.network import SpatialNetwork

# Seconds each, for what others show too.
AT_NIGHT = {"MONAI HighResNet", "MONAI FlexibleUNet, ResNet-18", "MONAI VNet", "MONAI DenseNet"}
AT_NIGHT |= {"MONAI BasicUNet", "MONAI BasicUNetPlusPlus"}
AT_NIGHT |= {"MONAI SwinUNETR", "timm Swin v2", "timm Swin", "smp Unet, MiT-B0"}  # by day: test_ranks_give_what_...
AT_NIGHT |= {"SmallSwin"}  # by day: test_windows.py, and over ranks a Swin of smp
EXACT = [name for name, foreign in NETWORKS.items() if foreign.refused is None and (NIGHTLY or name not in AT_NIGHT)]
# Over ranks some run by day, of all kinds of layers; at night all but the largest, and these with FOREIGN_NETWORKS=all.
BY_DAY = {"Squeezed", "Mixed", "Pyramid", "Unpooling"}
BY_DAY |= {"Mirrored", "Parsing", "Attending", "Spacious", "Functions", "AlignedUNet", "TemporalUNet"}
BY_DAY |= {"OfProducts", "Placed", "Rotary"}
SHARED = [
    name
    for name in EXACT
    if (not NETWORKS[name].large and (NIGHTLY or name in BY_DAY)) or os.environ.get("FOREIGN_NETWORKS") == "all"
]
# Attention over reduced keys by day: "Attending", and tests/spatial/test_attention.py.
THIN = [
    "smp Unet, Swin, patches of 2",
    "Scanning",
    "TemporalUNet",
    *(["Rotary", "smp Segformer, PVT v2, thin"] if NIGHTLY else []),
    *(REAL if os.environ.get("FOREIGN_NETWORKS") == "real" else []),
]
REFUSED = [name for name, foreign in NETWORKS.items() if foreign.refused and (NIGHTLY or name not in AT_NIGHT)]


@pytest.mark.parametrize("name", EXACT)
def test_the_graph_gives_what_the_module_gives(name: str) -> None:
    """Trained, outputs, gradients and moved buffers; no dropout."""
    network, module = copy.deepcopy(traced(name)), NETWORKS[name].module()
    x_BCHW = torch.randn(2, NETWORKS[name].bands, *_size(name), dtype=torch.float64)
    found = []
    for each in (network, module):
        each.zero_grad()
        _without_dropout(each.train(not NETWORKS[name].maps))
        with torch.random.fork_rng():
            y_BCHW = _first(each(x_BCHW), NETWORKS[name].outputs if each is module else None)
        y_BCHW.square().mean().backward()
        named = each.whole if isinstance(each, TimeSeries) else each  # the graph has the user's own names
        gradients = {key: p.grad for key, p in named.named_parameters() if p.grad is not None}
        found.append((y_BCHW.detach(), gradients, {key: b.double() for key, b in named.named_buffers()}))
    assert len(tensor_dtypes(network, None, torch.device("cpu"))) == len(network.graph) + 1  # by its planned channels
    assert relative(found[0][0], found[1][0]) < 1e-12
    assert difference(found[0][1], found[1][1]) < 1e-12
    if found[0][2]:
        assert difference(found[0][2], found[1][2]) < 1e-12


@pytest.mark.parametrize("name", [name for name in EXACT if NIGHTLY or not NETWORKS[name].large])
def test_tiles_give_what_the_whole_image_gives(name: str) -> None:
    """Mapped, where that is exact in every mode."""
    if measuring(traced(name).graph, trains=False):
        pytest.skip("its statistics are the image's: shown in mode layer")
    case = EvaluatedCase(Foreign(name), (3, 2))
    whole_KHW = tiled_logits(case, grid=(1, 1))
    assert relative(tiled_logits(case), whole_KHW) < 1e-12


class EvaluatedCase(ForeignCase):
    """Dropout off, batch norms by their running statistics, whatever is asked."""

    def network(self, dtype: torch.dtype = torch.float64):  # type: ignore[no-untyped-def]
        network = super().network(dtype)
        for module in network.modules():
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign, misc]
            module.training = False
        return network


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    with pytest.raises(ConfigError, match=NETWORKS[name].refused):
        traced(name)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_an_image(name: str, meshes: dict[str, Mesh]) -> None:
    """Mode layer on 2 x 2 ranks, trained: outputs, losses, gradients, and buffers."""
    check(of(name, (4, 2), ParallelConfig(halo="layer", mesh=[2, 2])), meshes["mpi"], by_one_rank)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("name", THIN)
def test_ranks_give_what_the_plain_module_gives(name: str, meshes: dict[str, Mesh]) -> None:
    """Networks that people use, by uneven blocks and by tiles: y, dx, dW; messages are the plan's. Where images hold
    tiles, gradients reach as far as the halo."""
    foreign = REAL.get(name) or NETWORKS[name]
    module, network = _module(name), foreign.network()
    opened, x_BCHW, fault = OpenAxes(meshes["mpi"]), image((1, foreign.bands, *(foreign.size or (64, 96))), 5), None
    expected = undivided(module, x_BCHW)
    for named in expected.gradients, expected.buffers:  # the graph has the user's own names
        named.update({key.removeprefix("whole."): named.pop(key) for key in list(named)})
    for rows, cols in ((2, 2), (2, 1), (1, 2))[: None if name in REAL and NIGHTLY else 1]:
        axes = opened.of(rows, cols)
        for compute in (in_blocks, *((in_tiles,) if foreign.tiles else ())) if axes.position else ():
            found = compute(network, x_BCHW, axes, expected.y_BCHW.shape)
            apart = distance(found, expected)
            fault = fault or (None if apart < 1e-12 else f"{compute.__name__} {rows} x {cols}: {apart}")
    if foreign.tiles:
        reached, halo = max(reach(network, x_BCHW)), max(minimum_halo(network.graph))
        fault = fault or (None if reached == halo else f"gradients reach {reached} pixels, the halo has {halo}")
    opened.agree(fault)


class RealCase(ForeignCase):
    """A network of `REAL` on a raster a little smaller than its image, so that no window at its end is full."""

    @property
    def raster(self) -> tuple[int, int]:
        height, width = REAL[self.unet.name].size or (64, 96)
        return height - 3, width - 5


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", [name for name in THIN if NIGHTLY and name in REAL and not REAL[name].maps])
def test_parts_give_what_the_plain_module_gives(
    name: str, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and dW of a training step in stages, and in mode `exchange` where images hold tiles. At night the thin
    networks, with FOREIGN_NETWORKS=real all; by day none: `test_three_stages`."""
    monkeypatch.setitem(NETWORKS, name, REAL[name])
    mesh, module = meshes["mpi"], _module(name).train()
    ways = {(1, 1): ParallelConfig(stages=mesh.size, balance="modelled")}
    if REAL[name].tiles and mesh.size == 4:
        ways[3, 2] = ParallelConfig(halo="exchange", mesh=[2, 2])
    for grid, parallel in ways.items():
        steps = Steps(RealCase(Foreign(name), grid), parallel, images=((0,),))
        module.zero_grad()
        data = steps.dataset((1, 1))
        sample = data.load(0, data.tilings[0].tiles[0])
        y_BKHW = module(as_batch(sample.x_CHW))[:, :, *sample.tile.core_in_output.slices]
        target_BHW = torch.from_numpy(sample.y_HW).long()[None]
        loss = functional.cross_entropy(y_BKHW, target_BHW, ignore_index=IGNORED)
        loss.backward()
        run = gathered(train(steps, mesh), mesh)
        assert run.losses[0] == pytest.approx(loss.item(), rel=1e-12)
        assert difference(run.gradients, gradients(module)) < 1e-12


@pytest.mark.parametrize("name", ["Placed", "Scanning"])
def test_plans_count_what_a_rank_has_of_the_whole_image(name: str) -> None:
    """Of as many ranks as one likes each has it."""
    graph, costs = traced(name).graph, []
    for mesh in (2, 1), (4, 2):
        cut = layer_blocks(make_tiling((256, 192), mesh, network_footprint(graph)), graph, mesh)
        costs.append(layer_cost(Prices(graph, 3, 4, ASSUMED, math.prod(mesh)), cut, 1).memory)
    least = whole_bytes(graph, 3, (256, 192))
    assert whole_bytes(graph, 3, (512, 384)) == 4 * least > 0
    assert costs[0] > costs[1] > least


@pytest.mark.mpi(min_size=2)
def test_the_peak_of_a_leaf_of_the_whole_image_is_planned(meshes: dict[str, Mesh]) -> None:
    """What a rank allocates in a step fits the plan, which is at most twice as much: it knows no leaf from within."""
    opened, network, fault = OpenAxes(meshes["mpi"]), copied(traced("Scanning")).float(), None
    axes, graph = opened.of(2, 1), traced("Scanning").graph
    cut = layer_blocks(make_tiling((256, 192), (2, 1), network_footprint(graph)), graph, (2, 1))
    rows, cols, x_BCHW = cut.rows, cut.cols, image((1, 3, 256, 192), 5).float()
    planned = layer_cost(Prices(graph, 3, 4, ASSUMED, 2), cut, 1).memory - fixed_memory(graph, 3, 4)
    if axes.position is not None:
        part_BCHW = x_BCHW[:, :, rows.blocks[axes.position.row].slice].clone()
        with AllocationMeter([*network.parameters(), part_BCHW]) as meter:
            SpatialNetwork(network, axes)(part_BCHW, rows, cols).square().mean().backward()
        fault = None if meter.peak <= planned <= 2 * meter.peak else f"{meter.peak} bytes, planned {planned}"
    opened.agree(fault)


def of(name: str, grid: tuple[int, int], parallel: ParallelConfig, blocks: tuple[int, int] | None = None) -> Steps:
    return Steps(ForeignCase(Foreign(name), grid), parallel, images=((0,),), blocks=blocks)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("halo", "blocks"), [("read", None), ("exchange", None), ("layer", None), ("read", (3, 2)), ("layer", (3, 2))]
)
def test_ranks_with_time_series(halo: str, blocks: tuple[int, int] | None, meshes: dict[str, Mesh]) -> None:
    """Two rows of blocks, of uneven sides: convolutions over times, without norms where only mode layer is exact; and
    a rank's part in blocks of its own."""
    ranks, name = meshes["mpi"].size, f"TemporalUNet{', no norms' if halo != 'layer' else ''}"
    if ranks == 3:
        pytest.skip("two rows of blocks, on two or four ranks")
    mesh = None if halo == "read" else [2, ranks // 2]
    steps = of(name, (4, 2), ParallelConfig(halo=halo, mesh=mesh), blocks)
    check(steps, meshes["mpi"], by_one_rank, 1e-12)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    "name", [name for name in SHARED if name not in ("Mixed", "Weighted", "Functions", "OverImage")]
)
def test_three_stages(name: str, meshes: dict[str, Mesh]) -> None:
    """The whole image in one micro-batch: loss and gradients, of all stages together. Networks with one weight in
    several layers are left out, which stages refuse."""
    if meshes["gloo"].size != 3:
        pytest.skip("three stages, on three ranks")
    check(of(name, (1, 1), ParallelConfig(stages=3, balance="modelled")), meshes["gloo"], by_one_rank)


@pytest.mark.mpi(min_size=3)
def test_one_weight_on_two_stages_is_refused(meshes: dict[str, Mesh]) -> None:
    """By all ranks: none waits for another."""
    balance = [3, len(traced("Mixed").graph) - 4, 1]
    if meshes["gloo"].size != 3:
        pytest.skip("three stages, on three ranks")
    with pytest.raises(ConfigError, match="shares weights with a layer of stage 0"):
        train(of("Mixed", (1, 1), ParallelConfig(stages=3, balance=balance)), meshes["gloo"])


def _module(name: str) -> torch.nn.Module:
    foreign = REAL.get(name) or NETWORKS[name]
    return installed(foreign, foreign.module)


def _size(name: str) -> tuple[int, int]:
    unit = ForeignCase(Foreign(name), (1, 1)).footprint.alignment
    if unit > 100:
        return 2 * unit, unit
    return (8 * unit + 12, 9 * unit + 12) if "without padding" in name else (4 * unit, 3 * unit)


def _first(value: object, wanted: tuple[int, ...] | None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    listed = list(value.values()) if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
    return _first(listed[0 if wanted is None else wanted[0]], None)


def _without_dropout(module: torch.nn.Module) -> None:
    for each in module.modules():
        if "Drop" in type(each).__name__ or type(each).__name__.endswith("Depth"):  # not depthwise convolutions
            each.eval()
