"""Lists of rasters in a file, with their labels and their part of the data.

- `.txt`: an image a line, or an image, a tab and its labels; `#` begins a comment line;
- `.csv`: a header with `image`, and some of `label`, `split`;
- `.geojson`, `.json`: features with the properties `image`, and some of `label`, `split`; or STAC items, whose bands
  are assets;
- `.gti.gpkg`, `.gti.fgb`: GDAL's tile index, with the columns `location` (or `image`), and some of `label`, `split`;
- `.parquet`: the same, or STAC items.
`split` is `train`, `val` (or `validation`) or `test`; rows of `test` are not used in training. Paths are relative to
the list's folder. URLs, and an item's files outside that folder, need `references`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tiledseg.config.checks import ITEM_ENDINGS, LIST_ENDINGS, TIME, shown
from tiledseg.errors import ConfigError, RasterError, require
from tiledseg.raster.array_names import file_of, parse_array_name
from tiledseg.raster.composed import (
    BANDS,
    JOINED,
    TIMES,
    VALID,
    Composed,
    Raster,
    files_of,
    joined_label,
    joined_paths,
    label_of,
)
from tiledseg.raster.labels.classes import csv_rows
from tiledseg.raster.mirrored_reader import reading
from tiledseg.raster.remote import REFERENCES, is_named
from tiledseg.raster.tile_store import parse_store_name
from tiledseg.system.console import counted
from tiledseg.system.files import is_zarr

TRAIN, VALIDATION, TEST = "train", "val", "test"
_SPLITS = {"": None, "train": TRAIN, "training": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}
Parts = tuple[str | None, ...]
LEARNT: Parts = (None, TRAIN)
HELD_OUT: Parts = (VALIDATION,)
HELD_OUT_ALONE: Parts = (None, VALIDATION)
"""Parts of a list of validation images."""
EVERY: Parts = (None, TRAIN, VALIDATION, TEST)
"""Parts of a list of images to map."""

MISSING = "give a path, glob or URL of a raster"
_COLUMNS = ("image", "location", "label", "split")
_TABLES = (".gpkg", ".fgb")
_ALL = "none"  # value of --valid that drops the run's mask


class RasterSource(NamedTuple):
    """A raster of a user's entry. `labels`: path given by a list. `wildcards`: texts of the glob's wildcards; a STAC
    item's place. `place`: file and line of the list. `split`, `time`: given by the list. `entry`: as typed."""

    path: Raster
    labels: str | None = None
    wildcards: tuple[str, ...] = ()
    place: str = ""
    split: str | None = None
    time: str = ""
    entry: str = ""


class SourceRules(NamedTuple):
    """The rules by which a user's entries become images (group `data`). `assets`: an item's bands. `mosaic`: the
    rasters of an entry are one image. `valid`: the band, asset or raster that marks valid pixels by its `values`.
    `times`: beginnings of datetimes; an item of each makes one image. `references`: a list may name URLs, and items'
    files outside its folder. `parts`: the parts of the data that are taken from a list (None: images without one)."""

    assets: tuple[str, ...] = ()
    mosaic: bool | None = False
    valid: int | str | None = None
    values: tuple[float, ...] = ()
    times: tuple[str, ...] = ()
    references: bool = False
    parts: Parts = LEARNT

    @property
    def valid_asset(self) -> str | None:
        """Return the asset that marks the valid pixels of an item; None for another kind of mask."""
        return self.valid if self.assets and isinstance(self.valid, str) and "{" not in self.valid else None

    def like(self, run: SourceRules, names: Sequence[str]) -> SourceRules:
        """Return the rules of a run for the images `names`, with this one's values in their place. Raises ConfigError
        for the run's times or assets in another order, and for a mask of the run that does not fit these images."""
        orders = [("--image", match[2].split(","), run.times) for match in map(JOINED.fullmatch, names) if match]
        orders += [("--times", list(self.times), run.times), ("--assets", list(self.assets), run.assets)]
        for flag, own, theirs in orders:
            if own != list(theirs) and sorted(own) == sorted(theirs):
                raise ConfigError(f"{flag} has {','.join(own)}, the run {','.join(theirs)}; give them in its order")
        items = any(name.lower().endswith(ITEM_ENDINGS) for name in names)
        times = run.times if (items and run.assets) or any(TIME in name for name in names) else ()
        mosaic = run.mosaic if self.mosaic is None else self.mosaic
        valid, values = self.valid, self.values
        if valid is None and run.valid is not None:
            valid, values = run.valid, values or run.values
            one = isinstance(valid, str) and "{" not in valid and (is_zarr(valid) or not os.path.isdir(valid))
            if one and not (items and run.valid_asset):
                what = "an asset of items" if run.valid_asset else "of one image"
                raise ConfigError(f"the run's mask is {valid}, {what}; give --valid anew, or --valid {_ALL}")
        valid = None if valid == _ALL else valid
        if self.values and valid is None:
            raise ConfigError("--valid-values is given, but no --valid; give both, or leave it out")
        assets, times = self.assets or run.assets, self.times or times
        return self._replace(assets=assets, mosaic=mosaic, valid=valid, values=values, times=times)


def is_list(path: str) -> bool:
    return not is_named(path) and path.lower().endswith(LIST_ENDINGS) and os.path.isfile(path)


def has_validation(patterns: Sequence[str]) -> bool:
    """Return True if a list among the images names validation images."""
    return any(entry.split == VALIDATION for path in _lists(patterns) for entry in _read_list(path))


def _lists(patterns: Sequence[str]) -> list[str]:
    return [each for path in patterns for each in joined_paths(path) or (path,) if is_list(each)]


def left_out(patterns: Sequence[str], key: str, parts: Parts = LEARNT) -> list[str]:
    """Return a warning for each list with images that belong to none of the `parts`."""
    lines = []
    for path in _lists(patterns):
        splits = [str(entry.split) for entry in _read_list(path) if entry.split not in parts]
        if splits:
            lines.append(
                f"{key}: {counted(len(splits), 'image')} of {path} of split {' or '.join(sorted(set(splits)))} left "
                "out; to take them, give a list that names no split"
            )
    return lines


def listed(path: str, key: str, rules: SourceRules) -> list[RasterSource]:
    """Return a list's images by the rules. Raises RasterError, naming the place in the list, for a missing file, or
    one that needs `references`."""
    entries = [entry for entry in _read_list(path, rules) if entry.split in rules.parts]
    if not entries:
        raise RasterError(f"{key}: {path} lists no image of split {rules.parts[-1]}; give some")
    folder = os.path.abspath(os.path.dirname(path))
    for entry in entries:
        names = files_of(entry.path)
        for name in (*names, entry.labels):
            if not name or rules.references:
                continue
            if is_named(name):
                what = "which is no path of a file"
            elif isinstance(entry.path, Composed) and os.path.commonpath([folder, os.path.abspath(name)]) != folder:
                what = f"which is outside its folder {folder}"
            else:
                continue
            raise RasterError(
                f"{entry.place} names {shown(name)}, {what}; where you trust this list, allow it with {REFERENCES}"
            )
        for name in names:
            existing(name, entry.place)
    if not rules.times or not path.lower().endswith(ITEM_ENDINGS):
        return entries
    known = {entry.wildcards for entry in entries if entry.time.startswith(rules.times)}
    for entry in entries:
        if entry.wildcards and entry.time and entry.wildcards not in known:
            raise RasterError(f"{entry.place} has a place without items of data.times; add them, or leave it out")
        if not (entry.wildcards and entry.time):
            what = "datetime" if entry.wildcards else "grid:code and bbox: it is no STAC item"
            raise RasterError(f"{entry.place} has no {what}, and data.times is given; mend it, or leave it out")
        own = [time for time in rules.times if entry.time.startswith(time)]
        if len(own) > 1:
            raise RasterError(f"{entry.place} is of data.times {own[0]} and {own[1]}; give times of different items")
    runs = [[entry for entry in entries if entry.time.startswith(time)] for time in rules.times]
    return joined(runs, [f"data.times {time}" for time in rules.times], key)


def joined(runs: Sequence[Sequence[RasterSource]], times: Sequence[str], key: str) -> list[RasterSource]:
    """Join each raster of the first of `times` with those of the other times that have the same wildcards, or the same
    number. Raises RasterError for a missing or ambiguous raster."""
    tables: list[dict[tuple[str, ...], RasterSource]] = []
    for run, time in zip(runs, times, strict=True):
        table: dict[tuple[str, ...], RasterSource] = {}
        for at, source in enumerate(run):
            other = table.setdefault(source.wildcards or (str(at),), source)
            if other is not source:
                raise RasterError(
                    f"{source.place} and {other.place} are both of {time}; remove one, or give longer ones"
                )
        tables.append(table)
    for name in dict.fromkeys(name for table in tables for name in table):
        there = [name in table for table in tables]
        if not all(there):
            one = tables[there.index(True)][name]
            raise RasterError(
                f"{key}: {label_of(one.path)} needs its counterpart of {times[there.index(False)]}, which is missing; "
                "add it, or leave the others out"
            )
    images = []
    for name, first in tables[0].items():
        paths = [table[name].path for table in tables]
        labels = [label_of(path) for path in paths]
        label = f"{labels[0].rpartition('#')[0]}#{name[0]}" if first.time else joined_label(labels)
        images.append(first._replace(path=Composed(label, TIMES, tuple(paths))))
    return images


def existing(path: str, key: str) -> str:
    if not is_present(path):
        raise RasterError(f"{key}: {path} does not exist; {MISSING}")
    return path


def is_present(path: str) -> bool:
    """Return False for a local path without a file or store, else True."""
    if is_named(file_of(path)) or parse_store_name(path):
        return True
    array = parse_array_name(path)
    return os.path.isfile(path) if array is None else os.path.exists(array.store)


def _read_list(path: str, rules: SourceRules | None = None) -> list[RasterSource]:
    """Return all entries in the order of the file; without `rules`, items have no paths. Raises RasterError, naming
    the line, for a faulty entry."""
    from tiledseg.raster.labels.polygons import parse_features, read_list

    ending = os.path.splitext(path)[1].lower()
    rows: Iterable[tuple[str, Any]]
    if ending == ".txt":
        text = ((f"line {at}", line) for at, line in enumerate(read_list(path).splitlines(), 1))
        lines = [(at, one.split("\t")) for at, one in text if one.strip() and not one.lstrip().startswith("#")]
        for place, words in lines:
            if len(words) > 2:
                raise RasterError(f"{path}, {place} has {len(words)} columns; give an image, or a tab and its labels")
        rows = [(place, dict(zip(("image", "label"), words, strict=False))) for place, words in lines]
    elif ending == ".csv":
        rows = csv_rows(path, read_list(path), "image", "image,label,split", RasterError)
    elif ending in (".parquet", *_TABLES):
        rows = ((f"row {at}", row) for at, row in enumerate(_table(path) if ending in _TABLES else _parquet(path)))
    else:
        features = enumerate(parse_features(path, read_list(path))[0])
        rows = ((f"feature {at}", one if _is_item(one) else one.get("properties")) for at, one in features)
    entries = [_entry(path, fields if isinstance(fields, Mapping) else {}, place, rules) for place, fields in rows]
    if not entries:
        raise RasterError(f"{path} lists no image; give a line for each")
    return entries


def _entry(path: str, fields: Mapping[str, Any], place: str, rules: SourceRules | None) -> RasterSource:
    item, folder = _is_item(fields), os.path.dirname(path)
    properties = fields.get("properties") if item else fields
    given = {name: properties.get(name) or "" for name in _COLUMNS} if isinstance(properties, Mapping) else {}
    for name, value in given.items():
        if not isinstance(value, str) and not (item and name in ("image", "location")):
            raise RasterError(f"{path}, {place} has {name} {shown(value)}; give text")
    typed, location, label, split = (str(given.get(name, "")).strip() for name in _COLUMNS)
    if split.lower() not in _SPLITS:
        raise RasterError(f"{path}, {place} has split {shown(split)!r}; give train, val or test")
    image = _item(path, fields, place, rules) if item else _located(folder, typed or location)
    if not image:
        raise RasterError(f"{path}, {place} names no image; give each its path")
    source = RasterSource(image, _located(folder, label) or None, (), f"{path}, {place}", _SPLITS[split.lower()])
    if not item or not isinstance(properties, Mapping):
        return source
    box = fields.get("bbox")  # in GeoParquet a record of xmin, ymin, xmax, ymax
    numbers = list(box.values()) if isinstance(box, Mapping) else box if isinstance(box, list) else []
    tile = str(properties.get("grid:code") or ",".join(map(str, numbers)))
    return source._replace(wildcards=(tile,) if tile else (), time=str(properties.get("datetime") or ""))


def _located(folder: str, name: str) -> str:
    return name if not name or "://" in name or name.startswith("/") else os.path.join(folder, name)


def _is_item(feature: Mapping[str, Any]) -> bool:
    """Return True for a STAC item: a feature with assets."""
    return isinstance(feature.get("assets"), Mapping)


def _item(path: str, item: Mapping[str, Any], place: str, rules: SourceRules | None) -> Raster:
    """Return the image of an item's assets; its label without `rules`. Raises RasterError if it lacks one of them."""
    label = f"{path}#{item.get('id')}"
    if rules is None:
        return label
    assets = {name: asset for name, asset in item["assets"].items() if asset is not None}
    there = ", ".join(map(shown, list(assets)[:9]))
    if not rules.assets:
        raise RasterError(f"{path}, {place} is a STAC item with the assets {there}; name its bands in data.assets")

    def href(name: str, key: str) -> str:
        asset = assets.get(name)
        if asset is None:
            raise RasterError(
                f"{path}, {place} ({shown(str(item.get('id')))}) has no asset {name} of {key}; its assets are {there}: "
                "name some of these, or leave the item out"
            )
        link = asset.get("href") if isinstance(asset, Mapping) else None
        if not isinstance(link, str) or not link.strip():
            raise RasterError(f"{path}, {place} has the asset {name} with href {shown(link)}; give it a path or URL")
        if link.startswith("file://"):
            link = unquote(urlsplit(link).path)
        located = _located(os.path.dirname(path), link.strip())
        return located if is_named(located) else os.path.normpath(located)

    image = Composed(label, BANDS, tuple(href(name, "data.assets") for name in rules.assets))
    if rules.valid_asset is None:
        return image
    return Composed(label, VALID, (image, href(rules.valid_asset, "data.valid")), None, rules.values)


def _table(path: str) -> list[dict[str, Any]]:
    """Return the rows of a tile index."""
    from tiledseg.raster.labels.polygons import reading_vectors

    with reading_vectors(path, "give a GeoPackage or FlatGeobuf with the column location"):
        import pyogrio.raw

        columns = [name for name in pyogrio.read_info(path)["fields"] if name.lower() in _COLUMNS]
        _, _, _, values = pyogrio.raw.read(path, columns=columns, read_geometry=False)
        return [dict(zip(map(str.lower, columns), row, strict=True)) for row in zip(*values, strict=True)]


def _parquet(path: str) -> list[dict[str, Any]]:
    """Return the rows of a GeoParquet file; a STAC item's row has `properties` as in JSON."""
    require(path, "parquet", "pyarrow")
    from pyarrow import parquet

    with (
        reading(f"open {path}", "give a GeoParquet file with the column location, image or assets"),
        open(path, "rb") as file,
    ):
        table = parquet.ParquetFile(file)
        wanted = ("id", "assets", "bbox", "datetime", "grid:code", *_COLUMNS)
        rows = table.read([name for name in table.schema_arrow.names if name in wanted]).to_pylist()
    return [{**row, "properties": row} if _is_item(row) else row for row in rows]
