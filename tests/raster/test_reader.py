"""The reader interface over GDAL: pixels, validity, mirroring, bands, threads, URLs and bad files."""

import os
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import rasterio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.answers import refusal
from tests.raster import range_server
from tests.raster.range_server import running
from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.reader import open_raster

ROWS_PER_STRIP, TILE_WIDTH, TILE_LENGTH = 278, 322, 323


def change_tag(path: Path, tag: int, value: int) -> None:
    """Set the (single) value of a tag in the first directory of a little-endian TIFF, and nothing else."""
    data = bytearray(path.read_bytes())
    (directory,) = struct.unpack_from("<I", data, 4)
    (entries,) = struct.unpack_from("<H", data, directory)
    for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
        if struct.unpack_from("<H", data, entry)[0] == tag:
            kind, count = struct.unpack_from("<HI", data, entry + 2)
            assert count == 1, f"tag {tag} has {count} values"
            struct.pack_into({3: "<H", 4: "<I"}[kind], data, entry + 8, value)
            path.write_bytes(data)
            return
    raise AssertionError(f"{path} has no tag {tag}")


KINDS: dict[str, dict[str, Any]] = {
    "strips": {"driver": "GTiff"},
    "deflate": {"driver": "GTiff", "compress": "deflate", "tiled": True, "blockxsize": 16, "blockysize": 32},
    "zstd": {"driver": "GTiff", "compress": "zstd", "tiled": True, "blockxsize": 32, "blockysize": 16},
    "band": {"driver": "GTiff", "interleave": "band", "tiled": True, "blockxsize": 16, "blockysize": 16},
    "cog": {"driver": "COG"},
    "png": {"driver": "PNG"},
}


def random_pixels(shape: tuple[int, int, int], dtype: str = "uint8", seed: int = 0) -> NDArray:
    return np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)


def write(path: Path, pixels_CHW: NDArray, driver: str = "GTiff", **options: Any) -> str:
    count, height, width = pixels_CHW.shape
    if driver == "GTiff":
        options.setdefault("photometric", "minisblack")
    with rasterio.open(path, "w", driver, width, height, count, dtype=pixels_CHW.dtype, **options) as file:
        file.write(pixels_CHW)
    return str(path)


def whole(pixels_CHW: NDArray) -> Box:
    return Box.of_shape(pixels_CHW.shape[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_reads_any_window_of_any_kind(tmp_path: Path, kind: str) -> None:
    pixels_CHW = random_pixels((3, 70, 90))
    with open_raster(write(tmp_path / "a", pixels_CHW, **KINDS[kind])) as reader:
        assert (reader.info.shape, reader.info.bands, reader.info.dtype) == ((70, 90), 3, "uint8")
        for box in (whole(pixels_CHW), Box(Interval(3, 41), Interval(17, 90)), Box(Interval(69, 70), Interval(0, 1))):
            found_CHW, valid_HW = reader.read(box)
            np.testing.assert_array_equal(found_CHW, pixels_CHW[:, *box.slices])
            assert valid_HW.shape == box.shape
            assert valid_HW.dtype == np.bool_
            assert valid_HW.all()


def test_reads_jpeg_as_gdal_does_and_a_palette_as_indices(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jpg", random_pixels((3, 40, 50)), driver="JPEG")
    with rasterio.open(path) as dataset, open_raster(path) as reader:
        found_CHW, _ = reader.read(Box(Interval(5, 20), Interval(6, 50)))
        np.testing.assert_array_equal(found_CHW, dataset.read()[:, 5:20, 6:])
    with rasterio.open(tmp_path / "a.png", "w", driver="PNG", count=1, height=2, width=2, dtype="uint8") as file:
        file.write(np.array([[[0, 1], [1, 0]]], np.uint8))
        file.write_colormap(1, {0: (255, 0, 0, 255), 1: (0, 0, 255, 255)})
    with open_raster(str(tmp_path / "a.png")) as reader:
        assert dict(reader.info.palette or ())[1] == (0, 0, 255, 255)
        assert reader.read(Box.of_shape((2, 2)))[0].tolist() == [[[0, 1], [1, 0]]]


def test_keeps_the_dtype(tmp_path: Path) -> None:
    for dtype in ("int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64"):
        pixels_CHW = random_pixels((2, 9, 11)).astype(dtype)
        with open_raster(write(tmp_path / "a.tif", pixels_CHW)) as reader:
            found_CHW, _ = reader.read(whole(pixels_CHW))
            assert found_CHW.dtype == np.dtype(dtype) == reader.info.dtype
            np.testing.assert_array_equal(found_CHW, pixels_CHW)


@settings(derandomize=True, max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(-40, 40), st.integers(1, 60)),
    st.tuples(st.integers(-40, 40), st.integers(1, 60)),
)
def test_beyond_the_raster_is_numpys_symmetric_padding(
    tmp_path: Path, shape: tuple[int, int], rows: tuple[int, int], cols: tuple[int, int]
) -> None:
    """Pixels and validity, at any distance, also of rasters far smaller than the reach."""
    pixels_CHW = random_pixels((2, *shape), "int16")
    path = tmp_path / f"{shape[0]}x{shape[1]}.tif"
    if not path.exists():
        write(path, pixels_CHW, nodata=int(pixels_CHW[0, 0, 0]))
    box = Box(Interval(rows[0], rows[0] + rows[1]), Interval(cols[0], cols[0] + cols[1]))
    pad = 120
    symmetric = np.pad(pixels_CHW, ((0, 0), (pad, pad), (pad, pad)), mode="symmetric")
    expected_CHW = symmetric[:, *box.shift(pad, pad).slices]
    with open_raster(str(path)) as reader:
        found_CHW, valid_HW = reader.read(box)
    np.testing.assert_array_equal(found_CHW, expected_CHW)
    np.testing.assert_array_equal(valid_HW, (expected_CHW != pixels_CHW[0, 0, 0]).all(0))


def test_alpha_is_validity_unless_asked_for_as_data(tmp_path: Path) -> None:
    pixels_CHW = random_pixels((4, 20, 20))
    pixels_CHW[3] = np.where(np.arange(20) < 5, 0, 255)
    pixels_CHW[3, 0, 7] = 1
    path = write(tmp_path / "a.tif", pixels_CHW, photometric="rgb", alpha="yes")
    with open_raster(path) as reader:
        assert (reader.info.bands, reader.info.has_mask) == (3, True)
        assert "band 4 is marked as alpha" in reader.info.notes[0]
        found_CHW, valid_HW = reader.read(whole(pixels_CHW))
        np.testing.assert_array_equal(found_CHW, pixels_CHW[:3])
        np.testing.assert_array_equal(valid_HW, pixels_CHW[3] > 0)
    with open_raster(path, bands=[4, 1, 2]) as reader:
        assert reader.info.notes == ()
        found_CHW, valid_HW = reader.read(whole(pixels_CHW))
        np.testing.assert_array_equal(found_CHW, pixels_CHW[[3, 0, 1]])
        assert valid_HW.all()


@pytest.mark.parametrize("internal", [True, False])
def test_a_mask_of_the_file_or_beside_it_is_validity(tmp_path: Path, internal: bool) -> None:
    mask_HW = (np.arange(20) % 3 > 0) * np.ones((10, 1), bool)
    path = tmp_path / "a.tif"
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=internal),
        rasterio.open(path, "w", driver="GTiff", count=2, height=10, width=20, dtype="uint8") as file,
    ):
        file.write(random_pixels((2, 10, 20)))
        file.write_mask(mask_HW)
    assert (tmp_path / "a.tif.msk").exists() != internal
    with open_raster(str(path)) as reader:
        assert reader.info.has_mask
        np.testing.assert_array_equal(reader.read(Box(Interval(2, 9), Interval(1, 20)))[1], mask_HW[2:9, 1:])


def test_nodata_in_every_band_of_an_unsigned_raster_in_any_band_of_others(tmp_path: Path) -> None:
    """And NaN and infinity in any band."""
    pixels_CHW = np.array([[[0, 0, 5]], [[0, 7, 5]]])
    lowest = float(np.finfo(np.float32).min)
    floats_CHW = np.array([[[1, np.nan, np.inf, 2, 3]], [[1, 1, 1, lowest, 4]]], np.float32)
    for values_CHW, nodata, other, expected in (
        (pixels_CHW.astype(np.uint8), 0, None, [False, True, True]),
        (pixels_CHW.astype(np.int16), 0, None, [False, False, True]),
        (pixels_CHW.astype(np.uint8), 0, 5, [True, True, False]),
        (floats_CHW, lowest, None, [True, False, False, False, True]),
    ):
        with open_raster(write(tmp_path / "a.tif", values_CHW, nodata=nodata), nodata=other) as reader:
            assert reader.info.nodata == (nodata if other is None else other)
            assert reader.read(whole(values_CHW))[1][0].tolist() == expected


def test_threads_read_at_once_and_handles_do_not_pile_up(tmp_path: Path) -> None:
    pixels_CHW = random_pixels((3, 256, 256))
    path = write(tmp_path / "a.tif", pixels_CHW, tiled=True, blockxsize=32, blockysize=32, compress="deflate")
    reader = open_raster(path)

    def check(seed: int) -> bool:
        row, col = np.random.default_rng(seed).integers(0, 200, 2)
        box = Box(Interval(row, row + 56), Interval(col, col + 40))
        return bool((reader.read(box)[0] == pixels_CHW[:, *box.slices]).all())

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):  # pools of threads come and go, as with each epoch
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(check, range(100)))
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    reader.release()
    assert check(1)
    reader.close()
    assert len(os.listdir("/proc/self/fd")) < before + 1
    with pytest.raises(RasterError, match="empty box"):
        reader.read(Box(Interval(1, 1), Interval(0, 4)))


class TestBadFiles:
    def message(self, path: str | Path, **options: Any) -> str:
        with refusal(RasterError) as error:
            open_raster(str(path), **options)
        return str(error.value)

    @pytest.mark.parametrize("kind", ["strips", "deflate", "zstd", "band", "cog", "png"])
    def test_truncated_is_found_when_opened(self, tmp_path: Path, kind: str) -> None:
        path = Path(write(tmp_path / "a", random_pixels((3, 200, 200)), **KINDS[kind]))
        data = path.read_bytes()
        for share in (0.5, 0.99):
            (tmp_path / "cut").write_bytes(data[: int(share * len(data))])
            assert re.search(r"cut is truncated|cannot open .*cut", self.message(tmp_path / "cut"))

    def test_blocks_that_are_larger_than_their_bytes(self, tmp_path: Path) -> None:
        # GDAL fails on the whole raster, and reads windows of it as if the next block's bytes were this one's.
        for interleave in ("pixel", "band"):
            for tag, value in ((TILE_LENGTH, 4112), (TILE_LENGTH, 48), (TILE_WIDTH, 272)):
                tiles = {"tiled": True, "blockxsize": 32, "blockysize": 32, "interleave": interleave}
                path = Path(write(tmp_path / "a.tif", random_pixels((3, 64, 64)), **tiles))
                change_tag(path, tag, value)
                assert "its header is damaged" in self.message(path)
        path = Path(write(tmp_path / "b.tif", random_pixels((1, 20, 16)), blockysize=5))
        change_tag(path, ROWS_PER_STRIP, 10)
        assert "has 80 bytes for a block of 10 x 16 px, whose pixels take 160" in self.message(path)

        # Fewer bytes for a reason: a short last strip, packed, compressed, sparse.
        jpeg = {"photometric": "ycbcr", "compress": "jpeg"}
        for options in ({"blockysize": 16}, {"nbits": 4}, jpeg, {"sparse_ok": True}):
            with open_raster(write(tmp_path / "c.tif", random_pixels((3, 70, 90)) % 16, **options)) as reader:
                assert reader.info.shape == (70, 90)

    def test_a_truncated_jpeg_is_found_when_read(self, tmp_path: Path) -> None:
        path = Path(write(tmp_path / "a.jpg", random_pixels((3, 200, 200)), driver="JPEG"))
        path.write_bytes(path.read_bytes()[:9000])
        with (
            open_raster(str(path)) as reader,
            pytest.raises(RasterError, match=r"cannot read rows 0:200, columns 0:200 of .*a.jpg: .*truncated"),
        ):
            reader.read(Box.of_shape((200, 200)))

    def test_a_damaged_block_names_the_file_and_the_window(self, tmp_path: Path) -> None:
        path = Path(write(tmp_path / "a.tif", random_pixels((1, 64, 64)), **KINDS["deflate"]))
        with rasterio.open(path) as dataset:
            offset = int(dataset.get_tag_item("BLOCK_OFFSET_1_1", "TIFF", bidx=1))
        data = path.read_bytes()
        path.write_bytes(data[:offset] + b"\xff" * 50 + data[offset + 50 :])
        with open_raster(str(path)) as reader:
            reader.read(Box.of_shape((16, 16)))
            with pytest.raises(RasterError, match=r"^cannot read rows 32:64, columns 9:64 of .*a.tif: [^\n]*$"):
                reader.read(Box(Interval(32, 64), Interval(9, 64)))

    def test_bands_and_values_that_are_not_there(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.tif", random_pixels((3, 4, 4)))
        for options, words in (
            ({"bands": [1, 4]}, "asks for band 4, but"),
            ({"bands": [0]}, "has bands 1 to 3"),
            ({"bands": []}, "empty list"),
            ({"bands": [2, 2]}, "twice"),
            ({"nodata": -9999}, f"data.nodata is -9999, which uint8 pixels of {path} cannot hold"),
        ):
            assert words in self.message(path, **options)

    def test_zero_bands(self, tmp_path: Path) -> None:
        path = tmp_path / "a.he5"
        with h5py.File(path, "w") as file:
            file["one"] = file["two"] = random_pixels((1, 8, 8))[0]
        text = self.message(path, references=True)
        assert "has 0 bands" in text
        name = re.search(r"\w+:\S+:\S*one", text)
        assert name
        with open_raster(name[0], references=True) as reader:
            assert reader.info.shape == (8, 8)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with running(range_server.__file__, str(tmp_path)) as address:
        yield address


def test_reads_over_http_and_s3(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels_CHW = random_pixels((3, 300, 300))
    (tmp_path / "bucket").mkdir()
    write(tmp_path / "bucket" / "a.tif", pixels_CHW, tiled=True, blockxsize=64, blockysize=64)
    asked = {"AWS_S3_ENDPOINT": server, "AWS_HTTPS": "NO", "AWS_VIRTUAL_HOSTING": "FALSE", "AWS_NO_SIGN_REQUEST": "YES"}
    for key, value in {**asked, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    box = Box(Interval(-5, 100), Interval(200, 310))
    expected_CHW = np.pad(pixels_CHW, ((0, 0), (5, 0), (0, 10)), mode="symmetric")[:, :105, 200:]
    for url in (f"http://{server}/bucket/a.tif", "s3://bucket/a.tif", "/vsis3/bucket/a.tif"):
        with open_raster(url) as reader:
            assert reader.info.path == url
            np.testing.assert_array_equal(reader.read(box)[0], expected_CHW)
    with pytest.raises(RasterError, match=r"cannot open http://.*/none.tif"):
        open_raster(f"http://{server}/bucket/none.tif")
    write(tmp_path / "bucket" / "busy.tif", pixels_CHW, tiled=True, blockxsize=64, blockysize=64)
    with open_raster(f"http://{server}/bucket/busy.tif") as reader:
        np.testing.assert_array_equal(reader.read(box)[0], expected_CHW)
