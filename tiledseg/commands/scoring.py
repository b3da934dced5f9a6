"""Scores of a class map against its labels, as values, a table and a picture."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiledseg.commands.options import config_of
from tiledseg.errors import ConfigError, LabelError, require
from tiledseg.execution.scores import Scores, confusion_matrix, scores
from tiledseg.geometry.box import Box
from tiledseg.planning.answer.text import WIDTH, columns
from tiledseg.raster.info import RasterInfo, check_grids_match, reference_notes
from tiledseg.raster.labels.classes import ClassRecord, default_classes, read_classes
from tiledseg.raster.labels.label_map import LabelMap, read_labels
from tiledseg.raster.labels.pair_reading import PairReading, check_any_polygon
from tiledseg.raster.mirrored_reader import RasterReader, prefetch
from tiledseg.raster.reader import open_raster
from tiledseg.raster.remote import is_vector
from tiledseg.reporting.page import as_picture, class_picture, draw_panel, percent, write_panel
from tiledseg.system.outputs import check_ending, check_outputs, whole

_BLOCK = 1024, 2048
_SIDE = 1024  # of a picture, pixels
_THREADS = 2


def evaluated(options: Namespace, warn: Callable[[Iterable[str]], None]) -> tuple[NDArray[np.int64], Scores, list[str]]:
    """Return the confusion matrix, the scores and the names of the classes; write the picture."""
    if options.image is not None and options.plot is None:
        raise ConfigError("--image is only for --plot; add --plot FILE.png, or leave it out")
    if options.plot is not None:
        require("--plot", "plot", "PIL")
    data, label_map = config_of(options).data, None
    ignored, references = data.ignore_index, data.references
    if vars(options)["data.classes"] is not None:
        label_map = LabelMap.from_config(read_classes(data.classes), ignored)
    reading = PairReading(label_map, **data.reading)
    reading.check_used([options.labels])
    with ExitStack() as stack:
        prediction = stack.enter_context(open_raster(options.prediction, references=references))
        labels = stack.enter_context(reading.open_labels(options.labels, prediction.info))
        if is_vector(options.labels):
            check_any_polygon([options.labels], [labels.count])  # type: ignore[attr-defined]
        image = None
        if options.image is not None:
            image = stack.enter_context(open_raster(options.image, references=references))
        readers = [reader for reader in (prediction, labels, image) if reader is not None]
        warn(reference_notes(reader.info for reader in readers))
        if options.plot is not None:
            check_outputs(
                [whole("--plot", options.plot)], [*options.config, *(file for r in readers for file in r.info.files)]
            )
            check_ending("--plot", options.plot, ".png")
        names, differing = _names(label_map or _class_numbers(ignored), labels.info, prediction.info)
        warn(differing)
        matrix = compare(prediction, labels, label_map, ignored)
        result = scores(matrix)
        classes = _shown_classes(label_map or LabelMap.from_config(len(matrix)), len(matrix), names, prediction.info)
        if options.plot is not None and result.pixels:
            shown_map = label_map or LabelMap.from_config(len(matrix), ignored)
            title = f"prediction: mean IoU {percent(result.mean_iou)}"
            _write_comparison(options.plot, image, labels, prediction, shown_map, classes, title)
    return matrix, result, [record.name for record in classes]


def as_table(matrix: NDArray[np.int64], result: Scores, names: Sequence[str]) -> str:
    """Return scores and confusion matrix as text of 80 columns, in percent; `-` for a class without a score."""
    names = [name if len(name) <= 24 else f"{name[:11]}..{name[-11:]}" for name in names]
    head = ["class", "pixels", "IoU", "F1", "precision", "recall"]
    rows = [
        [
            names[k],
            f"{int(matrix[k].sum())}",
            *map(percent, (result.iou[k], result.f1[k], result.precision[k], result.recall[k])),
        ]
        for k in range(len(matrix))
    ]
    rows.append(["mean", f"{result.pixels}", percent(result.mean_iou), percent(result.mean_f1), "", ""])
    shares, most = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1), int(matrix.sum(axis=1).argmax())
    alone = np.zeros_like(matrix)
    alone[:, most] = matrix.sum(axis=1)
    plain = scores(alone)
    confusion = [["true class", *(f"as {name}" for name in names)]]
    confusion += [[names[k], *map(percent, shares[k].tolist())] for k in range(len(matrix))]
    if max(map(len, columns(confusion).splitlines())) > WIDTH:  # too wide: show the most frequent wrong class only
        wrong = shares - np.diag(np.diag(shares))
        confusion = [["true class", "right", "else most often", "share"]]
        for k, other in enumerate(wrong.argmax(1)):
            confusion.append([names[k], percent(shares[k, k]), names[other], percent(wrong[k, other])])
    return "\n".join(
        [
            f"pixel accuracy {percent(result.accuracy)}, mean IoU {percent(result.mean_iou)} "
            f"over {result.pixels} pixels",
            f"(a map of {names[most]} alone: {percent(plain.accuracy)}, {percent(plain.mean_iou)})",
            "",
            columns([head, *rows]),
            "",
            "confusion: of the pixels of each true class, the share mapped as",
            columns(confusion),
        ]
    )


def compare(
    prediction: RasterReader, labels: RasterReader, label_map: LabelMap | None, ignore_index: int = 255
) -> NDArray[np.int64]:
    """Return the confusion matrix (K, K), int64, rows truth, columns prediction, over the pixels valid in both rasters.

    `label_map` maps the labels' raw values to classes; the prediction holds class numbers. Without a map, labels hold
    class numbers below `ignore_index`, and K is one more than the largest number in either raster (at least 2). Raises
    RasterError if the grids differ, LabelError for a value outside the classes.
    """
    check_grids_match(prediction.info, labels.info)
    truth_map = (label_map or _class_numbers(ignore_index)).resolve(labels.info)
    class_map = LabelMap.from_config(truth_map.count, ignore_index).resolve(prediction.info)

    def count(box: Box) -> NDArray[np.int64]:
        truth_HW = read_labels(labels, truth_map, box)
        prediction_HW = read_labels(prediction, class_map, box)
        return confusion_matrix(truth_HW, prediction_HW, truth_map.count, ignore_index)

    matrix = np.zeros((truth_map.count, truth_map.count), np.int64)
    for part in prefetch(_blocks(prediction.info, labels.info), count, threads=_THREADS, depth=2 * _THREADS):
        matrix += part
    if label_map is not None:
        return matrix
    used = np.flatnonzero(matrix.any(axis=0) | matrix.any(axis=1))
    classes = max(int(used[-1]) + 1, 2) if used.size else 2
    return matrix[:classes, :classes]


def _class_numbers(ignore_index: int) -> LabelMap:
    """Return the label map of class numbers below `ignore_index`. Raises ConfigError."""
    return LabelMap.from_config(max(ignore_index, 2) if ignore_index <= 255 else 2, ignore_index)


def _blocks(*infos: RasterInfo) -> Iterator[Box]:
    height, width = _BLOCK
    if any(info.block_shape[1] >= info.width for info in infos):
        height, width = max(height * width // infos[0].width, 1), infos[0].width  # whole rows: decode each once
    return Box.of_shape(infos[0].shape).blocks(height, width)


def thumbnail(reader: RasterReader, side: int = _SIDE) -> tuple[NDArray, NDArray[np.bool_]]:
    """Return every k-th pixel, with the least k for at most `side` pixels a side: pixels (C, h, w), validity (h, w)."""
    info = reader.info
    step = -(-max(info.shape) // side)
    pixels_CHW = np.zeros((info.bands, *(-(-size // step) for size in info.shape)), info.dtype)
    valid_HW = np.zeros(pixels_CHW.shape[1:], bool)
    for box in _blocks(info):
        rows, cols = (slice(-interval.start % step, None, step) for interval in (box.row, box.col))
        block_CHW, block_valid_HW = reader.read(box)
        part_CHW = block_CHW[:, rows, cols]
        first = tuple(-(-interval.start // step) for interval in (box.row, box.col))
        place = tuple(slice(start, start + n) for start, n in zip(first, part_CHW.shape[1:], strict=True))
        pixels_CHW[(slice(None), *place)] = part_CHW
        valid_HW[place] = block_valid_HW[rows, cols]
    return pixels_CHW, valid_HW


def _names(label_map: LabelMap, labels: RasterInfo, prediction: RasterInfo) -> tuple[dict[int, str], list[str]]:
    """Return the names of classes: by `label_map`, else by the labels' file, else by the map's; and a warning if some
    have other names in the map. Raises LabelError if a name has another number there."""
    pairs = label_map.resolve(labels).pairs
    raws = Counter(k for _, k in pairs)
    by_raw = {raw: k for raw, k in pairs if raws[k] == 1 and k < label_map.count}
    defaults = {record.name for record in default_classes(label_map.count)}
    truth = {by_raw[raw]: name for raw, name in labels.class_names if raw in by_raw}
    truth |= {k: record.name for k, record in enumerate(label_map.classes) if record.name not in defaults}
    mapped = {k: name for k, name in prediction.class_names if name not in defaults}
    numbers = {name: k for k, name in mapped.items()}
    moved = [k for k, name in truth.items() if numbers.get(name, k) != k and name != mapped.get(k)]
    if moved:
        name = truth[moved[0]]
        raise LabelError(
            f"{prediction.path} holds class {name} as {numbers[name]}, but of {labels.path} it is {moved[0]}; give "
            "classes that map the labels' values to the numbers of the map"
        )
    others = [k for k, name in sorted(truth.items()) if mapped.get(k, name) != name]
    more = f", and so are {len(others) - 1} more" if len(others) > 1 else ""
    return mapped | truth, [
        f"class {first} is '{truth[first]}' of {labels.path} and '{mapped[first]}' of {prediction.path}{more}: scores "
        "compare numbers, whatever their names"
        for first in others[:1]
    ]


def _shown_classes(legend: LabelMap, count: int, names: dict[int, str], map_info: RasterInfo) -> list[ClassRecord]:
    """Return name and colour of each of `count` classes. A class without a colour of its own takes the map's."""
    palette = {number: colour[:3] for number, colour in map_info.palette or ()}
    defaults = [record.colour for record in default_classes(count)]
    return [
        ClassRecord(names.get(k, name), colour if colour != defaults[k] else palette.get(k, colour))
        for k, (name, colour) in enumerate(legend.classes[:count])
    ]


def _write_comparison(
    path: str | Path,
    image: RasterReader | None,
    labels: RasterReader,
    prediction: RasterReader,
    label_map: LabelMap,
    classes: Sequence[ClassRecord],
    title: str,
) -> None:
    """Write a PNG of the image (if given), the labels and the prediction under its `title`, about 1000 pixels a side
    each; `classes`: of `_shown_classes`. Raises RasterError if the image is on another grid, and WriteError."""
    if image is not None:
        check_grids_match(image.info, prediction.info)
    colours = [record.colour for record in classes]
    class_map = LabelMap.from_config(label_map.count, label_map.ignore_index)
    pictures = {} if image is None else {"image": as_picture(*thumbnail(image))}
    for name, reader, mapping in (("labels", labels, label_map), (title, prediction, class_map)):
        raw_CHW, valid_HW = thumbnail(reader)
        classes_HW = mapping.resolve(reader.info).apply(raw_CHW, valid_HW, path=reader.info.path)
        pictures[name] = class_picture(classes_HW, colours)
    times = max(1, _SIDE // max(prediction.info.shape))
    row = [picture.repeat(times, 0).repeat(times, 1) for picture in pictures.values()]
    legend = [(record.name, record.colour) for record in classes[:24]]
    write_panel(Path(path), draw_panel([row], list(pictures), legend))
