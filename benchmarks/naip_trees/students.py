"""Students: networks that see the imagery of the other city too, with labels that a row's runs, their teachers, make.

Such a label is a tree where the mean of the teachers' probabilities, by own light, is above one half. The labels that
the city has are never read. Both cities are normalised by their own light, as the other one is when it is mapped.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import rasterio

from benchmarks.launching import NotRunnableError
from benchmarks.naip_trees.anchor import normalised, read
from benchmarks.naip_trees.cities import BANDS, LEARNT, OTHER, TREES, image_of, labels_of
from benchmarks.naip_trees.maps import OWN_LIGHT, map_city
from benchmarks.naip_trees.rows import Settings, merged
from benchmarks.naip_trees.runs import Place


def student(row: str) -> str:
    """The name of a row's students."""
    return f"{row}-student"


def taught(place: Place, row: str, settings: Settings) -> Settings:
    """The configuration of a row's students; the files that it names are made unless they are there. Raises
    NotRunnableError without a teacher."""
    folder = place.out / f"{row}-lessons"
    folder.mkdir(parents=True, exist_ok=True)
    images = [folder / f"{city}_image.tif" for city in (LEARNT, OTHER)]
    for city, path in zip((LEARNT, OTHER), images, strict=True):
        if not path.exists():
            _in_own_light(image_of(place.data, city), path)
    labels = folder / f"{OTHER}_trees.tif"
    if not labels.exists():
        _label(place, row, folder, labels)
    files = {"images": list(map(str, images)), "labels": [str(labels_of(place.data, LEARNT)), str(labels)]}
    return merged(settings, {"data": {**files, "split": None, "split_gap": None}})


def _in_own_light(source: Path, path: Path) -> None:
    pixels_CHW = read(source)
    means, deviations = ([float(of(band)) for band in pixels_CHW] for of in (np.mean, np.std))
    with rasterio.open(source) as file:
        profile = {key: file.profile[key] for key in ("driver", "height", "width", "crs", "transform")}
    with rasterio.open(path, "w", **profile, count=len(BANDS), dtype="float32") as made:
        made.write(normalised(pixels_CHW, means, deviations))


def _label(place: Place, row: str, folder: Path, path: Path) -> None:
    teachers = [file.parent for file in sorted(place.out.glob(f"{row}/*/result.json"))]
    if not teachers:
        raise NotRunnableError(f"row {row} has no run in {place.out}; train it first: --rows {row}")
    found = []
    for number, teacher in enumerate(teachers):
        shares = folder / f"shares_{number}.tif"
        map_city(place, teacher, OTHER, folder / f"map_{number}.tif", OWN_LIGHT, "--probabilities", str(shares))
        with rasterio.open(shares) as file:
            found.append(file.read(1 + TREES))
            profile = {key: file.profile[key] for key in ("driver", "height", "width", "crs", "transform")}
    trees_HW = np.mean(found, 0) > 0.5
    with rasterio.open(path, "w", **profile, count=1, dtype="uint8") as made:
        made.write(trees_HW.astype(np.uint8), 1)
