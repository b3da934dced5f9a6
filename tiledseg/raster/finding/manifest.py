"""Lists of rasters in a file: images, or images with their labels and the part of the data that each belongs to.

- `.txt`: an image a line, or an image, a tab and its labels; `#` begins a comment line;
- `.csv`: a header with `image`, and some of `label`, `split`;
- `.geojson`, `.json`: a FeatureCollection whose features have the properties `image`, and some of `label`, `split`.

`split` is `train`, `val` (or `validation`) or `test`, whose rows nobody learns from. Paths are relative to the list's
folder. URLs stand as they are, and need `references`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tiledseg.config.checks import shown
from tiledseg.errors import RasterError
from tiledseg.raster.text_files import csv_rows, parse_features, read_list

ENDINGS = (".txt", ".csv", ".geojson", ".json")
TRAIN, VALIDATION, TEST = "train", "val", "test"
_WORDS = {"": None, "train": TRAIN, "training": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}
_Rows = Iterator[tuple[str, Mapping[str, Any]]]


class ManifestEntry(NamedTuple):
    """An image, its labels and its part of the data (None: not named), and its place in the list."""

    image: str
    label: str | None
    split: str | None
    place: str


def is_manifest(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in ENDINGS and os.path.isfile(path)


def read_manifest(path: str) -> tuple[ManifestEntry, ...]:
    """Return all entries, in the order of the file. Raises RasterError, naming the line, for one that cannot be."""
    text = read_list(path)
    ending = os.path.splitext(path)[1].lower()
    if ending == ".txt":
        rows = _lines(path, text)
    elif ending == ".csv":
        rows = csv_rows(path, text, "image", "image,label,split", RasterError)
    else:
        rows = _features(path, text)
    entries = tuple(_entry(path, fields, place) for place, fields in rows)
    if not entries:
        raise RasterError(f"{path} lists no image; give a line for each")
    return entries


def _lines(path: str, text: str) -> _Rows:
    for number, line in enumerate(text.splitlines(), 1):
        words = [word.strip() for word in line.split("\t")]
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if len(words) > 2:
            raise RasterError(f"{path}, line {number} has {len(words)} columns; give an image, or a tab and its labels")
        yield f"line {number}", dict(zip(("image", "label"), words, strict=False))


def _features(path: str, text: str) -> _Rows:
    for number, feature in enumerate(parse_features(path, text)[0]):
        properties = feature.get("properties")
        yield f"feature {number}", properties if isinstance(properties, dict) else {}


def _entry(path: str, fields: Mapping[str, Any], place: str) -> ManifestEntry:
    for name in ("image", "label", "split"):
        if not isinstance(fields.get(name) or "", str):
            raise RasterError(f"{path}, {place} has {name} {shown(fields[name])}; give text")
    image, label, split = ((fields.get(name) or "").strip() for name in ("image", "label", "split"))
    if not image:
        raise RasterError(f"{path}, {place} names no image; give each its path")
    if split.lower() not in _WORDS:
        raise RasterError(f"{path}, {place} has split {shown(split)!r}; give train, val or test")
    folder = os.path.dirname(path)
    image, label = (
        name if not name or "://" in name or name.startswith("/") else os.path.join(folder, name)
        for name in (image, label)
    )
    return ManifestEntry(image, label or None, _WORDS[split.lower()], f"{path}, {place}")
