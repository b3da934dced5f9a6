"""A picture of image, labels and prediction side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from tiledseg.inference.class_names import shown_classes
from tiledseg.inference.evaluation import thumbnail
from tiledseg.raster.labels.classes import in_hex
from tiledseg.raster.labels.label_map import LabelMap, check_grids_match
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.reporting.pictures import as_picture, class_picture
from tiledseg.system.writing import replacing


def write_comparison(
    path: str | Path,
    image: RasterReader | None,
    labels: RasterReader,
    prediction: RasterReader,
    label_map: LabelMap,
    title: str,
) -> None:
    """Write a PNG of the image (if given), the labels and the prediction, thinned to about 1000 pixels a side.

    Names and colours of classes are those of `shown_classes`.
    Raises RasterError where the image is on another grid, WriteError, and what the readers raise.
    """
    panels: list[tuple[str, NDArray[np.uint8]]] = []
    if image is not None:
        check_grids_match(image.info, prediction.info)
        panels.append(("image", as_picture(*thumbnail(image))))
    classes = shown_classes(label_map, label_map.count, labels.info, prediction.info)
    colours = [record.colour for record in classes]
    class_map = LabelMap.from_config(label_map.count, label_map.ignore_index)
    for name, reader, mapping in (("labels", labels, label_map), ("prediction", prediction, class_map)):
        raw_CHW, valid_HW = thumbnail(reader)
        classes_HW = mapping.resolve(reader.info).apply(raw_CHW, valid_HW, path=reader.info.path)
        panels.append((name, class_picture(classes_HW, colours)))
    height, width = prediction.info.shape
    figure = Figure(
        figsize=(5 * len(panels), 5 * min(max(height / width, 0.4), 2.5) + 1), layout="constrained", dpi=110
    )
    FigureCanvasAgg(figure)
    for axes, (name, picture) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.imshow(picture, extent=(0, width, height, 0), interpolation="antialiased")
        axes.set(title=name, xlabel="column [px]", ylabel="row [px]")
    keys = [Patch(color=in_hex(record.colour), label=record.name) for record in classes[:24]]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(label_map.count, 8))
    figure.suptitle(title)
    with replacing(path) as part:
        figure.savefig(part, format="png")
