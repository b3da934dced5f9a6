"""`tiledseg evaluate --prediction classes.tif --labels b.tif`: scores of a class map."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.evaluate")

import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from tiledseg.commands.options import add_keys, config_of, parse
from tiledseg.commands.parser import Parser, add_format_option, run, warn
from tiledseg.errors import ConfigError, RasterError, install
from tiledseg.execution.scores import Scores, scores
from tiledseg.inference.evaluation import (
    check_names,
    class_numbers,
    compare,
    open_labels,
    shown_classes,
    write_comparison,
)
from tiledseg.planning.answer.text import columns
from tiledseg.raster.info import reference_notes
from tiledseg.raster.labels.classes import read_classes
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.labels.pair_reading import LabelReading, check_used
from tiledseg.raster.reader import open_raster
from tiledseg.reporting.page import can_draw
from tiledseg.system.console import answer
from tiledseg.system.outputs import check_ending, check_outputs, whole


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser(prog="tiledseg evaluate", description="Score a class map against its labels.")
    parser.add_argument(
        "--prediction", type=str, required=True, help="raster of class numbers; its nodata does not count"
    )
    parser.add_argument(
        "--labels",
        type=str,
        required=True,
        help="raster of labels on the same grid, whose nodata does not count; or polygons",
    )
    parser.add_argument("--image", type=str, help="raster to show beside the map with --plot")
    parser.add_argument("--plot", type=str, help="PNG to write: image, labels and prediction side by side")
    add_keys(parser, PLAIN, plain=True, classes=_CLASSES, warp="bring labels of another grid to the map's")
    add_format_option(parser)
    return parser


PLAIN = tuple(
    f"data.{key}"
    for key in ("label_layer", "label_attribute", "background", "warp", "classes", "ignore_index", "references")
)
"""Keys of a run's configuration that an evaluation has too, under flags without their group."""
_CLASSES = "as data.classes of train (default: the labels are class numbers, counted in the data)"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the scores; the exit code (0; 2 for bad input)."""
    return run(lambda: _evaluate(parse(build_parser(), sys.argv[1:] if argv is None else argv)))


def _evaluate(options: Namespace) -> None:
    matrix, result, names = evaluated(options, warn)
    if result.pixels == 0:
        raise RasterError(
            f"no pixel is valid in both {options.prediction} and {options.labels}; compare their nodata values and "
            "--ignore-index"
        )
    if options.format == "table":
        answer(as_table(matrix, result, names))
        return
    found = {
        "prediction": options.prediction,
        "labels": options.labels,
        "classes": len(matrix),
        "class_names": names,
        "ignore_index": config_of(options, PLAIN).data.ignore_index,
        **result.to_json(),  # null where a class has no score
        "confusion_matrix": matrix.tolist(),
    }
    answer(json.dumps(found, indent=1, allow_nan=False))


def evaluated(options: Namespace, warn: Callable[[Iterable[str]], None]) -> tuple[NDArray[np.int64], Scores, list[str]]:
    """Return the confusion matrix, the scores and the names of the classes; write the picture."""
    if options.image is not None and options.plot is None:
        raise ConfigError("--image is only for --plot; add --plot FILE.png, or leave it out")
    if options.plot is not None and not can_draw():
        raise ConfigError(f"--plot needs Pillow: {install('plot')}")
    data, label_map = config_of(options, PLAIN, "(see tiledseg evaluate --help)").data, None
    ignored, references = data.ignore_index, data.references
    if vars(options)["data.classes"] is not None:
        label_map = LabelMap.from_config(read_classes(data.classes, "--classes"), ignored)
    more = references, data.label_layer, data.label_attribute, data.background, data.warp
    reading = LabelReading(label_map, *more, key="--{}")
    check_used(reading, [options.labels])
    with ExitStack() as stack:
        prediction = stack.enter_context(open_raster(options.prediction, references=references))
        labels = stack.enter_context(open_labels(reading, options.labels, prediction.info))
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
        warn(check_names(label_map or class_numbers(ignored), labels.info, prediction.info))
        matrix = compare(prediction, labels, label_map, ignored)
        result = scores(matrix)
        classes = shown_classes(label_map, len(matrix), labels.info, prediction.info)
        if options.plot is not None and result.pixels:
            shown_map = label_map or LabelMap.from_config(len(matrix), ignored)
            title = f"prediction: mean IoU {_percent(result.mean_iou)}"
            write_comparison(options.plot, image, labels, prediction, shown_map, classes, title)
    return matrix, result, [record.name for record in classes]


def as_table(matrix: NDArray[np.int64], result: Scores, names: Sequence[str]) -> str:
    """Return scores and confusion matrix for people, in percent; `-` where a class has no score."""
    head = ["class", "pixels", "IoU", "F1", "precision", "recall"]
    rows = [
        [
            names[k],
            f"{int(matrix[k].sum())}",
            *map(_percent, (result.iou[k], result.f1[k], result.precision[k], result.recall[k])),
        ]
        for k in range(len(matrix))
    ]
    rows.append(["mean", f"{result.pixels}", _percent(result.mean_iou), _percent(result.mean_f1), "", ""])
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    confusion = [["true class", *(f"as {name}" for name in names)]]
    confusion += [[names[k], *map(_percent, shares[k].tolist())] for k in range(len(matrix))]
    return "\n".join(
        [
            f"pixel accuracy {_percent(result.accuracy)}, mean IoU {_percent(result.mean_iou)} "
            f"over {result.pixels} pixels",
            "",
            columns([head, *rows]),
            "",
            "confusion: of the pixels of each true class, the share mapped as",
            columns(confusion),
        ]
    )


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"
