"""Maps by crops of one size: the definition, written again in a loop, and its bits for any tiles and threads
(`test_maps.py` has ranks)."""

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

import tiledseg
from tests.law.fixed_size import BANDS, CLASSES, SHAPE, SIDE, Fickle, Handing, fixed_size
from tests.small_files import write_raster
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.layers.declared import CropGrid
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.layers.block import tile_places
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


def test_bits_do_not_depend_on_threads_which_share_no_attributes(tmp_path: Path) -> None:
    image, files = tmp_path / "image.tif", [tmp_path / "map.tif", tmp_path / "shares.tif"]
    write_raster(image, np.random.default_rng(2).integers(1, 256, (BANDS, *SHAPE), np.uint8))
    torch.manual_seed(4)
    network, x_BCHW = crops_network(Handing().eval(), BANDS, CropGrid(SIDE, 0.8)).eval(), torch.randn(1, BANDS, *SHAPE)
    found = []
    for number in (1, 4):
        torch.set_num_threads(number)
        tiledseg.predict_raster(fixed_size(), image, files[0], probabilities=files[1], window=SIDE, grid=2)
        with torch.no_grad():
            found.append([network(x_BCHW).numpy().tobytes(), *(path.read_bytes() for path in files)])
    assert found[0] == found[1]


def test_more_threads_have_larger_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has as many crops of a tile, so that none waits."""
    image, tiles, blended = tmp_path / "image.tif", Counter[int](), CropModule._blended
    write_raster(image, np.ones((BANDS, 1500, 1500), np.uint8))

    def counted(module: CropModule, *args: Any) -> torch.Tensor:
        tiles[threads] += 1
        return blended(module, *args)

    monkeypatch.setattr(CropModule, "_blended", counted)
    for threads in (1, 4):
        torch.set_num_threads(threads)
        tiledseg.predict_raster(nn.Conv2d(BANDS, CLASSES, 1), image, tmp_path / "map.tif", window=224, overlap=0.25)
    assert tiles[1] >= 2 * tiles[4] > 0
