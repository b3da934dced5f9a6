"""The HDF5 of an empty tile store: every dataset has its place, none has its pixels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import h5py
import numpy as np

from tiledseg.geometry.tiling import Tiling
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.tile_store.header import FORMAT, VERSION, Raster
from tiledseg.raster.tile_store.sparse_file import SparseFile
from tiledseg.raster.tile_store.store import FILLED, StoreName, count, encode_boxes, layouts, slot_shape

_ALIGNMENT = 4096  # bytes: datasets start on pages, so that no two ranks share one but at slot edges


def lay_out_hdf5(
    target: SparseFile,
    rasters: Iterable[tuple[StoreName, RasterInfo, Tiling]],
    described: Mapping[str, str],
    start: int,
) -> dict[str, Raster]:
    """Write it into `target` from byte `start` on; what the header has to say of each raster, by its name.

    `described` is each raster's JSON by name. HDF5's own places count from the start of the file.
    """
    options = {"alignment_threshold": _ALIGNMENT, "alignment_interval": _ALIGNMENT, "userblock_size": start}
    with h5py.File(target, "w", **options) as file:
        numbers = {kind: count(described, kind == "labels") for kind in ("images", "labels")}
        file.attrs.update(format=FORMAT, version=VERSION, **numbers)
        return {
            name.key: _lay_out_raster(file, name, info, tiling, described[name.key]) for name, info, tiling in rasters
        }


def _lay_out_raster(file: h5py.File, name: StoreName, info: RasterInfo, tiling: Tiling, text: str) -> Raster:
    group = file.create_group(f"{'labels' if name.labels else 'images'}/{name.number:05d}")
    group.attrs["raster"] = text
    group.create_dataset("boxes", data=encode_boxes(tiling))
    for key, (shape, dtype) in layouts(info, len(tiling), slot_shape(name.labels, info, tiling)).items():
        if key in ("state", "checksums"):
            group.create_dataset(key, data=np.zeros(shape, dtype))
        elif key in FILLED:
            _allocate(group, key, shape, np.dtype(dtype))
    starts = {key: int(group[key].id.get_offset()) for key in FILLED}
    places = {key: (start, start + int(group[key].nbytes)) for key, start in starts.items()}
    return Raster(text, int(group["boxes"].id.get_offset()), places)


def _allocate(group: h5py.Group, key: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """A contiguous dataset that has its place in the file but no bytes yet (a hole, which reads as 0)."""
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    how.set_obj_track_times(False)
    h5py.h5d.create(group.id, key.encode(), h5py.h5t.py_create(dtype), h5py.h5s.create_simple(shape), how)
