"""Reading one raster of a tile store: a context, or any box put together from cores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import HandlePool, RasterReader
from tiledseg.raster.tile_store.store import (
    StoreName,
    load_info,
    open_store,
    parse_store_name,
    slots,
    store_images,
)


class StoreReader(RasterReader):
    """One raster of a tile store. A box within a stored context is read from it alone; any other is put together."""

    def __init__(self, path: str, bands: Sequence[int] | None = None, nodata: float | None = None) -> None:
        self._name = name = parse_store_name(path) or _only_image(path)
        with open_store(name.store) as file:
            self.info = load_info(file, name)
        _check_options(self.info, bands, nodata)
        tiling = self.info.tiling
        assert tiling is not None, "a store says how it was cut"
        self._tiles = tiling.tiles
        self._boxes = [tile.core if name.labels else tile.context for tile in tiling.tiles]
        self._rows = [box.row for box in self._boxes[:: tiling.grid[1]]]
        self._cols = [box.col for box in self._boxes[: tiling.grid[1]]]
        self._handles = HandlePool(path, lambda: open_store(name.store), lambda file: file.close())

    def _read(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        row = next((i for i, interval in enumerate(self._rows) if interval.contains(box.row)), None)
        col = next((j for j, interval in enumerate(self._cols) if interval.contains(box.col)), None)
        if row is None or col is None:
            return super()._read(box)
        return self._read_slot(row * len(self._cols) + col, box)

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        pixels_CHW = np.empty((self.info.bands, *box.shape), self.info.dtype)
        valid_HW = np.empty(box.shape, np.bool_)
        for tile in self._tiles:
            part = box.clip(tile.core)
            if part.area:
                at = part.relative_to(box).slices
                pixels_CHW[:, *at], valid_HW[at] = self._read_slot(tile.index, part)
        return pixels_CHW, valid_HW

    def _read_slot(self, index: int, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        """Return pixels and validity of a box within slot `index`."""
        at = box.relative_to(self._boxes[index]).slices
        with self._handles.borrow() as file:
            pixels, invalid = slots(file, self._name)
            pixels_CHW = pixels[index, :, *at]
            valid_HW = invalid[index, *at] == 0 if self.info.has_mask else np.ones(box.shape, np.bool_)
        return pixels_CHW, valid_HW

    def release(self) -> None:
        self._handles.release()

    def close(self) -> None:
        self._handles.close()


def _only_image(path: str) -> StoreName:
    names = store_images(path)
    if len(names) != 1:
        raise RasterError(f"{path} holds {len(names)} images; name one of them, such as {path}#0")
    return names[0]


def _check_options(info: RasterInfo, bands: Sequence[int] | None, nodata: float | None) -> None:
    """Raise RasterError for other bands or another nodata value than the store was cut with."""
    if bands is not None and tuple(bands) != info.band_numbers:
        raise RasterError(
            f"data.bands is {list(bands)} but {info.path} was cut with bands {list(info.band_numbers)}; "
            "leave data.bands out, or cut the store again with --bands"
        )
    both_nan = nodata != nodata and info.nodata != info.nodata
    if nodata is not None and nodata != info.nodata and not both_nan:
        raise RasterError(
            f"data.nodata is {nodata} but {info.path} was cut with {info.nodata}; leave data.nodata out, or cut the "
            "store again with --nodata"
        )
