"""Edits of a tile store that leave it an HDF5 file: each must be found, whatever it would have changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

Edit = Callable[[h5py.File], Any]
RASTER = "images/00000"


def _attribute(where: str, key: str, value: Any) -> Edit:
    def edit(file: h5py.File) -> None:
        file[where].attrs[key] = value

    return edit


def _without(where: str, key: str) -> Edit:
    def edit(file: h5py.File) -> None:
        if key in file[where].attrs:
            del file[where].attrs[key]
        else:
            del file[where][key]

    return edit


def _described(key: str, value: Any) -> Edit:
    def edit(file: h5py.File) -> None:
        raster = json.loads(file[RASTER].attrs["raster"])
        assert raster[key] != value
        file[RASTER].attrs["raster"] = json.dumps({**raster, key: value})

    return edit


def _plus_one(dataset: str, at: Any = ...) -> Edit:
    def edit(file: h5py.File) -> None:
        values = file[RASTER][dataset][()]
        values[at] += 1
        file[RASTER][dataset][...] = values

    return edit


def _replaced(dataset: str, make: Callable[[h5py.Group], Any]) -> Edit:
    def edit(file: h5py.File) -> None:
        group = file[RASTER]
        made = make(group)
        del group[dataset]
        group[dataset] = made

    return edit


def _exchanged(file: h5py.File) -> None:
    """Two tiles in each other's place, checksums and all."""
    for dataset in ("pixels", "invalid", "state", "checksums"):
        values = file[RASTER][dataset][()]
        values[[0, 1]] = values[[1, 0]]
        file[RASTER][dataset][...] = values


def _all_valid(file: h5py.File) -> None:
    assert (file[RASTER]["state"][()] == 2).any()
    file[RASTER]["state"][...] = 1


EDITS: dict[str, Edit] = {
    "version text": _attribute("/", "version", "two"),
    "version of the past": _attribute("/", "version", 1),
    "no version": _without("/", "version"),
    "more images": _attribute("/", "images", 10**12),
    "images text": _attribute("/", "images", "many"),
    "no images count": _without("/", "images"),
    "fewer labels": _attribute("/", "labels", 0),
    "labels taken away": _without("/", "labels"),
    "a raster taken away": _without("/images", "00001"),
    "no raster": _without(RASTER, "raster"),
    "raster text": _attribute(RASTER, "raster", "{ no JSON"),
    "raster list": _attribute(RASTER, "raster", "[1, 2]"),
    **{f"no {name}": _without(RASTER, name) for name in ("boxes", "state", "checksums", "pixels", "invalid")},
    "another grid": _described("grid", [2, 3]),
    "a huge grid": _described("grid", [10**6, 10**6]),
    "another height": _described("height", 149),
    "a huge height": _described("height", 10**15),
    "other bands": _described("bands", 2),
    "other band numbers": _described("band_numbers", [3, 2, 1]),
    "another dtype": _described("dtype", "int16"),
    "another CRS": _described("crs", None),
    "another transform": _described("transform", [1, 0, 0, 0, -1, 0]),
    "another nodata": _described("nodata", 7),
    "another palette": _described("palette", [[0, [255, 0, 0, 255]]]),
    "another footprint": _described("footprint", {"alignment": 8, "before": 8, "after": 8, "cut": 0, "mirror": False}),
    "a core shifted by one": _plus_one("boxes", (2, 0)),
    "a context shifted by one": _plus_one("boxes", (2, 1)),
    "a pixel": _plus_one("pixels", (3, 1, 20, 20)),
    "a pixel of the margin": _plus_one("pixels", (0, 0, -1, -1)),
    "a validity": _plus_one("invalid", (0, 3, 3)),
    "a checksum": _plus_one("checksums", 4),
    "a state": _plus_one("state", 5),
    "an unknown state": _plus_one("state", ...),
    "all valid": _all_valid,
    "two tiles exchanged": _exchanged,
    "pixels elsewhere": _replaced("pixels", lambda group: h5py.ExternalLink("other.h5", f"/{RASTER}/pixels")),
    "pixels by another name": _replaced("pixels", lambda group: h5py.SoftLink("/images/00001/pixels")),
    "pixels of another raster": _replaced("pixels", lambda group: group.file["images/00001/pixels"]),
    "a raster elsewhere": lambda file: (
        file.move("images/00000", "away")
        or file.__setitem__("images/00000", h5py.ExternalLink("other.h5", f"/{RASTER}"))
    ),
    "fewer pixels": _replaced("pixels", lambda group: group["pixels"][:, :1]),
    "pixels of another dtype": _replaced("pixels", lambda group: group["pixels"][()].astype("<i4")),
    "a group for pixels": _replaced("pixels", lambda group: h5py.SoftLink("/images")),
    "repacked": _replaced("state", lambda group: group["state"][()][:-1]),
}


def edit(store: Path, name: str) -> None:
    with h5py.File(store, "r+") as file:
        EDITS[name](file)
