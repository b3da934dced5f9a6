"""Tests of damaged and edited tile stores: one line, or the result of the whole store."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.raster.test_tile_store import cut, plan
from tests.small_files import write_raster
from tiledseg.errors import RasterError
from tiledseg.raster import mirrored_reader
from tiledseg.raster.finding import expand_sources
from tiledseg.raster.reader import open_raster

RASTER = "images/00000"
Edit = Callable[[h5py.File], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two images, one with invalid pixels, and their labels."""
    folder = tmp_path_factory.mktemp("whole")
    generator = np.random.default_rng(1)
    images, labels = [], []
    for number, shape in enumerate(((60, 70), (50, 90))):
        pixels_CHW = generator.integers(1, 60000, (3, *shape)).astype(np.uint16)
        pixels_CHW[:, :20, :30] = 0
        images.append(write_raster(folder / f"image{number}.tif", pixels_CHW, nodata=0))
        labels.append(write_raster(folder / f"labels{number}.tif", generator.integers(0, 4, (1, *shape), np.uint8)))
    return Path(cut(folder / "tiles.h5", plan(images, labels)))


@pytest.fixture
def store(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mirrored_reader, "PAUSES", ())
    shutil.copy(whole, tmp_path / "other.h5")
    return Path(shutil.copy(whole, tmp_path / "tiles.h5"))


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
def test_a_flipped_bit_is_found_or_without_effect(store: Path, whole: Path) -> None:
    expected, data = everything(whole), whole.read_bytes()
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


def test_a_flipped_bit_of_a_description_is_found(store: Path, whole: Path) -> None:
    """HDF5 keeps texts in heaps without a checksum."""
    data = whole.read_bytes()
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
    "another grid": _described("grid", [2, 2]),
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
