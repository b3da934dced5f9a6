"""A class map against its labels, block by block in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tiledseg.execution.scores.metrics import confusion_matrix
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import LabelMap, check_grids_match, read_labels
from tiledseg.raster.labels.label_sources import LabelReading
from tiledseg.raster.labels.polygon_reader import PolygonReader, check_any
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.prefetch import prefetch

_BLOCK = 1024, 2048
THREADS = 2


def compare(
    prediction: RasterReader, labels: RasterReader, label_map: LabelMap | None, ignore_index: int = 255
) -> NDArray[np.int64]:
    """Confusion matrix (K, K), int64, rows truth, columns prediction, over the pixels valid in both rasters.

    `label_map` turns the labels' raw values into classes; the prediction holds class numbers. Without one, labels hold
    class numbers below `ignore_index` too, and K is one more than the largest that either raster holds (at least 2).
    Raises RasterError where the grids differ, LabelError for a value outside the classes.
    """
    check_grids_match(prediction.info, labels.info)
    truth_map = (label_map or class_numbers(ignore_index)).resolve(labels.info)
    class_map = LabelMap.from_config(truth_map.count, ignore_index).resolve(prediction.info)

    def count(box: Box) -> NDArray[np.int64]:
        truth_HW = read_labels(labels, truth_map, box)
        prediction_HW = read_labels(prediction, class_map, box)
        return confusion_matrix(truth_HW, prediction_HW, truth_map.count, ignore_index)

    matrix = np.zeros((truth_map.count, truth_map.count), np.int64)
    for part in prefetch(_blocks(prediction.info, labels.info), count, threads=THREADS, depth=2 * THREADS):
        matrix += part
    if label_map is not None:
        return matrix
    used = np.flatnonzero(matrix.any(axis=0) | matrix.any(axis=1))
    classes = max(int(used[-1]) + 1, 2) if used.size else 2
    return matrix[:classes, :classes]


def class_numbers(ignore_index: int) -> LabelMap:
    """Of labels that hold class numbers below `ignore_index`. Raises ConfigError."""
    return LabelMap.from_config(max(ignore_index, 2) if ignore_index <= 255 else 2, ignore_index)


def open_labels(reading: LabelReading, path: str, prediction: RasterInfo) -> RasterReader:
    """Labels of a map: a raster on its grid, or polygons, of which at least one is in it."""
    labels = reading.open(path, prediction)
    if isinstance(labels, PolygonReader):
        check_any([path], [labels.count])
    return labels


def _blocks(*infos: RasterInfo) -> Iterator[Box]:
    height, width = _BLOCK
    if any(info.sequential or info.block_shape[1] >= info.width for info in infos):
        height, width = max(height * width // infos[0].width, 1), infos[0].width  # whole rows: each is decoded once
    return Box.of_shape(infos[0].shape).blocks(height, width)


def thumbnail(reader: RasterReader, side: int = 1024) -> tuple[NDArray, NDArray[np.bool_]]:
    """Every k-th pixel, the largest picture of at most `side` pixels a side: pixels (C, h, w) and validity (h, w)."""
    info = reader.info
    step = -(-max(info.shape) // side)
    pixels_CHW = np.zeros((info.bands, *(-(-size // step) for size in info.shape)), info.dtype)
    valid_HW = np.zeros(pixels_CHW.shape[1:], bool)
    for box in _blocks(info):
        rows, cols = (slice(-side.start % step, None, step) for side in (box.row, box.col))
        block_CHW, block_valid_HW = reader.read(box)
        part_CHW = block_CHW[:, rows, cols]
        first = tuple(-(-side.start // step) for side in (box.row, box.col))
        place = tuple(slice(start, start + n) for start, n in zip(first, part_CHW.shape[1:], strict=True))
        pixels_CHW[(slice(None), *place)] = part_CHW
        valid_HW[place] = block_valid_HW[rows, cols]
    return pixels_CHW, valid_HW
