"""The rows of the table as configurations: `rows.yaml`, read and merged."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rasterio
import yaml

from tiledseg.errors import ConfigError

ROWS = Path(__file__).with_name("rows.yaml")
Settings = dict[str, Any]


def read_rows(path: Path = ROWS) -> dict[str, Settings]:
    """Each row's whole configuration, without the number of epochs, in the file's order. Raises ConfigError for a row
    that comes after one that is not above it."""
    told = yaml.safe_load(path.read_text())
    found: dict[str, Settings] = {}
    for name, changes in told["rows"].items():
        after = changes.pop("after", None)
        if after is not None and after not in found:
            raise ConfigError(f"row {name} of {path.name} is after {after}, which is not above it; name one above")
        found[name] = merged(found[after] if after else told["base"], changes)
    return found


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """`settings` with the keys of each group of `changes`; null takes a key away."""
    result = copy.deepcopy(dict(settings))
    for group, keys in changes.items():
        result[group] = {**result.get(group, {}), **keys}
        result[group] = {key: value for key, value in result[group].items() if value is not None}
    return result


def of_run(settings: Settings, data: Path, output: Path, steps: int, seed: int) -> Settings:
    """The configuration of one run: its files in `data` (a student's lie elsewhere, and stay as they are), whole epochs
    of about `steps` steps in all, its seed."""
    image, labels = (_in(data, settings["data"][key]) for key in ("images", "labels"))
    pixels = sum(map(_pixels, image if isinstance(image, list) else [image]))
    train = settings["train"]
    each = math.ceil(pixels / (train["windows"]["per_step"] * train["windows"]["size"] ** 2))
    epochs = max(1, round(steps / each))
    return merged(
        settings,
        {
            "data": {"images": image, "labels": labels},
            "train": {"epochs": epochs, "validate_every": epochs, "seed": seed},
            "run": {"output": str(output)},
        },
    )


def _in(data: Path, told: str | list[str]) -> str | list[str]:
    return told if isinstance(told, list) else str(data / told)


def _pixels(image: str) -> int:
    with rasterio.open(image) as file:
        return int(file.height * file.width)
