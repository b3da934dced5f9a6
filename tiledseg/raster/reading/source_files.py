"""All files that reading a raster opens, so that no command writes over one of them."""

from __future__ import annotations

import os
from typing import Any

from rasterio.errors import RasterioError
from rasterio.io import DatasetReader

from tiledseg.raster.names import is_remote
from tiledseg.raster.reading.gdal_open import DRIVERS, files_beside, local_file
from tiledseg.system.files import irregular_kind

_VRT_HEAD_BYTES = 1024


def source_files(path: str, dataset: Any) -> tuple[str, ...]:
    """The local files of an open `dataset`: itself, its side-car files and, of a VRT, its sources, at any depth."""
    if is_remote(path):
        return ()
    file = local_file(path)
    if dataset.driver in DRIVERS and file is not None:
        return (file, *files_beside(file))
    found = dict.fromkeys([path, *dataset.files] if os.path.exists(path) else dataset.files)
    waiting = [file for file in found if file != path] if dataset.driver == "VRT" else []
    while waiting:
        for file in _listed_by(waiting.pop()):
            if file not in found:
                found[file] = None
                waiting.append(file)
    return tuple(found)


def _listed_by(file: str) -> list[str]:
    """What a VRT names; nothing for any other file. GDAL itself lists the sources of the outermost VRT only."""
    if not os.path.isfile(file) or irregular_kind(file) is not None:
        return []
    with open(file, "rb") as handle:
        if b"<VRTDataset" not in handle.read(_VRT_HEAD_BYTES):
            return []
    try:
        with DatasetReader(file, driver=["VRT"], sharing=False) as dataset:
            return list(dataset.files)
    except RasterioError:
        return []
