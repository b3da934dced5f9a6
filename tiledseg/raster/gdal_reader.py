"""Rasters that GDAL reads: GeoTIFF, COG, JPEG 2000, PNG, JPEG, local or at a URL, through rasterio.

GDAL's own environment variables (AWS_ACCESS_KEY_ID, AWS_NO_SIGN_REQUEST, GDAL_HTTP_MAX_RETRY, ...) apply to URLs.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import rasterio
from affine import Affine
from numpy.typing import NDArray
from rasterio.enums import ColorInterp, MaskFlags
from rasterio.errors import NotGeoreferencedWarning, RasterioError
from rasterio.io import DatasetReader
from rasterio.session import DummySession
from rasterio.windows import Window

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.gdal_open import DRIVERS, names_beside, open_dataset, settings
from tiledseg.raster.info import RasterInfo, checked_crs, ground_of
from tiledseg.raster.mirrored_reader import HandlePool, RasterReader, as_stored, memory_bytes, reading
from tiledseg.raster.remote import gdal_path, is_named, is_remote
from tiledseg.system.files import irregular_kind

# A raster may have no georeferencing. A process-wide filter, because `catch_warnings` is not safe with threads.
warnings.filterwarnings("ignore", category=NotGeoreferencedWarning)

MOST_PIXELS = 1 << 40
"""Most pixels of a raster: a million squared. A header that says more is damaged, or made to exhaust the memory."""

MOST_BANDS = 4096
"""Most bands read without a selection: ten times those of any spectrometer. A damaged header may say more."""

_CLASS_TAG = re.compile(r"CLASS_(\d{1,9})")


class GdalReader(RasterReader):
    """One raster through GDAL. See `reader.open_raster` for the arguments and errors."""

    def __init__(
        self, path: str, bands: Sequence[int] | None = None, nodata: float | None = None, references: bool = False
    ) -> None:
        self._handles = HandlePool(lambda: open_dataset(path, references))
        self.held = (self._handles,)
        with ExitStack() as failed, reading(f"open {path}"), self._handle() as dataset:
            failed.callback(self.release)
            if dataset.count == 0:
                inner = ", ".join(dataset.subdatasets[:3]) or "none found"
                raise RasterError(f"{path} has 0 bands (a container of several rasters?); give one of: {inner}")
            dtypes = dataset.dtypes  # read once: the property asks each band, of which there may be 65,535
            check_size(path, dataset.shape, dataset.block_shapes[0], dtypes[0], dataset.transform)
            alpha = [i for i, colour in enumerate(dataset.colorinterp, start=1) if colour == ColorInterp.alpha]
            selected, dtype, self.nodata = choose_bands(path, dtypes, dataset.nodatavals, bands, nodata, alpha)
            check_complete(path, dataset)
            # A selected alpha band is data: many 4-band files mark near-infrared as alpha by mistake.
            self._alpha = alpha[0] if alpha and alpha[0] not in selected else None
            flags = dataset.mask_flag_enums[0]
            self._masked = MaskFlags.per_dataset in flags and MaskFlags.alpha not in flags
            has_nodata = any(as_stored(value, np.dtype(dtype)) is not None for value in self.nodata)
            palette, class_names, referring = None, [], ""
            notes: tuple[str, ...] = ()
            if len(selected) == 1 and dataset.colorinterp[0] == ColorInterp.palette:
                palette = tuple(sorted(dataset.colormap(1).items()))
            for key, name in dataset.tags(1).items() if len(selected) == 1 else ():
                match = _CLASS_TAG.fullmatch(key)  # written by maps and synthetic labels
                if match and name.isprintable() and 0 < len(name) <= 100:
                    class_names.append((int(match[1]), name))
            if self._alpha is not None:
                every = ",".join(map(str, dataset.indexes))
                notes = (
                    f"{path}: band {self._alpha} is marked as alpha and is read as validity, not as data; if it is "
                    f"data (near-infrared, say), name it: data.bands [{every}]",
                )
            if dataset.driver not in DRIVERS:
                others = [name for name in dataset.files if name != gdal_path(path)]
                named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
                about = "may read further files and URLs, as allowed"
                referring = f"{path} is a {dataset.driver} and {about}: {named or 'none by name'}"
            self.info = RasterInfo(
                path=path,
                height=dataset.height,
                width=dataset.width,
                bands=len(selected),
                dtype=dtype,
                crs=checked_crs(path, dataset.crs),
                transform=dataset.transform,
                nodata=self.nodata[0],
                block_shape=dataset.block_shapes[selected[0] - 1],
                has_mask=bool(self._alpha) or self._masked or has_nodata or dtype.startswith("float"),
                band_numbers=selected,
                driver=dataset.driver,
                palette=palette,
                files=source_files(path, dataset),
                notes=notes,
                ground=ground_of(path, dataset),
                references=referring,
                class_names=tuple(sorted(class_names)),
                size=os.path.getsize(path) if os.path.isfile(path) else 0,
            )
            failed.pop_all()

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        window = Window(box.col.start, box.row.start, box.width, box.height)
        bands = [*self.info.band_numbers, *([self._alpha] if self._alpha else [])]
        mask_HW = np.ones(box.shape, np.bool_)
        with self._handle() as dataset:
            pixels_CHW = dataset.read(bands, window=window, out_dtype=self.info.dtype)
            if self._masked:
                mask_HW = dataset.read_masks(1, window=window) != 0
        if self._alpha:
            return pixels_CHW[:-1], mask_HW & (pixels_CHW[-1] != 0)
        return pixels_CHW, mask_HW

    @contextmanager
    def _handle(self) -> Iterator[Any]:
        """Yield a rasterio handle for this thread alone, with GDAL's settings in force."""
        with rasterio.Env(session=DummySession(), **settings()), self._handles.borrow() as dataset:
            yield dataset


def check_size(path: str, shape: tuple[int, int], block: tuple[int, int], dtype: str, transform: Affine) -> None:
    """Raise RasterError for an impossible size or transform, and for blocks larger than the memory."""
    height, width = shape
    if width * height > MOST_PIXELS:
        raise RasterError(
            f"{path} says that it is {height} x {width} px, of at most {MOST_PIXELS} in all; its header may be "
            "damaged: copy it again, or cut the raster into several"
        )
    rows, cols = block
    needed = rows * cols * np.dtype(dtype).itemsize
    if needed > memory_bytes():
        raise RasterError(
            f"{path} is stored in blocks of {rows} x {cols} px, which take {needed / 2**30:.3g} GiB each, this machine "
            f"has {memory_bytes() / 2**30:.3g} GiB; rewrite it in small blocks (gdal_translate -co TILED=YES)"
        )
    if not all(map(math.isfinite, transform)):
        numbers = ", ".join(f"{number:.10g}" for number in tuple(transform)[:6])
        raise RasterError(
            f"{path} has the transform ({numbers}), which is no place on the ground; set it to six finite numbers "
            "(gdal_edit.py -a_ullr)"
        )


def choose_bands(
    path: str,
    dtypes: Sequence[str],
    stated: Sequence[float | None],
    bands: Sequence[int] | None,
    nodata: float | None,
    alpha: Sequence[int] = (),
) -> tuple[tuple[int, ...], str, tuple[float | None, ...]]:
    """Return the numbers of the bands to read (the user's, or all but `alpha`), their dtype, and the nodata value of
    each (the user's, else the `stated` one). Raises RasterError for unknown bands, several dtypes, and pixels that are
    no real numbers."""
    if bands is None:
        bands = [number for number in range(1, len(dtypes) + 1) if number not in alpha]
        if not bands:
            raise RasterError(f"{path} has an alpha band only; name it in data.bands to read it as data")
        if len(bands) > MOST_BANDS:
            raise RasterError(
                f"{path} has {len(bands)} bands, of at most {MOST_BANDS} read at once; its header may be damaged: copy "
                "it again, or select bands with data.bands"
            )
    outside = [band for band in bands if not 1 <= band <= len(dtypes)]
    if outside or len(bands) == 0:
        what = f"band {outside[0]}" if outside else "an empty list of bands"
        raise RasterError(f"data.bands asks for {what}, but {path} has bands 1 to {len(dtypes)}; give some of these")
    if len(set(bands)) < len(bands):
        raise RasterError(f"data.bands {list(bands)} names a band twice; name each once")
    names = [dtypes[band - 1] for band in bands]
    dtype = np.dtype(names[0])
    if any(np.dtype(name) != dtype for name in names):
        raise RasterError(f"{path} mixes dtypes {', '.join(names)}; select bands of one dtype with data.bands")
    if dtype.kind not in "iuf":
        raise RasterError(f"{path} holds {dtype} pixels; integers or real floating-point numbers are needed")
    if nodata is not None and dtype.kind in "iu" and as_stored(nodata, dtype) is None:
        raise RasterError(f"data.nodata is {nodata}, which {dtype} pixels of {path} cannot hold; give one they can")
    return tuple(bands), dtype.name, tuple(stated[band - 1] if nodata is None else nodata for band in bands)


_MOST_BLOCKS = 1 << 16  # looked up one by one at about 5 microseconds each
_PNG_END = b"IEND\xaeB`\x82"


def source_files(path: str, dataset: Any) -> tuple[str, ...]:
    """Return the local files of an open `dataset`: its own, its companions, and a VRT's sources at any depth."""
    if is_remote(path):
        return ()
    if dataset.driver in DRIVERS and not is_named(path):
        return (path, *filter(os.path.isfile, names_beside(path)))
    files = dict.fromkeys([path, *dataset.files] if os.path.exists(path) else dataset.files)
    waiting = [file for file in files if file != path] if dataset.driver == "VRT" else []
    while waiting:  # GDAL lists the sources of the outermost VRT only
        each = waiting.pop()
        if not os.path.isfile(each) or irregular_kind(each) is not None:
            continue
        with suppress(RasterioError), DatasetReader(each, driver=["VRT"], sharing=False) as inner:
            new = [file for file in inner.files if file not in files]
            files |= dict.fromkeys(new)
            waiting += new
    return tuple(files)


def check_complete(path: str, dataset: Any) -> None:
    """Raise RasterError for a truncated local file: a TIFF with blocks past its end, or with uncompressed blocks that
    are too short, or a PNG without its last chunk.

    If there are more than 65536 blocks, the last ones are checked. Other formats and URLs raise errors when they are
    read. GDAL does not notice a short uncompressed block: it takes the bytes after the block for pixels.
    """
    if is_remote(path) or not os.path.isfile(path):
        return
    size = os.path.getsize(path)
    if dataset.driver == "PNG":
        with open(path, "rb") as file:
            file.seek(max(0, size - 4096))
            if _PNG_END not in file.read():
                raise RasterError(f"{path} is truncated: a PNG of {size} bytes without its end; copy it again")
    if dataset.driver != "GTiff":
        return
    structure = dataset.tags(ns="IMAGE_STRUCTURE")
    packed = "NBITS" in dataset.tags(1, ns="IMAGE_STRUCTURE")
    plain = "COMPRESSION" not in structure and "SOURCE_COLOR_SPACE" not in structure and not packed
    for end, length, needed in _blocks(dataset, structure.get("INTERLEAVE") == "BAND"):
        if end > size:
            raise RasterError(f"{path} is truncated: it has {size} bytes of at least {end}; copy it again")
        if plain and length < needed:
            rows, cols = dataset.block_shapes[0]
            raise RasterError(
                f"{path} has {length} bytes for a block of {rows} x {cols} px, whose pixels take {needed}; its header "
                "is damaged: copy it again"
            )


def _blocks(dataset: Any, by_band: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (end in the file, bytes in the file, bytes of the pixels inside the image) of each block. Blocks that are
    not in the file are skipped."""
    rows, cols = dataset.block_shapes[0]
    down, across = -(-dataset.height // rows), -(-dataset.width // cols)
    bands = dataset.indexes if by_band else (1,)
    pixel_bytes = np.dtype(dataset.dtypes[0]).itemsize * (1 if by_band else dataset.count)
    for band in bands:
        for block in range(max(0, down * across - max(1, _MOST_BLOCKS // len(bands))), down * across):
            row, col = divmod(block, across)
            offset, length = (
                int(dataset.get_tag_item(f"BLOCK_{what}_{col}_{row}", "TIFF", bidx=band) or 0)
                for what in ("OFFSET", "SIZE")
            )
            if offset and length:
                # A last strip may end with the image. Pixels of a tile outside the image are never read.
                yield offset + length, length, min(rows, dataset.height - row * rows) * cols * pixel_bytes
