"""A synthetic scene as two files: the image and its labels, tiled GeoTIFFs, made window by window in bounded memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from affine import Affine
from numpy.typing import NDArray
from rasterio.io import DatasetWriter
from rasterio.windows import Window

from tiledseg.config.arguments import checked
from tiledseg.config.map_formats import BLOCK
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.raster.maps.libtiff_words import libtiff_errors
from tiledseg.synthetic.classes import CLASS_COLOURS, CLASSES, IGNORED
from tiledseg.synthetic.scene import BANDS, NODATA, Scene
from tiledseg.synthetic.warp import METRES
from tiledseg.system.outputs import check_outputs, whole
from tiledseg.system.signals import SIGNALS
from tiledseg.system.writing import replacing, write_error

WINDOW = (BLOCK, 2 * BLOCK)
"""Pixels made at once: whole blocks of the file."""

CRS = "EPSG:32632"
TRANSFORM = Affine(METRES, 0.0, 480000.0, 0.0, -METRES, 5420000.0)
_MAX_SIDE = 2_000_000
_MAX_WORKERS = 256

Windowed = tuple[Box, NDArray[np.uint8], NDArray[np.uint8]]


@checked
def write_scene(
    image: str | Path,
    labels: str | Path,
    size: tuple[int, int],
    bands: int = 4,
    seed: int = 0,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the scene of `seed`: `image` (uint8, nodata 0) and `labels` (uint8, nodata 255), size (height, width).

    The bytes depend on seed, size, bands and the compressors of the GDAL at hand, not on `workers` (processes).
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


def _write(paths: Sequence[Path], scene: Scene, workers: int, progress: Callable[[int], None] | None) -> None:
    with ExitStack() as stack:
        # A small cache of blocks, in a fixed order: bounded memory, and the same bytes everywhere.
        stack.enter_context(rasterio.Env(GDAL_CACHEMAX=64, GDAL_NUM_THREADS="1"))
        compress = best_compression()
        profiles = _profile(scene.size, scene.bands, compress), _profile(scene.size, None, compress)
        image, classes = stack.enter_context(_created(paths, profiles))
        image.descriptions = BANDS[scene.bands]
        classes.write_colormap(1, dict(enumerate(CLASS_COLOURS)))
        classes.update_tags(1, **{f"CLASS_{number}": name for number, name in enumerate(CLASSES)})
        windows = stack.enter_context(_windows(scene, workers))
        for box, image_CHW, classes_HW in windows:
            window = Window(box.col.start, box.row.start, box.width, box.height)
            with libtiff_errors():
                image.write(image_CHW, window=window)
                classes.write(classes_HW, 1, window=window)
            if progress:
                progress(box.area)


@contextlib.contextmanager
def _created(paths: Sequence[Path], profiles: Sequence[dict[str, Any]]) -> Iterator[list[DatasetWriter]]:
    """New files, closed at the end, which writes what they hold back."""
    files = [rasterio.open(path, "w", **profile) for path, profile in zip(paths, profiles, strict=True)]
    try:
        yield files
    finally:
        with libtiff_errors(), ExitStack() as closing:
            for file in files:
                closing.callback(file.close)


def _profile(size: tuple[int, int], bands: int | None, compress: str) -> dict[str, Any]:
    """Creation options of the image, or of the labels where `bands` is None."""
    profile = {
        "driver": "GTiff",
        "height": size[0],
        "width": size[1],
        "dtype": "uint8",
        "crs": CRS,
        "transform": TRANSFORM,
        "tiled": True,
        "blockxsize": BLOCK,
        "blockysize": BLOCK,
        "compress": compress,
        "bigtiff": "if_safer",
    }
    if bands is None:
        return {**profile, "count": 1, "nodata": IGNORED}
    colours = {"photometric": "rgb", "alpha": "no"} if bands >= 3 else {}
    return {**profile, **colours, "count": bands, "nodata": NODATA, "predictor": 2, "interleave": "pixel"}


def best_compression() -> str:
    """zstd where this GDAL has it, else deflate."""
    try:
        with rasterio.MemoryFile() as memory, memory.open(**_profile((16, 16), None, "zstd")) as dataset:
            dataset.write(np.zeros((1, 16, 16), np.uint8))
    except rasterio.errors.RasterioError:
        return "deflate"
    return "zstd"


@contextlib.contextmanager
def _windows(scene: Scene, workers: int) -> Iterator[Iterator[Windowed]]:
    """All windows in order, made here or by processes, each of which makes every `workers`-th."""
    boxes = list(Box.of_shape(scene.size).blocks(*WINDOW))
    workers = min(workers, len(boxes))
    if workers == 1:
        yield ((box, *scene.render(box)) for box in boxes)
        return
    context = multiprocessing.get_context("spawn")
    processes, ends = [], []
    try:
        for worker in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_make_windows,
                args=(theirs, (scene.seed, scene.size, scene.bands), boxes[worker::workers]),
                daemon=True,
            )
            _start_without_signals(process)
            theirs.close()
            processes.append(process)
            ends.append(ours)
        yield (_receive(ends[number % workers], box) for number, box in enumerate(boxes))
    finally:
        for process, end in zip(processes, ends, strict=True):
            process.kill()
            process.join()
            end.close()


def _start_without_signals(process: multiprocessing.process.BaseProcess) -> None:
    """A batch system signals every process of a job: the writer alone acts on it, and ends the others itself."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # which a new process takes over
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _make_windows(end: Connection, arguments: tuple[Any, ...], boxes: list[Box]) -> None:
    """What a process does. A full pipe holds it back, so that no more than a window each is ahead of the writer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the writer ends its processes itself
    scene = Scene(*arguments)
    with contextlib.suppress(BrokenPipeError):  # the writer is gone
        for box in boxes:
            end.send(scene.render(box))


def _receive(end: Connection, box: Box) -> Windowed:
    try:
        image_CHW, classes_HW = end.recv()
    except EOFError:
        raise RuntimeError(f"a process that made {box} has ended; look for its own message above") from None
    return box, image_CHW, classes_HW
