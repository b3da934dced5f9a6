"""Tiles as arrays, and statistics to the last bit by any split, near the end of float64 too."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.small_files import write_raster
from tiledseg.errors import LabelError, RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.raster import mirrored_reader, statistics
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset, layout_warning
from tiledseg.raster.statistics import Normalization, finish, measure, partial_sums, statistics_blocks

SHAPE = (70, 90)
NORMALIZATION = Normalization((100.0, 50.5, 3.0), (40.0, 17.3, 1.0))
CLASSES = LabelMap.from_config(4, 255)
FOOTPRINTS = {"clipped": Footprint(8, 16, 16), "mirrored": Footprint(8, 11, 13, 10, mirror=True)}


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
    nodata = open_raster(write_raster(folder / "image.tif", image(dtype), nodata=0))
    return nodata, open_raster(write_raster(folder / "labels.tif", labels()))


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
    for index, tile in enumerate(cut.tiles):
        sample = data.load(0, index)
        assert (sample.image, sample.tile) == (0, tile)
        assert sample.x_CHW.dtype == np.dtype(out)
        np.testing.assert_array_equal(sample.x_CHW, x_CHW[:, *tile.context.shift(40, 40).slices])
        assert sample.y_HW is not None
        np.testing.assert_array_equal(sample.y_HW, y_HW[tile.core.slices])
        assert sample.valid_HW.shape == tile.core.shape
    data.close()


def test_a_value_of_no_class_is_named_with_its_place(tmp_path: Path) -> None:
    wrong = labels()
    wrong[0, 50, 60] = 9
    reader = open_raster(write_raster(tmp_path / "wrong.tif", wrong))
    data = Dataset(open_pair(tmp_path)[:1], [reader], [tiling()], CLASSES, NORMALIZATION)
    with pytest.raises(LabelError, match=r"wrong.tif holds value 9 at \(row 50, col 60\)"):
        [data.load(0, tile) for tile in range(6)]


INFO = RasterInfo("big.tif", 10000, 10000, 4, "uint8", block_shape=(512, 512), driver="GTiff")
TILING = make_tiling(INFO.shape, (8, 8), Footprint(16, 96, 96))


def test_warns_of_strips_and_huge_blocks_but_not_of_tiles() -> None:
    assert layout_warning(INFO, TILING) is None
    assert layout_warning(replace(INFO, block_shape=(256, 256)), TILING) is None
    strips = layout_warning(replace(INFO, block_shape=(1, 10000)), TILING)
    assert strips
    for words in ("big.tif", "1 x 10000 px", "decodes 6.9", "tiledseg tile --images big.tif --grid [8,8]"):
        assert words in strips
    assert "\n" not in strips
    assert "decodes 48.2" in str(layout_warning(replace(INFO, block_shape=(10000, 10000)), TILING))
    for side, warned in ((4096, False), (4098, True)):  # four bands of 4096 x 4096 bytes are kept, and no larger ones
        info = replace(INFO, height=side, width=side, block_shape=(1, side))
        found = layout_warning(info, make_tiling(info.shape, (8, 8), Footprint(16, 96, 96)))
        assert (found is not None) == warned


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
        readers.append(open_raster(write_raster(tmp_path / f"{i}.tif", pixels_CHW)))
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


SIDES = (32, 32)
no_warning = pytest.mark.filterwarnings("error::RuntimeWarning")


def raster(path: Path, values: list[float], dtype: str = "float64", nodata: float | None = None) -> RasterReader:
    pixels_CHW = np.random.default_rng(0).normal(size=(2, *SIDES)).astype(dtype)
    pixels_CHW[1].flat[: len(values)] = values
    write_raster(path, pixels_CHW, nodata=nodata)
    return open_raster(str(path))


def normalization(reader: RasterReader) -> Normalization:
    return finish(measure([reader], statistics_blocks([reader.info])))


@no_warning
def test_statistics_that_no_float64_holds(tmp_path: Path) -> None:
    """Take a block, and blocks that are each constant and 2e200 apart."""
    for value in (1e308, -1e308, 1e200):
        with pytest.raises(RasterError, match=r"band 2 of .*a.tif, rows 0:32, columns 0:32, holds values whose varian"):
            normalization(raster(tmp_path / "a.tif", [value, value, -value, 1.0]))
    readers = []
    for name, value in (("a", 1e200), ("b", -1e200)):
        write_raster(tmp_path / f"{name}.tif", np.full((1, *SIDES), value))
        readers.append(open_raster(str(tmp_path / f"{name}.tif")))
    with pytest.raises(RasterError, match=r"band 1 of the images holds values whose variance overflows"):
        finish(measure(readers, statistics_blocks([reader.info for reader in readers])))


@no_warning
def test_huge_values_as_nodata_do_not_count(tmp_path: Path) -> None:
    reader = raster(tmp_path / "a.tif", [1e308, 1e308, np.inf, np.nan], nodata=1e308)
    tiling = make_tiling(SIDES, (1, 1), Footprint(1, 0, 0))
    sample = Dataset([reader], None, [tiling], None, normalization(reader)).load(0, 0)
    assert np.isfinite(sample.x_CHW).all()
    assert int((~sample.valid_HW).sum()) == 4


@no_warning
@pytest.mark.parametrize(("dtype", "value"), [("float64", 1e308), ("float64", 1e39), ("float32", 3e38)])
def test_pixels_that_the_network_s_dtype_cannot_hold(tmp_path: Path, dtype: str, value: float) -> None:
    reader = raster(tmp_path / "a.tif", [value, 1.0], dtype)
    scale = Normalization((0.0, -value if dtype == "float32" else 0.0), (1.0, 0.5 if dtype == "float32" else 1.0))
    tiling = make_tiling(SIDES, (1, 1), Footprint(1, 0, 0))
    with pytest.raises(RasterError, match=r"band 2 of .*a.tif at \(row 0, col 0\) is .*, which float32 cannot hold"):
        Dataset([reader], None, [tiling], None, scale).load(0, 0)
    if value < 1e300:
        sample = Dataset([reader], None, [tiling], None, scale, np.float64).load(0, 0)
        stored = float(np.dtype(dtype).type(value))
        assert sample.x_CHW[1, 0, 0] == (stored - scale.mean[1]) / scale.std[1]


def test_a_fork_waits_for_no_thread_and_closes_no_handle_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrored_reader, "MOST_IDLE", 1)
    first, second = (open_raster(write_raster(tmp_path / f"{i}.tif", image(seed=i))) for i in range(2))
    first.read(Box.of_shape((4, 4)))
    held = threading.Event()

    def hold_briefly() -> None:
        with mirrored_reader._used_lock:
            held.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold_briefly)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # ends a child that waits for the lock
            second.read(Box.of_shape((4, 4)))
            files = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
            os._exit(0 if first.info.path in files else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    first.close()
    second.close()
