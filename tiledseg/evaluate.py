"""`tiledseg evaluate --prediction classes.tif --labels b.tif`: scores of a class map."""

from __future__ import annotations

from tiledseg.commands.entry import enter

if __name__ == "__main__":
    enter("tiledseg.evaluate")

import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.commands.options import add_keys, config_of, parse
from tiledseg.commands.parser import Parser, add_format_option, command, warn
from tiledseg.config.checks import checked
from tiledseg.errors import RasterError, renamed
from tiledseg.system.console import answer

if TYPE_CHECKING:
    from tiledseg.execution.scores import Scores


def build_parser() -> Parser:
    parser = Parser(
        "tiledseg evaluate",
        "--prediction map.tif --labels b.tif --plot map.png",
        description="Score a class map against its labels.",
    )
    parser.add_argument(
        "--prediction", type=str, required=True, help="raster of class numbers; its nodata does not count"
    )
    labels = "raster of labels on the same grid, whose nodata does not count; or polygons"
    parser.add_argument("--labels", type=str, required=True, help=labels)
    parser.add_argument("--image", type=str, help="raster to show beside the map with --plot")
    parser.add_argument("--plot", type=str, help="PNG to write: image, labels and prediction side by side")
    keys = "label_layer", "label_attribute", "background", "warp", "classes", "ignore_index", "references"
    plain, warp = [f"data.{key}" for key in keys], "bring labels of another grid to the map's"
    add_keys(parser, plain, plain=True, classes=_CLASSES, warp=warp)
    add_format_option(parser)
    return parser


_CLASSES = "as data.classes of train (default: the labels are class numbers, counted in the data)"


@command
def main(words: Sequence[str]) -> None:
    """Print the scores."""
    options = parse(build_parser(), words)
    from tiledseg.commands.scoring import as_table, evaluated  # here: --help does not wait for rasterio

    with renamed(options.flags):
        matrix, result, names = evaluated(options, warn)
    if result.pixels == 0:
        raise RasterError(
            f"no pixel is valid in both {options.prediction} and {options.labels}; compare their nodata values and "
            "--ignore-index"
        )
    if options.format == "table":
        answer(as_table(matrix, result, names))
        return
    values = {
        "prediction": options.prediction,
        "labels": options.labels,
        "classes": len(matrix),
        "class_names": names,
        "ignore_index": config_of(options).data.ignore_index,
        **result.to_json(),  # null where a class has no score
        "confusion_matrix": matrix.tolist(),
    }
    answer(json.dumps(values, indent=1, allow_nan=False))


@checked
def evaluate_map(prediction: str | Path, labels: str | Path, **flags: Any) -> Scores:
    """Return the scores of a class map against its labels, like `tiledseg evaluate`.

    `flags`: any other flag of the command, with `_` for `-`. `classes`: any form of `data.classes`, or a file of them;
    None: count class numbers in the data. Labels may be polygons, with `classes`; `label_layer`, `label_attribute`,
    `background` and `warp` are those of `data`. Raises RasterError if the grids differ, LabelError for a value outside
    the classes, and for a class whose name has another number in the other file or in `classes`. Different names of a
    class are a warning.
    """
    from tiledseg.commands.scoring import evaluated

    def warn(lines: Iterable[str]) -> None:
        for line in lines:
            warnings.warn(line, stacklevel=5)

    given = {**flags, "prediction": prediction, "labels": labels}
    return evaluated(parse(build_parser(), (), given), warn)[1]
