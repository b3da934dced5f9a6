"""Maps for s3://: made whole in a folder of this machine, then put into their bucket.

All ranks put their pixels in place in one file (`raster.map_writer`), which no server takes. So the folder mirrors the
buckets, a map is finished in it as any other, and what lies there then goes up, the raster last. An unfinished map
never has the object's name; one that could not go up stays in the folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tiledseg.comm.doing import doing, tick
from tiledseg.comm.mesh import Mesh
from tiledseg.config.map_formats import ZARR
from tiledseg.errors import InputError, OutputError, WriteError
from tiledseg.inference.request import Request
from tiledseg.raster.map_writer import SIDECARS
from tiledseg.raster.remote import (
    RemoteName,
    check_obstore,
    check_writable,
    gdal_path,
    is_remote,
    is_there,
    parse_s3,
    put,
    remove,
)
from tiledseg.system.outputs import files_below

_OUTPUTS = ("output", "probabilities", "polygons")
_STYLE, _POLYGONS, _RASTERS = ".qml", ".gpkg", (".tif", ".tiff")


@contextmanager
def staged(requests: Sequence[Request], mesh: Mesh) -> Iterator[tuple[Sequence[Request], str | None]]:
    """Yield the requests, with files in a new folder for their outputs on servers, and that folder (None: there is no
    such output). Collective.

    Raise OutputError, before any work, for a URL that is no object's, and where the server refuses to have it written.
    """
    made: list[str] = []
    try:
        yield mesh.on_root(lambda: _stage(requests, made))
    finally:
        for folder in made:
            for root, _, _ in os.walk(folder, topdown=False):
                with suppress(OSError):  # a map that could not go up is in it
                    os.rmdir(root)


def _stage(requests: Sequence[Request], made: list[str]) -> tuple[Sequence[Request], str | None]:
    images = {gdal_path(request.image) for request in requests}
    outputs = [{key: path for key in _OUTPUTS if (path := getattr(request, key)) is not None} for request in requests]
    names = {url: _checked(f"--{key}", url, images) for each in outputs for key, url in each.items() if is_remote(url)}
    if not names:
        return requests, None
    with doing("asking the server whether maps may be written"):
        for name in {os.path.dirname(name.url): name for name in names.values()}.values():
            tick()
            _check_writable(name)
        for name in names.values():
            if requests[0].packing.format == ZARR and is_there(name._replace(key=f"{name.key}/zarr.json")):
                raise OutputError(f"{name.url} is there; remove it, or name another")
            if name.key.lower().endswith(_POLYGONS) and is_there(name):
                raise OutputError(
                    f"--polygons {name.url} is there, and may hold other layers; remove it, or name another"
                )
    folder = tempfile.mkdtemp(prefix="tiledseg-")
    made.append(folder)
    local = []
    for request, each in zip(requests, outputs, strict=True):
        files = {key: os.path.join(folder, *names[url]) for key, url in each.items() if url in names}
        for file in files.values():
            os.makedirs(os.path.dirname(file), exist_ok=True)
        local.append(replace(request, **files))  # type: ignore[arg-type]
    return local, folder


def _checked(key: str, url: str, images: set[str]) -> RemoteName:
    """Return the name of an output. Raise OutputError for one that no server takes, or an image that is read."""
    name = parse_s3(url)
    if name is None:
        raise OutputError(f"{key} is {url}, where nothing can be written; give a file, or s3:// with a name")
    if any(part in ("", ".", "..") for part in url.removeprefix("s3://").split("/")):
        raise OutputError(f"{key} is {url}, which names no object; give s3://bucket/name.tif")
    if gdal_path(url) in images:
        raise OutputError(f"cannot write {key} {url}: it is the input {url}; choose another output")
    check_obstore(key, url)
    return name


def _check_writable(name: RemoteName) -> None:
    try:
        check_writable(name)
    except InputError as error:
        raise OutputError(str(error)) from error


def upload(folder: str | None) -> tuple[str, ...]:
    """Put what lies in the `folder` onto its servers, on one rank, after a map has its name there. Return warnings.

    Objects beside an older map that do not describe the new one are removed first, a style that is there stays: as with
    files. Raises WriteError where the server refuses; what has not gone up stays in the folder.
    """
    if folder is None:
        return ()
    notes: list[str] = []
    files = sorted(files_below(folder), key=_rank_of)
    with doing("putting the map onto its server"):
        for file in files:
            bucket, *key = file.relative_to(folder).parts
            name = RemoteName(bucket, "/".join(key))
            try:
                tick()
                if file.suffix == _STYLE and is_there(name):
                    notes.append(f"the style {name.url} stays as it was; remove it for one of this map's classes")
                else:
                    _put(file, name, files)
            except InputError as error:
                raise WriteError(f"{error}; what has not gone up is kept in {folder}") from error
            file.unlink()
    return tuple(notes)


def _rank_of(file: Path) -> tuple[bool, int, Path]:
    """Return what orders files: a raster last, and a store's metadata after its chunks, the root's at the end."""
    last = file.suffix in _RASTERS or file.name == "zarr.json"
    return last, -len(file.parts) if last else 0, file


def _put(file: Path, name: RemoteName, files: Sequence[Path]) -> None:
    for end in SIDECARS:
        if file.suffix in _RASTERS and file.with_name(file.name + end) not in files:
            remove(name._replace(key=name.key + end))
    put(name, file, tick)
