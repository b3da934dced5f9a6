"""Tests of the tile store: the arrays of the rasters, the same bytes however often cutting was killed; and damaged
stores give one line, or the result of the whole one."""

import contextlib
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.small_files import alike_in_bytes, write_raster
from tiledseg.errors import OutputError, RasterError, WriteError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.raster import mirrored_reader, tile_store
from tiledseg.raster.finding import expand_sources, pair_sources
from tiledseg.raster.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset, layout_warning
from tiledseg.raster.statistics import finish, measure, statistics_blocks
from tiledseg.raster.tile_store import StorePlan, write_store
from tiledseg.system.outputs import check_outputs, whole

SHAPES = ((150, 170), (90, 200))
CLIPPED = Footprint(8, 16, 16)
MIRRORED = Footprint(8, 27, 29, 10, mirror=True)


@pytest.fixture
def rasters(tmp_path: Path) -> tuple[list[str], list[str]]:
    """Two images, one with a nodata corner, and their labels with an ignored region."""
    images, labels = [], []
    for i, shape in enumerate(SHAPES):
        generator = np.random.default_rng(i)
        image = generator.integers(1, 60000, (3, *shape)).astype(np.uint16)
        image[:, :40, :30] = 0
        label = generator.integers(0, 4, (1, *shape)).astype(np.uint8)
        label[0, 60:70] = 9
        images.append(write_raster(tmp_path / f"image{i}.tif", image, nodata=0))
        labels.append(write_raster(tmp_path / f"labels{i}.tif", label, nodata=9))
    return images, labels


def plan(
    images: Sequence[str], labels: Sequence[str] | None, grid: tuple[int, int] = (3, 2), footprint: Footprint = CLIPPED
) -> StorePlan:
    infos = tuple(open_raster(path).info for path in images)
    label_infos = tuple(open_raster(path).info for path in labels) if labels else None
    return StorePlan(infos, label_infos, tuple(make_tiling(info.shape, grid, footprint) for info in infos))


def cut(path: Path | str, what: StorePlan) -> str:
    """Write the whole store."""
    images = [info.path for info in what.images]
    labels = [info.path for info in what.labels or ()]
    write_store(
        str(path), what, lambda number: open_raster(images[number]), lambda number: open_raster(labels[number]), print
    )
    return str(path)


def digest(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.parametrize("footprint", [CLIPPED, MIRRORED])
def test_a_store_is_its_raster(tmp_path: Path, rasters: tuple[list[str], list[str]], footprint: Footprint) -> None:
    """Each tile's context and core, and any other box, with their validity."""
    store = cut(tmp_path / "tiles.h5", plan(*rasters, footprint=footprint))
    generator = np.random.default_rng(5)
    for source, name in zip(
        [*rasters[0], *rasters[1]], [f"{store}#{n}" for n in ("0", "1", "0:labels", "1:labels")], strict=True
    ):
        with open_raster(source) as ours, open_raster(name) as theirs:
            for key in ("shape", "bands", "dtype", "crs", "transform", "nodata", "band_numbers", "palette"):
                assert getattr(ours.info, key) == getattr(theirs.info, key), key
            assert theirs.info.tiling is not None
            boxes = [box for tile in theirs.info.tiling.tiles for box in (tile.context, tile.core)]
            for _ in range(12):
                rows, cols = (sorted(generator.integers(-300, 300, 2)) for _ in range(2))
                boxes.append(Box(Interval(rows[0], rows[1] + 1), Interval(cols[0], cols[1] + 1)))
            for box in boxes:
                for found, expected in zip(theirs.read(box), ours.read(box), strict=True):
                    np.testing.assert_array_equal(found, expected)
                    assert found.dtype == expected.dtype


def test_a_chunk_is_some_rows_of_one_tile(
    tmp_path: Path, rasters: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The datasets are plain ones, and nothing is stored of validity where all pixels are valid."""
    what = plan(*rasters)
    store = cut(tmp_path / "tiles.h5", what)
    height, width = what.tilings[1].context_max
    with h5py.File(store, "r") as file, open_raster(f"{store}#1") as reader:
        assert dict(file.attrs) == {"format": "tiledseg tiles", "version": 3, "done": True}
        assert file["images/00001/pixels"].chunks == (1, 3, height, width)
        assert layout_warning(reader.info, what.tilings[1]) is None
    monkeypatch.setattr(tile_store, "_CHUNK_BYTES", 1000)
    plain = write_raster(
        tmp_path / "plain.tif", np.random.default_rng(0).integers(0, 255, (2, 90, 80)).astype(np.uint8)
    )
    with h5py.File(cut(tmp_path / "plain.h5", plan([plain], None)), "r") as file:
        assert file["images/00000/invalid"].id.get_storage_size() == 0
        assert 2 * np.prod(file["images/00000/pixels"].chunks[2:]) <= 1000
    with open_raster(f"{tmp_path}/plain.h5#0") as ours, open_raster(plain) as theirs:
        box = Box.of_shape((90, 80))
        np.testing.assert_array_equal(ours.read(box)[0], theirs.read(box)[0])


@alike_in_bytes
def test_stopped_at_any_write_it_leaves_no_store_and_the_next_run_cuts_a_whole_one(
    tmp_path: Path, rasters: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of HDF5 is once the last one, ended by the disk or by a signal."""
    what = plan([rasters[0][0]], [rasters[1][0]], grid=(2, 1))
    expected = digest(cut(tmp_path / "whole.h5", what))
    path, write, left = tmp_path / "tiles.h5", os.write, [0]
    (tmp_path / ".tiles.h5.part").write_bytes(b"of a job that was killed")

    class KilledError(BaseException):
        pass

    killers = KilledError(), OSError(28, "No space left on device")
    killer: list[BaseException] = []

    def dying(handle: int, data: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise killer[-1]
        return write(handle, data)

    monkeypatch.setattr(tile_store.os, "write", dying)
    for each in killers:
        killer.append(each)
        deaths = 0
        while not path.exists():
            deaths += 3
            left[0] = deaths
            with contextlib.suppress(KilledError, WriteError):
                cut(path, what)
            assert not path.exists() or digest(path) == expected
        assert deaths > 5
        path.unlink()


def test_sources_name_the_images_of_a_store(tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
    store = cut(tmp_path / "tiles.h5", plan(*rasters))
    assert expand_sources([store], "data.images") == (f"{store}#0", f"{store}#1")
    assert expand_sources([f"{store}#1"], "data.images") == (f"{store}#1",)
    keys = ("data.images", "data.labels")
    pairs = (f"{store}#0", f"{store}#1"), (f"{store}#0:labels", f"{store}#1:labels")
    assert pair_sources([store], [], keys) == pair_sources([store], [store], keys) == pairs
    assert pair_sources([store], rasters[1], keys)[1] == tuple(rasters[1])
    with pytest.raises(RasterError, match=r"image0.tif names no labels, and data.labels is empty"):
        pair_sources(rasters[0], [], keys)


class TestRefuses:
    def test_a_run_that_cuts_otherwise(self, tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
        what = plan(*rasters)
        reader = open_raster(cut(tmp_path / "tiles.h5", what) + "#0")
        normalization = finish(measure([reader], statistics_blocks([reader.info])))

        def dataset(grid: tuple[int, int], footprint: Footprint) -> Dataset:
            return Dataset([reader], None, [make_tiling(SHAPES[0], grid, footprint)], None, normalization)

        dataset((3, 2), replace(CLIPPED, before=8, after=8)).load(0, 3)
        with pytest.raises(RasterError, match=r"cut with grid \[3, 2\], .* needs grid \[2, 2\]"):
            dataset((2, 2), CLIPPED)
        with pytest.raises(RasterError, match=r"halo \(16, 16\) px, but the run needs .*halo \(24, 24\) px"):
            dataset((3, 2), replace(CLIPPED, before=24, after=24))
        with pytest.raises(RasterError, match=r"alignment 8, .*the run needs .*alignment 32"):
            dataset((3, 2), Footprint(32, 32, 32))
        wide = cut(tmp_path / "wide.h5", plan(rasters[0][:1], None, footprint=replace(CLIPPED, before=64, after=64)))
        reader = open_raster(f"{wide}#0")  # its contexts hold those of other cores
        with pytest.raises(RasterError, match=r"alignment 8, .*the run needs .*alignment 32"):
            dataset((3, 2), Footprint(32, 32, 32))

    def test_other_bands_or_nodata_or_rasters_than_were_cut(
        self, tmp_path: Path, rasters: tuple[list[str], list[str]]
    ) -> None:
        store = cut(tmp_path / "tiles.h5", plan(rasters[0], None))
        with open_raster(f"{store}#0", bands=[1, 2, 3], nodata=0):
            pass
        for name, options, words in (
            ("#0", {"bands": [2, 1]}, r"data.bands is \[2, 1\] but .* was cut with bands \[1, 2, 3\]"),
            ("#0", {"nodata": 7}, r"data.nodata is 7 but .* was cut with 0"),
            ("#2", {}, r"tiles.h5#2 does not exist: .* holds 2 images"),
            ("#0:labels", {}, r"#0:labels does not exist: .* holds 0 labels"),
            ("", {}, "holds 2 images; name one of them"),
        ):
            with pytest.raises(RasterError, match=words):
                open_raster(f"{store}{name}", **options)

    def test_other_versions_and_other_files(self, tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
        store = Path(cut(tmp_path / "tiles.h5", plan(*rasters)))
        for key, value, words in (
            ("version", 2, r"tiles.h5 has version 2, this program reads version 3; remove it and cut it again"),
            ("done", False, r"tiles.h5 is unfinished; remove it and cut it again"),
            ("format", "tiles", r"tiles.h5 is no tile store"),
        ):
            with h5py.File(store, "r+") as file:
                before, file.attrs[key] = file.attrs[key], value
            for name in (str(store), f"{store}#0"):
                with pytest.raises(RasterError, match=words):
                    open_raster(name)
            with h5py.File(store, "r+") as file:
                file.attrs[key] = before

    def test_a_store_that_no_disk_holds(self, tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
        what = plan(*rasters)
        huge = replace(what, images=tuple(replace(info, bands=10**12) for info in what.images))
        with pytest.raises(OutputError, match=r"it needs .* GiB, .* GiB free; make room"):
            check_outputs([whole("--output", tmp_path / "tiles.h5", huge.bytes)])


RASTER = "images/00000"
Edit = Callable[[h5py.File], Any]


@pytest.fixture
def sound(tmp_path: Path, rasters: tuple[list[str], list[str]]) -> Path:
    """A store of two images, one with invalid pixels, and their labels."""
    return Path(cut(tmp_path / "sound.h5", plan(*rasters, grid=(2, 2))))


@pytest.fixture
def store(tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mirrored_reader, "PAUSES", ())
    shutil.copy(sound, tmp_path / "other.h5")
    return Path(shutil.copy(sound, tmp_path / "tiles.h5"))


def everything(store: Path) -> list[Any]:
    """Return all that a store gives: descriptions, and every tile's context or core."""
    content: list[Any] = []
    expand_sources([str(store)], "data.images")
    for name in (f"{store}#{name}" for name in ("0", "1", "0:labels", "1:labels")):
        with open_raster(name) as reader:
            info = reader.info
            assert info.tiling is not None
            content += [info.shape, info.dtype, info.transform, info.crs, info.nodata, info.palette, info.tiling]
            for tile in info.tiling.tiles:
                content += reader.read(tile.core if "labels" in name else tile.context)
    return content


def outcome(store: Path) -> list[Any] | str:
    """Return all that a store gives, or its one line."""
    try:
        return everything(store)
    except RasterError as error:
        line = str(error)
    assert "tiles.h5" in line
    assert "\n" not in line
    assert len(line) < 700
    return line


def same(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


@pytest.mark.timeout(200)
def test_a_flipped_bit_is_found_or_without_effect(store: Path, sound: Path) -> None:
    expected, data = everything(sound), sound.read_bytes()
    generator = np.random.default_rng(4)
    places = [*range(0, 48), *generator.integers(0, len(data), 40).tolist(), *range(len(data) - 20, len(data))]
    refused = 0
    for at in places:
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(generator.integers(8))
        store.write_bytes(damaged)
        result = outcome(store)
        refused += isinstance(result, str)
        assert isinstance(result, str) or same(result, expected), f"byte {at} of {len(data)}"
    assert refused > len(places) / 2  # the rest is padding of chunks, and validity of tiles without invalid pixels


def test_a_flipped_bit_of_a_description_is_found(store: Path, sound: Path) -> None:
    """HDF5 keeps texts in heaps without a checksum."""
    data = sound.read_bytes()
    start = data.index(b'{"source"')
    for at in range(start, data.index(b'"footprint"', start), 5):
        store.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert "a damaged description" in str(outcome(store)), f"byte {at} of {len(data)}"


def _described(key: str, value: Any) -> Edit:
    def edit(file: h5py.File) -> None:
        raster = json.loads(file[RASTER].attrs["raster"])
        assert raster[key] != value
        text = json.dumps({**raster, key: value})
        file[RASTER].attrs.update(raster=text, crc32=zlib.crc32(text.encode()))

    return edit


def _replaced(dataset: str, make: Callable[[h5py.Group], Any]) -> Edit:
    def edit(file: h5py.File) -> None:
        made = make(file[RASTER])
        del file[RASTER][dataset]
        file[RASTER][dataset] = made

    return edit


def _deleted(path: str) -> Edit:
    return lambda file: file.__delitem__(path)


EDITS: dict[str, Edit] = {
    "no raster": lambda file: file[RASTER].attrs.__delitem__("raster"),
    "raster text": lambda file: file[RASTER].attrs.__setitem__("raster", "{ no JSON"),
    "labels taken away": _deleted("labels"),
    "no pixels": _deleted(f"{RASTER}/pixels"),
    "another grid": _described("grid", [3, 2]),
    "other bands": _described("bands", 2),
    "another dtype": _described("dtype", "int16"),
    "a larger halo": _described("footprint", {"alignment": 8, "before": 24, "after": 24, "cut": 0, "mirror": False}),
    "pixels elsewhere": _replaced("pixels", lambda group: h5py.ExternalLink("other.h5", f"/{RASTER}/pixels")),
    "pixels by another name": _replaced("pixels", lambda group: h5py.SoftLink("/images/00001/pixels")),
    "pixels of no chunks": _replaced("pixels", lambda group: group["pixels"][()]),
    "fewer pixels": _replaced("pixels", lambda group: group["pixels"][:, :1]),
    "a group for pixels": _replaced("pixels", lambda group: h5py.SoftLink("/images")),
    "a raster elsewhere": lambda file: (
        file.move(RASTER, "away") or file.__setitem__(RASTER, h5py.ExternalLink("other.h5", f"/{RASTER}"))
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_datasets_that_do_not_fit_are_refused(store: Path, name: str) -> None:
    with h5py.File(store, "r+") as file:
        EDITS[name](file)
    assert isinstance(outcome(store), str)
