"""Maps by crops of one size: the definition, written again in a loop, and its bits for any tiles, ranks and threads."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from tests.law.cases import one_rank
from tests.law.fixed_size import BANDS, CLASSES, SHAPE, SIDE, Fickle, Handing, fixed_size
from tests.law.test_steps import marks
from tests.small_files import write_raster
from tiledseg.comm.mesh import Mesh
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.layers.declared import CropGrid
from tiledseg.geometry.tiling import make_tiling
from tiledseg.inference.predictor import predict_all
from tiledseg.inference.request import Request
from tiledseg.inference.trained import module_mapper
from tiledseg.models.layers.block import tile_places
from tiledseg.planning.run.spread import Parallelism
from tiledseg.tracing.crops import CropModule, crops_network, kept_between_tiles


def starts_of(size: int, grid: CropGrid) -> list[int]:
    step = max(1, int(grid.window * (1 - grid.overlap)))
    if grid.ends == "mirrored":
        first = -((grid.window - step) // 2)
        return [first + k * step for k in range(math.ceil(size / step))]
    if size <= grid.window:
        return [-((grid.window - size) // 2)]
    return [min(k * step, size - grid.window) for k in range(math.ceil((size - grid.window) / step) + 1)]


def weight_of(grid: CropGrid, place: tuple[int, int]) -> float:
    """The weight of a pixel by its place in a crop."""
    middle, side = (grid.window - 1) / 2, grid.window
    if grid.blend == "gaussian":
        return max(1e-3, math.prod(math.exp(-((at - middle) ** 2) / (2 * (side / 8) ** 2)) for at in place))
    if grid.blend == "cosine":
        return math.prod(math.sin(math.pi * (at + 0.5) / side) ** 2 for at in place)
    return 1.0


def defined(module: Callable[[torch.Tensor], torch.Tensor], x_CHW: NDArray, grid: CropGrid) -> NDArray:
    """The scores as the documents define them: crop by crop, pixel by pixel, in float64."""
    _, height, width = x_CHW.shape
    more = 2 * grid.window
    padded = np.pad(x_CHW, ((0, 0), (more, more), (more, more)), "symmetric")
    corners = list(itertools.product(starts_of(height, grid), starts_of(width, grid)))
    middle = (grid.window - 1) / 2
    sums_KHW, total_HW = np.zeros((CLASSES, height, width)), np.zeros((height, width))

    def is_nearest(at: tuple[int, int], row: int, col: int) -> bool:
        each = zip((row, col), at, (starts_of(height, grid), starts_of(width, grid)), strict=True)
        return all(start == min(starts, key=lambda one: (abs(p - one - middle), one)) for p, start, starts in each)

    for at in corners:
        rows, cols = (slice(start + more, start + more + grid.window) for start in at)
        with torch.no_grad():
            scores = module(torch.from_numpy(padded[None, :, rows, cols].copy()))[0].double().numpy()
        covered = (range(max(0, a), min(n, a + grid.window)) for a, n in zip(at, (height, width), strict=True))
        for row, col in itertools.product(*covered):
            if grid.blend == "centre" and not is_nearest(at, row, col):
                continue
            weight = weight_of(grid, (row - at[0], col - at[1]))
            sums_KHW[:, row, col] += weight * scores[:, row - at[0], col - at[1]]
            total_HW[row, col] += weight
    return sums_KHW / total_HW


GRIDS = [
    CropGrid(SIDE),
    CropGrid(SIDE, 0.3, "cosine"),
    CropGrid(SIDE, 0.0, "mean"),
    CropGrid(SIDE, 0.6, "centre"),
    CropGrid(SIDE, 0.5, "gaussian", "mirrored"),
    CropGrid(SIDE, 0.45, "centre", "mirrored"),
    CropGrid(SIDE, 0.9, "mean", "mirrored"),
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.blend}-{grid.overlap}-{grid.ends}")
@pytest.mark.parametrize("shape", [(29, 34), (7, 31), (12, 5)])
def test_scores_are_those_of_the_definition(grid: CropGrid, shape: tuple[int, int]) -> None:
    """Images smaller than a crop too."""
    module = fixed_size(torch.float64)
    x_CHW = np.random.default_rng(5).normal(size=(BANDS, *shape))
    network = crops_network(module, BANDS, grid)
    with torch.no_grad():
        scores_KHW = network(torch.from_numpy(x_CHW)[None])[0].numpy()
    np.testing.assert_allclose(scores_KHW, defined(module, x_CHW, grid), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("blend", "mode"), [("mean", "constant"), ("gaussian", "gaussian")])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.8])
def test_scores_are_those_of_monai(blend: str, mode: str, overlap: float) -> None:
    inferers = pytest.importorskip("monai.inferers")
    module = fixed_size()
    x_BCHW = torch.randn(1, BANDS, *SHAPE)
    with torch.no_grad():
        ours = crops_network(module, BANDS, CropGrid(SIDE, overlap, blend))(x_BCHW)
        theirs = inferers.sliding_window_inference(x_BCHW, (SIDE, SIDE), 2, module, overlap=overlap, mode=mode)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("grid", "halo"),
    [*((grid, None) for grid in GRIDS), (GRIDS[1], SIDE + 6), (GRIDS[-2], SIDE + 6)],
    ids=lambda one: one if one is None or isinstance(one, int) else f"{one.blend}-{one.overlap}-{one.ends}",
)
def test_scores_of_tiles_have_the_bits_of_the_whole(
    grid: CropGrid, halo: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where the order of a sum shows; where tiles keep scores for the next, a crop is computed once."""
    network, is_dense = crops_network(fixed_size(torch.float64), BANDS, grid).eval(), grid.overlap > 0.8
    shape, tiles = ((29, 41), (2, 3)) if is_dense else (SHAPE, (3, 5))
    x_BCHW = torch.randn(1, BANDS, *shape, dtype=torch.float64)
    tiling = make_tiling(shape, tiles, network_footprint(network.graph, halo))
    computed, each = Counter[Any](), CropModule._each

    def counted(self: CropModule, x_CHW: torch.Tensor, crops: Sequence[Any], *more: Any) -> Iterator[torch.Tensor]:
        computed.update(crops)
        return each(self, x_CHW, crops, *more)

    monkeypatch.setattr(CropModule, "_each", counted)
    for keeping in (nullcontext(), kept_between_tiles(network)):
        computed.clear()
        with torch.no_grad(), keeping:
            whole_KHW = network(x_BCHW)[0]
            assert max(computed.values()) == 1
            for tile in tiling.tiles:
                places = tile_places(network.graph, tiling.whole, tile.context)
                part_KHW = network(x_BCHW[:, :, *tile.context.slices], places)[0]
                assert torch.equal(part_KHW[:, *tile.core_in_output.slices], whole_KHW[:, *tile.core.slices])
    assert halo is not None or set(computed.values()) == {2}  # once for the whole, once for all tiles


@pytest.mark.parametrize("kind", ["dict", "list", "numbers", "brightest"])
def test_a_module_that_looks_at_its_batch_gets_each_crop_alone(kind: str) -> None:
    """At the place of a crop in it, or at the brightest of its crops. Of several outputs the first tensor is mapped."""
    module, x_CHW = fixed_size(torch.float64, Fickle, how=kind), np.random.default_rng(5).normal(size=(BANDS, 29, 34))

    def first(x_BCHW: torch.Tensor) -> torch.Tensor:
        scores = module(x_BCHW)
        return scores["out"] if kind == "dict" else scores[0] if kind == "list" else scores

    network = crops_network(module, BANDS, CropGrid(SIDE))
    with torch.no_grad():
        scores_KHW = network.eval()(torch.from_numpy(x_CHW)[None])[0].numpy()
    np.testing.assert_allclose(scores_KHW, defined(first, x_CHW, CropGrid(SIDE)), rtol=0, atol=1e-12)


class Rows(nn.Conv2d):
    """A module that is written for rows of channels: others are an error, or mixed up."""

    def __init__(self, how: str) -> None:
        super().__init__(BANDS, CLASSES, 3, padding=1)
        self.how = how

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BKHW = super().forward(x_BCHW)
        if self.how == "views":
            return y_BKHW.view(len(y_BKHW), -1).sin().view(y_BKHW.shape)
        strides = torch.empty(y_BKHW.shape, device="meta").stride()
        return y_BKHW.as_strided(y_BKHW.shape, strides if self.how == "strides" else y_BKHW.stride())


@pytest.mark.parametrize("how", ["views", "strides", "neither"])
def test_crops_lie_channels_last_where_a_module_runs_so(how: str) -> None:
    module, x_CHW = Rows(how).double(), np.random.default_rng(5).normal(size=(BANDS, 29, 34))
    network = crops_network(module, BANDS, CropGrid(SIDE)).eval()
    layouts = [each.layout for each in network.modules() if isinstance(each, CropModule)]
    assert layouts == [torch.channels_last if how == "neither" else torch.contiguous_format]
    with torch.no_grad():
        scores_KHW = network(torch.from_numpy(x_CHW)[None])[0].numpy()
    np.testing.assert_allclose(scores_KHW, defined(module, x_CHW, CropGrid(SIDE)), rtol=0, atol=1e-12)


class Halves(nn.Module):
    """A module whose crops see those half a batch away, once a gate is open."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.head, self.gate = nn.Conv2d(BANDS, CLASSES, 1), nn.Parameter(torch.full((), gate))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.head(x_BCHW) + self.gate * x_BCHW.roll(len(x_BCHW) // 2, 0).mean()


def test_crops_half_a_batch_away_are_seen() -> None:
    """Also where training opens the gate after a map."""
    x_BCHW = torch.randn(1, BANDS, 29, 34, dtype=torch.float64)
    for gate in (0.5, 0.0):
        module = Halves(gate).double()
        network = crops_network(module, BANDS, CropGrid(SIDE)).eval()
        with torch.no_grad():
            network(x_BCHW)
            module.gate.fill_(0.5)
            scores_KHW = network(x_BCHW)[0].numpy()
            expected = defined(module, x_BCHW[0].numpy(), CropGrid(SIDE))
        np.testing.assert_allclose(scores_KHW, expected, rtol=0, atol=1e-12)


ROWS: dict[str, tuple[CropGrid, dict[str, Any]]] = {
    "gaussian": (CropGrid(SIDE), {}),
    "mirrored": (CropGrid(SIDE, 0.4, "cosine", "mirrored"), {"parallel": Parallelism(halo="exchange")}),
    "centre": (CropGrid(SIDE, 0.6, "centre"), {}),
    "turns": (CropGrid(SIDE, 0.5, "mean"), {"views": "turns"}),
}


@pytest.fixture(scope="module")
def image(meshes: dict[str, Mesh], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sides that no step divides, a corner without data; in a folder of all ranks. Collective."""
    mesh = meshes["gloo"]
    folder = Path(mesh.communicator.broadcast_object(str(tmp_path_factory.mktemp("crops"))))

    def made() -> None:
        pixels_CHW = np.random.default_rng(2).integers(1, 256, (BANDS, *SHAPE), np.uint8)
        pixels_CHW[:, :9, :13] = 0
        write_raster(folder / "image.tif", pixels_CHW, nodata=0)

    mesh.on_root(made)
    return folder / "image.tif"


def mapped(image: Path, name: str, row: str, grid: tuple[int, int], mesh: Mesh) -> tuple[bytes, bytes]:
    """The bytes of a map of classes and one of shares. Collective."""
    files = [image.with_name(f"{name}{end}.tif") for end in ("", "-shares")]
    cut, asked = ROWS[row]
    own = {key: value for key, value in asked.items() if key != "parallel" or mesh.size > 1}
    request = Request(str(image), *map(str, files), grid=grid, verbosity=0, **own)
    predict_all([request], module_mapper(fixed_size(), BANDS, crops=cut), 1 << 30, mesh)
    mesh.communicator.barrier()
    return files[0].read_bytes(), files[1].read_bytes()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("row", "grid"),
    [
        pytest.param("gaussian", (1, 1), marks=marks((3,))),
        pytest.param("gaussian", (3, 3), marks=marks((2, 9))),
        pytest.param("gaussian", (5, 9), marks=marks((3, 9))),
        pytest.param("mirrored", (2, 4), marks=marks((2,))),
        pytest.param("centre", (4, 3), marks=marks((2, 4))),
        pytest.param("turns", (3, 4), marks=marks((3,))),
    ],
)
def test_a_map_has_the_same_bits_for_any_ranks_and_tiles(
    row: str, grid: tuple[int, int], image: Path, meshes: dict[str, Mesh]
) -> None:
    """Classes and probabilities, byte for byte, of one rank and one tile."""
    mesh = meshes["gloo"]
    ours = mapped(image, f"{row}{grid}", row, grid, mesh)
    alone = mesh.on_root(lambda: mapped(image, f"{row} alone", row, (1, 1), one_rank()))
    assert ours == alone


def test_bits_do_not_depend_on_threads_which_share_no_attributes(image: Path) -> None:
    wanted = mapped(image, "one", "gaussian", (1, 1), one_rank())
    torch.manual_seed(4)
    network, x_BCHW = crops_network(Handing().eval(), BANDS, CropGrid(SIDE, 0.8)).eval(), torch.randn(1, BANDS, *SHAPE)
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            assert mapped(image, f"{number} threads", "gaussian", (2, 2), one_rank()) == wanted
            with torch.no_grad():
                found.append(network(x_BCHW))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
