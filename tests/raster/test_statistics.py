"""Statistics to the last bit by any split; values near the end of float64: the right normalisation, or one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.small_files import write_raster
from tiledseg.errors import RasterError
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.raster import statistics
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.statistics import Normalization, finish, measure, partial_sums, statistics_blocks

law = settings(derandomize=True, max_examples=40, deadline=None)
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")


def random_pixels(dtype: str, seed: int, shape: tuple[int, int, int]) -> NDArray:
    generator = np.random.default_rng(seed)
    if dtype.startswith("float"):
        return (generator.normal(1e4, 3, shape)).astype(dtype)
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


@law
@given(st.sampled_from(DTYPES), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_any_split_gives_the_same_bits_as_the_exact_moments(dtype: str, seed: int, parts: int) -> None:
    pixels_CHW = random_pixels(dtype, seed, (2, 30, 7))
    valid_HW = np.random.default_rng(seed).random((30, 7)) < 0.8
    valid_HW[0, 0] = True
    blocks = [partial_sums(pixels_CHW[:, r : r + 5], valid_HW[r : r + 5]) for r in range(0, 30, 5)]
    one = finish(np.concatenate(blocks))
    shares = [np.concatenate(blocks[i::parts]) for i in range(parts)]
    assert finish(np.concatenate(shares[::-1])) == one
    for band, mean, std in zip(pixels_CHW, one.mean, one.std, strict=True):
        values = [int(v) for v in band[valid_HW]] if band.dtype.kind in "iu" else [float(v) for v in band[valid_HW]]
        exact = sum(values) / len(values)
        spread = (sum((v - exact) ** 2 for v in values) / len(values)) ** 0.5 or 1.0
        assert mean == pytest.approx(exact, rel=1e-12, abs=1e-6 * spread)
        assert std == pytest.approx(spread, rel=1e-9)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_any_number_of_ranks_gives_the_same_bits(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "BLOCK_SHAPE", (16, 24))
    readers = []
    every = []
    for i, shape in enumerate([(3, 50, 61), (3, 33, 100)]):
        pixels_CHW = random_pixels(dtype, i, shape)
        every.append(pixels_CHW.reshape(3, -1).astype(float))
        readers.append(open_raster(write_raster(tmp_path / f"{i}.tif", pixels_CHW, photometric="minisblack")))
    infos = [reader.info for reader in readers]
    one = finish(measure(readers, statistics_blocks(infos)))
    for size in (2, 3, 50):
        shares = [measure(readers, statistics_blocks(infos, rank, size)) for rank in range(size)]
        assert finish(np.concatenate(shares)) == one
    together = np.concatenate(every, axis=1)
    assert one.mean == pytest.approx(together.mean(1), rel=1e-12)
    assert one.std == pytest.approx(together.std(1), rel=1e-9)


@pytest.mark.parametrize(("dtype", "value"), [("uint16", 7), ("float32", 0.1), ("float64", 1e5 / 3)])
def test_a_constant_band_gets_std_one_and_a_warning(dtype: str, value: float) -> None:
    pixels_CHW = np.stack([np.full((31, 17), value, dtype), np.arange(31 * 17).reshape(31, 17).astype(dtype)])
    found = finish(np.concatenate([partial_sums(pixels_CHW[:, i : i + 1], np.ones((1, 17), bool)) for i in range(31)]))
    assert found.constant == (0,)
    assert found.std[0] == 1.0
    assert found.mean[0] == pytest.approx(float(pixels_CHW[0, 0, 0]))
    assert "band 1" in found.warnings()[0]
    assert Normalization.identity(2).warnings() == ()


SHAPE = (32, 32)
no_warning = pytest.mark.filterwarnings("error::RuntimeWarning")


def raster(path: Path, values: list[float], dtype: str = "float64", nodata: float | None = None) -> RasterReader:
    pixels_CHW = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(dtype)
    pixels_CHW[1].flat[: len(values)] = values
    write_raster(path, pixels_CHW, nodata=nodata)
    return open_raster(str(path))


def normalization(reader: RasterReader) -> Normalization:
    return finish(measure([reader], statistics_blocks([reader.info])))


@no_warning
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


@no_warning
def test_huge_values_as_nodata_do_not_count(tmp_path: Path) -> None:
    reader = raster(tmp_path / "a.tif", [1e308, 1e308, np.inf, np.nan], nodata=1e308)
    tiling = make_tiling(SHAPE, (1, 1), Footprint(1, 0, 0))
    sample = Dataset([reader], None, [tiling], None, normalization(reader)).load(0, 0)
    assert np.isfinite(sample.x_CHW).all()
    assert int((~sample.valid_HW).sum()) == 4


@no_warning
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
