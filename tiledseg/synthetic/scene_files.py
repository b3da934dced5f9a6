"""A synthetic scene as two files: the image and its labels, tiled GeoTIFFs, made window by window in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from affine import Affine
from numpy.typing import NDArray
from rasterio.windows import Window

from tiledseg.config.checks import checked
from tiledseg.config.map_formats import BLOCK
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.raster.tiff_files import libtiff_errors
from tiledseg.synthetic.land import CLASS_COLOURS, CLASSES, IGNORED, METRES
from tiledseg.synthetic.scene import BANDS, NODATA, Scene
from tiledseg.system.outputs import check_outputs, whole
from tiledseg.system.writing import replacing, write_error

WINDOW = (BLOCK, BLOCK)
"""Pixels that a thread makes at a time: whole blocks of the file."""

CRS = "EPSG:32632"
TRANSFORM = Affine(METRES, 0.0, 480000.0, 0.0, -METRES, 5420000.0)
_MAX_SIDE = 2_000_000
_MAX_WORKERS = 256


@checked
def write_scene(
    image: str | Path,
    labels: str | Path,
    size: tuple[int, int],
    bands: int = 4,
    seed: int = 0,
    workers: int = 1,
    progress: Callable[[int], None] = lambda pixels: None,
) -> None:
    """Write the scene of `seed`: `image` (uint8, nodata 0) and `labels` (uint8, nodata 255), size (height, width).

    The bytes depend on seed, size, bands and the compressors of the GDAL at hand, not on `workers` (threads).
    Files that exist are replaced once both new ones are whole. `progress` is called with the pixels of each window.
    Raises ConfigError for a size, number of bands, seed or workers out of range, OutputError where a file cannot be
    written, WriteError where that shows on the way.
    """
    if max(size) > _MAX_SIDE or not 1 <= workers <= _MAX_WORKERS:
        raise ConfigError(
            f"size {size[0]} x {size[1]}, workers {workers}; give sides to {_MAX_SIDE}, workers from 1 to "
            f"{_MAX_WORKERS}"
        )
    scene = Scene(seed, size, bands)  # its errors before any work
    pixels = size[0] * size[1]  # compressed to a half of its bytes or so, and surely not to these
    check_outputs([whole("--image", image, pixels * bands // 8), whole("--labels", labels, pixels // 1000)])
    with replacing(image) as image_part, replacing(labels) as labels_part:
        try:
            _write((image_part, labels_part), scene, workers, progress)
        except (rasterio.errors.RasterioError, OSError) as error:
            raise write_error(f"{image} and {labels}", error) from error


def _write(paths: tuple[Path, Path], scene: Scene, workers: int, progress: Callable[[int], None]) -> None:
    profile = {"driver": "GTiff", "height": scene.size[0], "width": scene.size[1], "dtype": "uint8", "crs": CRS}
    profile |= {"transform": TRANSFORM, "tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK}
    profile |= {"compress": "zstd", "bigtiff": "if_safer"}
    colours = {"photometric": "rgb", "alpha": "no"} if scene.bands >= 3 else {}
    bands = {"count": scene.bands, "nodata": NODATA, "predictor": 2, "interleave": "pixel", **colours}
    # A small cache of blocks, in a fixed order: bounded memory, and the same bytes everywhere.
    with rasterio.Env(GDAL_CACHEMAX=64, GDAL_NUM_THREADS="1"), ExitStack() as files:
        image = rasterio.open(paths[0], "w", **profile, **bands)
        files.callback(_close, image)
        labels = rasterio.open(paths[1], "w", **profile, count=1, nodata=IGNORED)
        files.callback(_close, labels)
        image.descriptions = BANDS[scene.bands]
        labels.write_colormap(1, dict(enumerate(CLASS_COLOURS)))
        labels.update_tags(1, **{f"CLASS_{number}": name for number, name in enumerate(CLASSES)})
        for box, image_CHW, class_HW in _windows(scene, workers):
            window = Window(box.col.start, box.row.start, box.width, box.height)
            with libtiff_errors():
                image.write(image_CHW, window=window)
                labels.write(class_HW, 1, window=window)
            progress(box.area)


def _close(dataset: Any) -> None:
    with libtiff_errors():  # it writes what the file holds back
        dataset.close()


def _windows(scene: Scene, workers: int) -> Iterator[tuple[Box, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield all windows in order, as many at a time as there are threads."""
    boxes = list(Box.of_shape(scene.size).blocks(*WINDOW))
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(boxes), workers):
            part = boxes[start : start + workers]
            for box, (image_CHW, class_HW) in zip(part, pool.map(scene.render, part), strict=True):
                yield box, image_CHW, class_HW
