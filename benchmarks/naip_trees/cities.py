"""The files of two cities, which pixels of the first are held out, and the score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray

from tiledseg.geometry.box import Box
from tiledseg.raster.samples.content import SplitPart, split_images

LEARNT, OTHER = "santa_monica_2020", "long_beach_2020"
BANDS = (1, 2, 3, 4)
TREES = 1


def image_of(data: Path, city: str) -> Path:
    return data / f"{city}_image.tif"


def labels_of(data: Path, city: str) -> Path:
    return data / f"{city}_trees.tif"


def missing(data: Path) -> list[str]:
    """The names of the files that `data` lacks."""
    files = [path for city in (LEARNT, OTHER) for path in (image_of(data, city), labels_of(data, city))]
    return [path.name for path in files if not path.is_file()]


def parts_of(told: dict[str, Any], shape: tuple[int, int]) -> tuple[SplitPart, SplitPart]:
    """(trained on, held out) of an image of `shape`, as `tiledseg train` cuts it by a group `data`."""
    split = told["split"]
    rows, cols = split["blocks"]
    share, seed = split.get("share", 0.2), split.get("seed", 0)
    (trained,), (held_out,) = split_images([shape], (rows, cols), split["gap"], share, seed)
    return trained, held_out


def counted(told: dict[str, Any], city: str, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """The pixels that a score is of: in the city that is learnt from the held-out blocks, in the other one all."""
    return parts_of(told, shape)[1].inside(Box.of_shape(shape)) if city == LEARNT else np.ones(shape, np.bool_)


def one_band(path: Path) -> NDArray[np.uint8]:
    """A class map, or labels, (height, width)."""
    with rasterio.open(path) as file:
        pixels_HW: NDArray[np.uint8] = file.read(1)
    return pixels_HW


def iou(found: NDArray[np.uint8], labels: NDArray[np.uint8]) -> float:
    """Of trees, over pixels of the same places."""
    seen, there = found == TREES, labels == TREES
    return float(np.sum(seen & there) / np.sum(seen | there))
