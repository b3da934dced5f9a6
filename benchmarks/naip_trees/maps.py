"""Maps of a city by the runs that are there, and the IoU of trees on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.naip_trees.cities import OTHER, counted, image_of, iou, labels_of, one_band
from benchmarks.naip_trees.runs import HELD_OUT_MAPS, OTHER_CITY, Place, call, read_result, write_result

AS_TRAINED, OWN_LIGHT = "as trained", "own light"
WAYS = {AS_TRAINED: ("training", "none"), OWN_LIGHT: ("image", "none")}
"""How a city is mapped: `predict --normalize`, and `--tta`."""


def score_all(place: Place, city: str) -> None:
    """Maps a city by every run that is there and has not, in each way, and keeps the scores with its result. A run that
    holds out no block of the city that it learns has no score there."""
    key = OTHER_CITY if city == OTHER else HELD_OUT_MAPS
    labels_HW = one_band(labels_of(place.data, city))
    for file in sorted(place.out.glob("*/*/result.json")):
        found = read_result(file.parent)
        told = yaml.safe_load((file.parent / "config.yaml").read_text())["data"]
        if key not in found and (city == OTHER or "split" in told):
            counted_HW = counted(told, city, labels_HW.shape)
            maps = _maps(place, file.parent, city)
            found[key] = {way: iou(map_HW[counted_HW], labels_HW[counted_HW]) for way, map_HW in maps.items()}
            write_result(file.parent, found)


def map_file(folder: Path, city: str, way: str) -> Path:
    return folder / f"map_{city}_{way.replace(',', '').replace(' ', '_')}.tif"


def _maps(place: Place, folder: Path, city: str) -> dict[str, NDArray[np.uint8]]:
    """Return a run's map in each way."""
    return {way: map_city(place, folder, city, map_file(folder, city, way), way) for way in WAYS}


def map_city(place: Place, folder: Path, city: str, target: Path, way: str, *more: str) -> NDArray[np.uint8]:
    """The class map of a city by a run, written to `target`; `more`: further words to `predict`."""
    normalize, tta = WAYS[way]
    words = ("--checkpoint", str(folder / "run"), "--image", str(image_of(place.data, city)), "--output", str(target))
    build = yaml.safe_load((folder / "config.yaml").read_text())["model"].get("build")
    words += ("--build", build) if build else ()
    call(place, "tiledseg.predict", *words, "--normalize", normalize, "--tta", tta, "--tiling.grid", "4", *more)
    return one_band(target)
