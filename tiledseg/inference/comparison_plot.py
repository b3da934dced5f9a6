"""A picture of image, labels and prediction side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from tiledseg.inference.class_names import shown_classes
from tiledseg.inference.evaluation import thumbnail
from tiledseg.raster.classes import ClassRecord
from tiledseg.raster.labels import LabelMap, check_grids_match
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.writing import replacing

_BLANK = (235, 235, 235)
"""Colour of pixels without data."""


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
        panels.append(("image", _as_picture(*thumbnail(image))))
    classes = shown_classes(label_map, label_map.count, labels.info, prediction.info)
    colours_K = _class_colours(classes)
    class_map = LabelMap.from_config(label_map.count, label_map.ignore_index)
    for name, reader, mapping in (("labels", labels, label_map), ("prediction", prediction, class_map)):
        raw_CHW, valid_HW = thumbnail(reader)
        classes_HW = mapping.resolve(reader.info).apply(raw_CHW, valid_HW, path=reader.info.path)
        panels.append((name, colours_K[classes_HW]))
    height, width = prediction.info.shape
    figure = Figure(
        figsize=(5 * len(panels), 5 * min(max(height / width, 0.4), 2.5) + 1), layout="constrained", dpi=110
    )
    FigureCanvasAgg(figure)
    for axes, (name, picture) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.imshow(picture, extent=(0, width, height, 0), interpolation="antialiased")
        axes.set(title=name, xlabel="column [px]", ylabel="row [px]")
    keys = [Patch(color=colours_K[k] / 255, label=record.name) for k, record in enumerate(classes[:24])]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(label_map.count, 8))
    figure.suptitle(title)
    with replacing(path) as part:
        figure.savefig(part, format="png")


def _as_picture(pixels_CHW: NDArray, valid_HW: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Red, green and blue (H, W, 3) of the first three bands, or grey of the first; stretched unless uint8."""
    bands_CHW = pixels_CHW[:3] if len(pixels_CHW) >= 3 else pixels_CHW[[0, 0, 0]]
    if bands_CHW.dtype != np.uint8 and valid_HW.any():
        values = bands_CHW[:, valid_HW].astype(np.float64)
        low, high = (np.percentile(values, q, axis=1)[:, None, None] for q in (2, 98))
        bands_CHW = np.clip((bands_CHW - low) / np.maximum(high - low, 1e-12), 0, 1) * 255
    picture = np.moveaxis(np.nan_to_num(bands_CHW), 0, -1).astype(np.uint8)
    picture[~valid_HW] = _BLANK
    return picture


def _class_colours(classes: Sequence[ClassRecord]) -> NDArray[np.uint8]:
    """Colour of every uint8 class number, (256, 3)."""
    colours = np.full((256, 3), _BLANK, np.uint8)
    colours[: len(classes)] = [record.colour for record in classes]
    return colours
