from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.small_files import write_raster
from tiledseg.errors import LabelError, RasterError
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.mirrored_reader import prefetch
from tiledseg.raster.reader import RasterReader, open_raster
from tiledseg.raster.samples import dataset as dataset_module
from tiledseg.raster.samples.dataset import Dataset, layout_warning
from tiledseg.raster.statistics import Normalization

SHAPE = (70, 90)
NORMALIZATION = Normalization((100.0, 50.5, 3.0), (40.0, 17.3, 1.0))
CLASSES = LabelMap.from_config(4, 255)
FOOTPRINTS = {"clipped": Footprint(8, 16, 16), "mirrored": Footprint(8, 11, 13, 10, mirror=True)}


def write(path: Path, pixels_CHW: NDArray, **options: Any) -> str:
    return write_raster(path, pixels_CHW, photometric="minisblack", **options)


def image(dtype: str = "uint8", seed: int = 0) -> NDArray:
    pixels_CHW = np.random.default_rng(seed).integers(1, 255, (3, *SHAPE)).astype(dtype)
    pixels_CHW[:, :20, :30] = 0
    return pixels_CHW


def labels() -> NDArray:
    classes_KHW = np.random.default_rng(9).integers(0, 4, (1, *SHAPE)).astype(np.uint8)
    classes_KHW[0, 40:, :7] = 255
    return classes_KHW


def tiling(grid: tuple[int, int] = (3, 2), footprint: str = "clipped", shape: tuple[int, int] = SHAPE) -> Tiling:
    return make_tiling(shape, grid, FOOTPRINTS[footprint])


def open_pair(folder: Path, dtype: str = "uint8") -> tuple[RasterReader, RasterReader]:
    nodata = open_raster(write(folder / "image.tif", image(dtype), nodata=0))
    return nodata, open_raster(write(folder / "labels.tif", labels()))


def expected(dtype: str, working: str, out: str) -> tuple[NDArray, NDArray]:
    """x and y of the whole raster, and of its mirrored surroundings 40 pixels a side."""
    pad = ((0, 0), (40, 40), (40, 40))
    pixels_CHW = np.pad(image(dtype), pad, mode="symmetric")
    mean, std = (np.array(v, working)[:, None, None] for v in (NORMALIZATION.mean, NORMALIZATION.std))
    x_CHW = ((pixels_CHW.astype(working) - mean) / std).astype(out)
    invalid_HW = (pixels_CHW == 0).all(0) if dtype == "uint8" else (pixels_CHW == 0).any(0)
    x_CHW[:, invalid_HW] = 0
    y_HW = np.where(invalid_HW[40:-40, 40:-40], 255, labels()[0])
    return x_CHW, y_HW


@pytest.mark.parametrize("footprint", FOOTPRINTS)
@pytest.mark.parametrize(
    ("dtype", "working", "out"),
    [
        ("uint8", "float32", "float32"),
        ("uint8", "float64", "float64"),
        ("float32", "float32", "float32"),
        ("int32", "float64", "float32"),
    ],
)
def test_every_tile_is_a_window_of_the_one_normalised_raster(
    tmp_path: Path, footprint: str, dtype: str, working: str, out: str
) -> None:
    image_reader, label_reader = open_pair(tmp_path, dtype)
    cut = tiling(footprint=footprint)
    data = Dataset([image_reader], [label_reader], [cut], CLASSES, NORMALIZATION, dtype=out)
    x_CHW, y_HW = expected(dtype, working, out)
    assert data.tiles_per_image == (6,)
    for index, tile in enumerate(cut.tiles):
        sample = data.load(0, index)
        assert (sample.image, sample.tile) == (0, tile)
        assert sample.x_CHW.dtype == np.dtype(out)
        np.testing.assert_array_equal(sample.x_CHW, x_CHW[:, *tile.context.shift(40, 40).slices])
        assert sample.y_HW is not None
        np.testing.assert_array_equal(sample.y_HW, y_HW[tile.core.slices])
        assert sample.valid_HW.shape == tile.core.shape
    data.close()


def test_loads_the_same_through_prefetch_threads_and_few_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "OPEN_RASTERS", 3)
    readers = [open_raster(write(tmp_path / f"{i}.tif", image(seed=i))) for i in range(8)]
    data = Dataset(readers, None, [tiling()] * 8, None, NORMALIZATION)
    pairs = [(i, t) for t in range(6) for i in range(8)]
    alone = [data.load(*pair).x_CHW for pair in pairs]
    before = len(os.listdir("/proc/self/fd"))
    together = list(prefetch(pairs, lambda pair: data.load(*pair).x_CHW, threads=3, depth=4))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    assert len(os.listdir("/proc/self/fd")) <= before + 9
    assert data.load(0, 0).y_HW is None
    data.close()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    pair = open_pair(tmp_path)
    two_bands = open_raster(str(tmp_path / "image.tif"), [1, 2])
    small = open_raster(write(tmp_path / "small.tif", labels()[:, :60]))
    cases: list[tuple[Any, Any, Any, Any, str]] = [
        (pair[:1], None, [tiling(shape=(64, 90))], None, r"\(70, 90\) but its tiling is of \(64, 90\)"),
        ([two_bands], None, [tiling()], None, r"normalisation has 3 bands but .*image.tif has 2"),
        (pair[:1], [small], [tiling()], CLASSES, "differ in size: 70 x 90 px against 60 x 90 px"),
    ]
    for *given, words in cases:
        with pytest.raises(RasterError, match=words):
            Dataset(*given, NORMALIZATION)
    wrong = labels()
    wrong[0, 50, 60] = 9
    reader = open_raster(write(tmp_path / "wrong.tif", wrong))
    data = Dataset(pair[:1], [reader], [tiling()], CLASSES, NORMALIZATION)
    with pytest.raises(LabelError, match=r"wrong.tif holds value 9 at \(row 50, col 60\)"):
        [data.load(0, tile) for tile in range(6)]


INFO = RasterInfo("big.tif", 10000, 10000, 4, "uint8", block_shape=(512, 512), driver="GTiff")
TILING = make_tiling(INFO.shape, (8, 8), Footprint(16, 96, 96))


def test_warns_of_strips_huge_blocks_and_sequential_files_but_not_of_tiles() -> None:
    assert layout_warning(INFO, TILING) is None
    assert layout_warning(replace(INFO, block_shape=(256, 256)), TILING) is None
    strips = layout_warning(replace(INFO, block_shape=(1, 10000)), TILING)
    assert strips
    for words in ("big.tif", "1 x 10000 px", "decodes 6.9", "tiledseg tile --images big.tif --grid [8,8]"):
        assert words in strips
    assert "\n" not in strips
    assert "decodes 48.2" in str(layout_warning(replace(INFO, block_shape=(10000, 10000)), TILING))
    png = replace(INFO, block_shape=(1, 10000), driver="PNG")
    assert "PNG rows, decoded from the top" in str(layout_warning(png, TILING))
    for side, warned in ((4096, False), (4098, True)):  # four bands of 4096 x 4096 bytes are kept, and no larger ones
        info = replace(INFO, height=side, width=side, block_shape=(1, side))
        found = layout_warning(info, make_tiling(info.shape, (8, 8), Footprint(16, 96, 96)))
        assert (found is not None) == warned
