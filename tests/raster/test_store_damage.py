"""A tile store that was edited or damaged is refused in one line, or gives what it gave: never another result."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.raster.store_edits import EDITS, edit
from tests.raster.test_tile_store import cut, plan, write_raster
from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.raster.finding.sources import expand_sources
from tiledseg.raster.reading.reader import open_raster
from tiledseg.raster.tile_store.header import read_header, seal_file
from tiledseg.raster.tile_store.writer import begin_store


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two images, one with invalid pixels, and their labels."""
    folder = tmp_path_factory.mktemp("whole")
    generator = np.random.default_rng(1)
    images, labels = [], []
    for number, shape in enumerate(((150, 170), (90, 200))):
        pixels_CHW = generator.integers(1, 60000, (3, *shape)).astype(np.uint16)
        pixels_CHW[:, :40, :30] = 0
        images.append(write_raster(folder / f"image{number}.tif", pixels_CHW, nodata=0))
        labels.append(write_raster(folder / f"labels{number}.tif", generator.integers(0, 4, (1, *shape), np.uint8)))
    return Path(cut(folder / "tiles.h5", plan(images, labels)))


@pytest.fixture
def store(tmp_path: Path, whole: Path) -> Path:
    shutil.copy(whole, tmp_path / "other.h5")
    return Path(shutil.copy(whole, tmp_path / "tiles.h5"))


def everything(store: Path) -> list[Any]:
    """All that a store gives: descriptions, and every tile's context or core."""
    found: list[Any] = []
    names = [f"{store}#{name}" for name in ("0", "1", "0:labels", "1:labels")]
    expand_sources([str(store)], "data.images")
    for name in names:
        with open_raster(name) as reader:
            info = reader.info
            assert info.tiling is not None
            found += [info.shape, info.dtype, info.transform, info.crs, info.nodata, info.palette, info.tiling]
            for tile in info.tiling.tiles:
                found += reader.read(tile.core if "labels" in name else tile.context)
    return found


def same(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found(store: Path, name: str) -> None:
    edit(store, name)
    with pytest.raises(RasterError) as error:
        everything(store)
    assert "tiles.h5" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


def test_a_part_of_a_tile_is_as_safe_as_all_of_it(store: Path) -> None:
    """A box of few rows reads these alone, after the whole tile has been compared once."""
    with open_raster(f"{store}#0") as reader:
        assert reader.info.tiling is not None
        context = reader.info.tiling.tiles[3].context
        middle = (context.row.start + context.row.stop) // 2
        box = Box(Interval(middle, middle + 2), context.col)
        reader.read(box)
    edit(store, "a pixel")
    with (
        open_raster(f"{store}#0") as reader,
        pytest.raises(RasterError, match=r"tiles.h5#0 was changed .*tile 3 \(row 1, column 1 of the grid\)"),
    ):
        reader.read(box)


def outcome(store: Path) -> list[Any] | str:
    """All that a store gives, or its one line."""
    try:
        return everything(store)
    except RasterError as error:
        return str(error)


@pytest.mark.timeout(200)
def test_flipped_bits_anywhere(store: Path, whole: Path) -> None:
    """Of the header, the HDF5 and the pixels: found, or without effect (the user block's margin)."""
    expected, data = everything(whole), bytearray(store.read_bytes())
    generator = np.random.default_rng(4)
    header = read_header(str(whole))
    ends = (len(json.dumps(asdict(header))), header.start, header.start + 8192, len(data))
    pieces = itertools.pairwise((0, *ends))
    places = [int(at) for start, stop in pieces for at in generator.integers(start, stop, 50)]
    found = []
    for at in places:
        data[at] ^= 1 << int(generator.integers(8))
        store.write_bytes(data)
        data[:] = whole.read_bytes()
        given = outcome(store)
        if isinstance(given, str):
            found.append(at)
            assert given.count("\n") == 0
        else:
            assert same(given, expected), f"byte {at} of {len(data)}"
    assert all(at in found for at in (*places[:50], *places[100:150]))
    assert sum(at in found for at in places[150:]) > 20  # the rest is validity of tiles that are valid everywhere


def test_it_is_plain_hdf5_for_everybody_else(whole: Path) -> None:
    with h5py.File(whole, "r") as file, open_raster(f"{whole}#1") as reader:
        assert dict(file.attrs) == {"format": "tiledseg tiles", "version": 2, "images": 2, "labels": 2}
        assert reader.info.tiling is not None
        for tile in reader.info.tiling.tiles:
            _, height, width = slot = reader.read(tile.context)[0].shape
            stored_CHW = file["images/00001/pixels"][tile.index]
            np.testing.assert_array_equal(stored_CHW[:, :height, :width], reader.read(tile.context)[0])
            assert file["images/00001/boxes"][tile.index, 0].tolist()[0] == tile.core.row.start
            assert slot[0] == 3
        assert file["images/00001/state"][()].tolist() == [2, 1, 2, 1, 1, 1]


def test_a_tiling_of_any_kind_comes_back(tmp_path: Path, whole: Path) -> None:
    """Not only such as `make_tiling` makes."""
    source = str(whole.parent / "image1.tif")
    what = plan([source], None)
    tiles = tuple(
        replace(tile, context=Box(tile.core.row.expand(1, 2), tile.core.col.expand(2, 1)))
        for tile in what.tilings[0].tiles
    )
    tiling = replace(what.tilings[0], tiles=tiles)
    store = cut(tmp_path / "own.h5", replace(what, tilings=(tiling,)))
    with open_raster(f"{store}#0") as reader, open_raster(source) as plain:
        assert reader.info.tiling == tiling
        for tile in tiles:
            np.testing.assert_array_equal(reader.read(tile.context)[0], plain.read(tile.context)[0])


class TestOtherVersions:
    def test_hdf5_without_a_header(self, tmp_path: Path) -> None:
        """What an older version cut."""
        with h5py.File(tmp_path / "old.h5", "w") as file:
            file.attrs.update(format="tiledseg tiles", version=1, images=1)
        for name in ("old.h5", "old.h5#0"):
            with pytest.raises(
                RasterError, match=r"old.h5 is no tile store of version 2: .* remove it and cut it again"
            ):
                open_raster(str(tmp_path / name))

    def test_a_header_of_another_version(self, store: Path) -> None:
        with open(store, "r+b") as file:
            file.write(b"tiledseg tiles 3")
        with pytest.raises(
            RasterError, match=r"tiles.h5 has version 3, this program reads 2; remove it and cut it again"
        ):
            open_raster(f"{store}#0")

    def test_a_header_that_says_too_much(self, store: Path) -> None:
        """Sealed anew, and of a grid that the file cannot hold."""
        header = read_header(str(store))
        raster = header.rasters["0"].raster.replace('"grid": [3, 2]', '"grid": [3000000, 2000000]')
        assert raster != header.rasters["0"].raster
        rasters = {**header.rasters, "0": replace(header.rasters["0"], raster=raster)}
        with open(store, "r+b") as file:
            seal_file(file, header.start, rasters)
        with pytest.raises(RasterError, match=r"its grid of \[3000000, 2000000\] does not fit"):
            open_raster(f"{store}#0")


def test_an_edited_store_is_not_gone_on_with(store: Path, whole: Path) -> None:
    folder = whole.parent
    paths = ([str(folder / f"{kind}{number}.tif") for number in (0, 1)] for kind in ("image", "labels"))
    what = plan(*paths)
    shutil.move(store, f"{store}.partial")
    edit(Path(f"{store}.partial"), "a core shifted by one")
    with pytest.raises(RasterError, match=r"tiles.h5.partial was changed or damaged since it was cut"):
        begin_store(str(store), what)
