"""Values near the end of float64: the right normalisation, or one line; no numpy warning, no infinity."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.small_files import write_raster
from tiledseg.errors import RasterError
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.statistics import Normalization, finish, measure, statistics_blocks

SHAPE = (32, 32)


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def raster(path: Path, values: list[float], dtype: str = "float64", nodata: float | None = None) -> RasterReader:
    pixels_CHW = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(dtype)
    pixels_CHW[1].flat[: len(values)] = values
    write_raster(path, pixels_CHW, nodata=nodata)
    return open_raster(str(path))


def normalization(reader: RasterReader) -> Normalization:
    return finish(measure([reader], statistics_blocks([reader.info])))


def test_statistics_that_no_float64_holds(tmp_path: Path) -> None:
    """Take a block, and blocks that are each constant and 2e200 apart."""
    for value in (1e308, -1e308, 1e200):
        with pytest.raises(RasterError, match=r"band 2 of .*a.tif, rows 0:32, columns 0:32, holds values so large"):
            normalization(raster(tmp_path / "a.tif", [value, value, -value, 1.0]))
    readers = []
    for name, value in (("a", 1e200), ("b", -1e200)):
        write_raster(tmp_path / f"{name}.tif", np.full((1, *SHAPE), value))
        readers.append(open_raster(str(tmp_path / f"{name}.tif")))
    with pytest.raises(RasterError, match=r"band 1 of the images holds values so large"):
        finish(measure(readers, statistics_blocks([reader.info for reader in readers])))


def test_as_nodata_they_do_not_count(tmp_path: Path) -> None:
    reader = raster(tmp_path / "a.tif", [1e308, 1e308, np.inf, np.nan], nodata=1e308)
    tiling = make_tiling(SHAPE, (1, 1), Footprint(1, 0, 0))
    sample = Dataset([reader], None, [tiling], None, normalization(reader)).load(0, 0)
    assert np.isfinite(sample.x_CHW).all()
    assert int((~sample.valid_HW).sum()) == 4


@pytest.mark.parametrize(("dtype", "value"), [("float64", 1e308), ("float64", 1e39), ("float32", 3e38)])
def test_pixels_that_the_network_s_dtype_cannot_hold(tmp_path: Path, dtype: str, value: float) -> None:
    reader = raster(tmp_path / "a.tif", [value, 1.0], dtype)
    scale = Normalization((0.0, -value if dtype == "float32" else 0.0), (1.0, 0.5 if dtype == "float32" else 1.0))
    tiling = make_tiling(SHAPE, (1, 1), Footprint(1, 0, 0))
    with pytest.raises(RasterError, match=r"band 2 of .*a.tif at \(row 0, col 0\) is .*, which float32 cannot hold"):
        Dataset([reader], None, [tiling], None, scale).load(0, 0)
    if value < 1e300:
        sample = Dataset([reader], None, [tiling], None, scale, np.float64).load(0, 0)
        stored = float(np.dtype(dtype).type(value))
        assert sample.x_CHW[1, 0, 0] == (stored - scale.mean[1]) / scale.std[1]
