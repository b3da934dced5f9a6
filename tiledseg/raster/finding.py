"""The rasters that a user means by paths, globs, URLs and lists, with their labels, in an order that never changes.

Lists of rasters are files, which hold
- `.txt`: an image a line, or an image, a tab and its labels; `#` begins a comment line;
- `.csv`: a header with `image`, and some of `label`, `split`;
- `.geojson`, `.json`: a FeatureCollection whose features have the properties `image`, and some of `label`, `split`.
`split` is `train`, `val` (or `validation`) or `test`, whose rows nobody learns from. Paths are relative to the list's
folder. URLs stand as they are, and need `references`.

Labels may be named by a pattern: `{stem}` is the image's file name without its ending, `{parent}` the name of its
folder, and `{1}`, `{2}`, ... the text that the first, second, ... wildcard of the images' glob stands for.

Paths and globs with braces, `s2/*_{0401,0620}.tif`, join rasters (`raster.joined`).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tiledseg.config.checks import shown
from tiledseg.errors import RasterError
from tiledseg.raster.array_names import ArrayName, parse_array_name
from tiledseg.raster.joined import file_name, joined, joined_paths
from tiledseg.raster.remote import (
    REFERENCES,
    check_obstore,
    is_bucket_folder,
    is_named,
    is_remote,
    is_vector,
    list_folder,
    parse_s3,
)
from tiledseg.raster.text_files import csv_rows, parse_features, read_list
from tiledseg.raster.tile_store import is_tile_store, parse_store_name, store_images
from tiledseg.system.console import counted
from tiledseg.system.files import irregular_kind

IMAGE_ENDINGS = (".tif", ".tiff", ".png", ".jpg", ".jpeg", ".jp2")
"""Endings of the files that a folder stands for."""
_LIST_ENDINGS = (".txt", ".csv", ".geojson", ".json")

TRAIN, VALIDATION, TEST = "train", "val", "test"
_SPLITS = {"": None, "train": TRAIN, "training": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}
Parts = tuple[str | None, ...]
LEARNT: Parts = (None, TRAIN)
HELD_OUT: Parts = (VALIDATION,)
HELD_OUT_ALONE: Parts = (None, VALIDATION)
"""Parts of a list that is given for validation."""
EVERY: Parts = (None, TRAIN, VALIDATION, TEST)
"""Parts of a list that is given to be mapped."""

_REMEDY = "give a path, glob or URL of a raster"
_FIELD = re.compile(r"\{(\w*)\}")
_WILDCARDS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]")
_EXPRESSIONS = {"**/": r"((?:.*/)?)", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}


class RasterSource(NamedTuple):
    """A raster's path, its `labels` where a list gives some, the texts of its glob's `wildcards`, and the `place` in a
    list that names it, with its `split` there."""

    path: str
    labels: str | None = None
    wildcards: tuple[str, ...] = ()
    place: str = ""
    split: str | None = None


def as_list(paths: str | Sequence[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def expand_sources(
    patterns: Sequence[str], key: str, parts: Parts = LEARNT, references: bool = False
) -> tuple[str, ...]:
    """Return the paths that `patterns` mean: in the order given, the matches of each glob, and the rasters of each
    folder, sorted by name.

    s3:// has globs too, and folders where the name ends in a slash. Any other URL, a `/vsi...` path or a subdataset
    name stands for itself, and so does a file whose own name holds `*`, `?` or `[`. A tile store stands for all of its
    images, a list for those of the `parts` of the data (None: images without a part). URLs in a list are opened with
    `references` only. `key` (such as "data.images") is the name in error messages.

    Raises RasterError for no pattern at all, a glob that matches nothing, a missing file, a folder without rasters, for
    a path that occurs twice, and where a bucket is not to be listed.
    """
    return tuple(source.path for source in find_sources(patterns, key, parts, references))


def find_sources(
    patterns: Sequence[str], key: str, parts: Parts = LEARNT, references: bool = False
) -> tuple[RasterSource, ...]:
    """Return the sources of `expand_sources` with their labels and places."""
    if not patterns:
        raise RasterError(f"{key} is empty; give at least one path, folder, glob, list or URL")
    sources = [source for pattern in patterns for source in _expand(os.fspath(pattern), key, parts, references)]
    first: dict[str, int] = {}
    for at, source in enumerate(sources):
        same = source.path if is_named(source.path) else os.path.realpath(source.path)
        if same in first:
            raise RasterError(f"{key} holds {source.path} twice, at positions {first[same]} and {at}; remove one")
        first[same] = at
    return tuple(sources)


def has_validation(patterns: Sequence[str]) -> bool:
    """Return True if a list among the images names some to validate on."""
    return any(entry.split == VALIDATION for path in _lists(patterns) for entry in _read_list(path))


def _lists(patterns: Sequence[str]) -> list[str]:
    return [each for path in patterns for each in joined_paths(path) or (path,) if _is_list(each)]


def left_out(patterns: Sequence[str], key: str, parts: Parts = LEARNT) -> list[str]:
    """Return a line for each list that has images of none of the `parts`."""
    lines = []
    for path in _lists(patterns):
        splits = [str(entry.split) for entry in _read_list(path) if entry.split not in parts]
        if splits:
            lines.append(
                f"{key}: {counted(len(splits), 'image')} of {path} of split {' or '.join(sorted(set(splits)))} left "
                "out; to take them, give a list that names no split"
            )
    return lines


def pair_sources(
    images: Sequence[str],
    labels: Sequence[str],
    keys: tuple[str, str],
    parts: Parts = LEARNT,
    references: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the images and, with them, their labels.

    Labels are paired in order; by name where both are one folder each; by a pattern where they are one; one file of
    vectors goes with every image. Without `labels` they are those of the images' list, or tile store. `parts` and
    `references`: as `expand_sources`.

    Raises RasterError where `expand_sources` does, where the counts differ, and where labels are missing.
    """
    sources = find_sources(images, keys[0], parts, references)
    image_paths = tuple(source.path for source in sources)
    pattern = _pattern(images, labels)
    if pattern is not None:
        is_there = _presence(pattern, keys[1])
        label_paths = tuple(_named_labels(source, pattern, keys, is_there) for source in sources)
    elif len(labels) == 1 and is_vector(labels[0]):
        label_paths = (_existing(labels[0], keys[1]),) * len(sources)
    elif labels:
        label_paths = tuple(_store_labels(path) or path for path in expand_sources(labels, keys[1], parts, references))
    else:
        label_paths = tuple(_own_labels(source, keys[1]) for source in sources)
    if len(image_paths) != len(label_paths):
        raise RasterError(
            f"{keys[0]} has {len(image_paths)} rasters but {keys[1]} has {len(label_paths)}; give one label raster for "
            "each image, in the same order"
        )
    return image_paths, label_paths


def _pattern(images: Sequence[str], labels: Sequence[str]) -> str | None:
    """Return the pattern by which labels are named; None for other labels. Two folders are paired by their files'
    names."""
    if len(labels) != 1:
        return None
    if len(images) == 1 and all(os.path.isdir(path) or is_bucket_folder(path) for path in (images[0], labels[0])):
        return os.path.join(labels[0], "{stem}.*")
    return labels[0] if _FIELD.search(labels[0]) and not os.path.exists(labels[0]) else None


def _presence(pattern: str, key: str) -> Callable[[str], bool]:
    """Return a test for files that a pattern names. A bucket is listed once, where the ending is open."""
    if parse_s3(pattern) is None or not pattern.endswith(".*"):
        return os.path.isfile
    return frozenset(_objects_in(os.path.dirname(pattern[: pattern.index("{")]) + "/", key, deep=True)).__contains__


def _named_labels(source: RasterSource, pattern: str, keys: tuple[str, str], is_there: Callable[[str], bool]) -> str:
    """Return the labels of an image by the pattern; `.*` is any ending. Raises RasterError where there are none."""
    fields = {"stem": os.path.splitext(file_name(source.path))[0]}
    fields["parent"] = os.path.basename(os.path.dirname(source.path))
    fields |= {str(number): value for number, value in enumerate(source.wildcards, 1)}
    for field in _FIELD.findall(pattern):
        if field not in fields:
            names = ", ".join(f"{{{name}}}" for name in fields)
            raise RasterError(f"{keys[1]} is {pattern}, but {source.path} has no {{{field}}}; give some of {names}")
    labels = _FIELD.sub(lambda field: fields[field[1]], pattern)
    if labels.endswith(".*"):
        paths = [path for path in (labels[:-2] + ending for ending in IMAGE_ENDINGS) if is_there(path)]
        if len(paths) != 1:
            count = "no labels" if not paths else f"several labels ({', '.join(paths)})"
            raise RasterError(f"{keys[0]}: {source.path} has {count} {labels}; give one label raster for each image")
        return paths[0]
    if not is_named(labels) and not os.path.isfile(labels):
        raise RasterError(
            f"{keys[0]}: {source.path} has no labels {labels}, which {keys[1]} asks for; add them, or leave it out"
        )
    return labels


def _own_labels(source: RasterSource, key: str) -> str:
    """Return the labels that come with an image. Raises RasterError where none do."""
    labels = source.labels or _store_labels(source.path)
    if labels is not None:
        return labels if parse_store_name(labels) else _existing(labels, source.place or key)
    if source.place:
        raise RasterError(f"{source.place} names no labels, and {key} is empty; give {source.path} its labels")
    raise RasterError(f"{key} is empty and {source.path} is no tile store; give one label raster an image")


def _existing(path: str, key: str) -> str:
    name = parse_array_name(path)
    is_there = os.path.isfile(path) if name is None else is_remote(name.store) or os.path.exists(name.store)
    if not is_named(path) and not is_there:
        raise RasterError(f"{key}: {path} does not exist; {_REMEDY}")
    return path


def _store_labels(path: str) -> str | None:
    """Return the labels beside an image of a tile store; None for any other raster."""
    name = parse_store_name(path)
    return None if name is None else str(name._replace(labels=True))


def _expand(pattern: str, key: str, parts: Parts, references: bool) -> list[RasterSource]:
    array = parse_array_name(pattern)
    if array is not None:
        return _arrays(pattern, array, key)
    if several := joined_paths(pattern):
        return _joined([_expand(each, key, parts, references) for each in several], several, key)
    if is_bucket_folder(pattern):
        return _rasters(pattern, _objects_in(pattern, key), key)
    if parse_s3(pattern) and glob.has_magic(pattern):
        return _matches(pattern, _matching_objects(pattern, key), key)
    if is_named(pattern) or parse_store_name(pattern):
        return [RasterSource(pattern)]
    if is_tile_store(pattern):
        return [RasterSource(str(name)) for name in store_images(pattern)]
    if os.path.isdir(pattern):
        return _rasters(pattern, [os.path.join(pattern, name) for name in os.listdir(pattern)], key)
    kind = irregular_kind(pattern)
    if kind is not None:
        raise RasterError(f"{key}: {pattern} is {kind}; give a regular file")
    if _is_list(pattern):
        return _listed(pattern, key, parts, references)
    if os.path.exists(pattern):
        return [RasterSource(pattern)]
    if not glob.has_magic(pattern):
        raise RasterError(f"{key}: {pattern} does not exist; {_REMEDY}")
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path))
    return _matches(pattern, paths, key)


def _arrays(pattern: str, array: ArrayName, key: str) -> list[RasterSource]:
    """Return the variable of each store that a name, or a glob of stores of this machine, means."""
    if not glob.has_magic(array.store) or os.path.exists(array.store):
        return [RasterSource(_existing(pattern, key))]
    if is_remote(array.store):
        raise RasterError(f"{key}: {pattern} is a glob of stores at a URL; name each of them, in a list say")
    stores = _matches(array.store, sorted(glob.glob(array.store, recursive=True)), key)
    return [store._replace(path=str(array._replace(store=store.path))) for store in stores]


def _joined(runs: Sequence[list[RasterSource]], patterns: Sequence[str], key: str) -> list[RasterSource]:
    """Join each raster of the first pattern with those of the others for which wildcards stand for the same, or with
    those at its place. Raises RasterError for one that is missing."""
    tables = [{source.wildcards or (str(at),): source for at, source in enumerate(run)} for run in runs]
    for name in dict.fromkeys(name for table in tables for name in table):
        one, other = (next((k for k, t in enumerate(tables) if (name in t) == there), None) for there in (True, False))
        if one is not None and other is not None:
            raise RasterError(
                f"{key}: {tables[one][name].path} is to be joined with its like of {patterns[other]}, which is "
                "missing; add it, or leave the others out"
            )
    return [each._replace(path=joined([table[name].path for table in tables])) for name, each in tables[0].items()]


def _matches(pattern: str, paths: Sequence[str], key: str) -> list[RasterSource]:
    if not paths:
        raise RasterError(f"{key}: nothing matches the glob {pattern}; {_REMEDY}")
    return [RasterSource(path, wildcards=matched(pattern, path)) for path in paths]


def matched(pattern: str, path: str) -> tuple[str, ...]:
    """Return the text that each wildcard of a glob stands for in a path that it matches; nothing for another path."""
    expression, at = "", 0
    for wildcard in _WILDCARDS.finditer(pattern):
        expression += re.escape(pattern[at : wildcard.start()])
        inner = wildcard[0][1:-1]
        expression += _EXPRESSIONS.get(wildcard[0]) or f"([{'^' + inner[1:] if inner.startswith('!') else inner}])"
        at = wildcard.end()
    match = re.fullmatch(expression + re.escape(pattern[at:]), path)
    return tuple((part or "").rstrip("/") for part in match.groups()) if match else ()


def _rasters(folder: str, paths: Iterable[str], key: str) -> list[RasterSource]:
    """Return the `paths` in a folder that end as rasters do."""
    rasters = sorted(path for path in paths if path.lower().endswith(IMAGE_ENDINGS))
    if not rasters:
        endings = ", ".join(IMAGE_ENDINGS)
        raise RasterError(f"{key}: the folder {folder} holds no raster ({endings}); give another, or a glob")
    return [RasterSource(path, wildcards=(os.path.splitext(os.path.basename(path))[0],)) for path in rasters]


def _objects_in(folder: str, key: str, deep: bool = False) -> list[str]:
    """Return the URLs of the objects in a bucket's folder, where `deep` also of those in folders in it."""
    check_obstore(key, folder)
    name = parse_s3(folder)
    if name is None:
        raise RasterError(f"{key}: the bucket's name has a wildcard or a field; name one bucket")
    return list_folder(name, deep)


def _matching_objects(pattern: str, key: str) -> list[str]:
    """Return the URLs that a glob means, sorted, by the rules of `glob`: `*` stays within a folder, `**/` is any
    folders, and names that begin with a dot are hidden. An object whose own name is the pattern is the only one."""
    folder = os.path.dirname(pattern[: next(at for at in range(len(pattern)) if glob.has_magic(pattern[at]))]) + "/"
    urls = _objects_in(folder, key, deep="/" in pattern[len(folder) :] or "**" in pattern)
    if pattern in urls:
        return [pattern]
    shows_hidden = "/." in pattern
    return sorted(
        url for url in urls if matched(pattern, url) and (shows_hidden or "/." not in f"/{url[len(folder) :]}")
    )


def _is_list(path: str) -> bool:
    return not is_named(path) and os.path.splitext(path)[1].lower() in _LIST_ENDINGS and os.path.isfile(path)


def _listed(path: str, key: str, parts: Parts, references: bool) -> list[RasterSource]:
    entries = [entry for entry in _read_list(path) if entry.split in parts]
    if not entries:
        raise RasterError(f"{key}: {path} lists no image of split {parts[-1]}; give some")
    for entry in entries:
        foreign = [name for name in (entry.path, entry.labels) if name and is_named(name) and not references]
        if foreign:
            raise RasterError(
                f"{entry.place} names {foreign[0]}, which is no path of a file and was not typed; where you trust this "
                f"list, allow it with {REFERENCES}"
            )
        _existing(entry.path, entry.place)
    return entries


def _read_list(path: str) -> list[RasterSource]:
    """Return all entries, in the order of the file. Raises RasterError, naming the line, for one that cannot be."""
    text = read_list(path)
    ending = os.path.splitext(path)[1].lower()
    rows: Iterator[tuple[str, Any]]
    if ending == ".txt":
        rows = _lines(path, text)
    elif ending == ".csv":
        rows = csv_rows(path, text, "image", "image,label,split", RasterError)
    else:
        rows = ((f"feature {at}", one.get("properties")) for at, one in enumerate(parse_features(path, text)[0]))
    entries = [_entry(path, fields if isinstance(fields, Mapping) else {}, place) for place, fields in rows]
    if not entries:
        raise RasterError(f"{path} lists no image; give a line for each")
    return entries


def _lines(path: str, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = [word.strip() for word in line.split("\t")]
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if len(words) > 2:
            raise RasterError(f"{path}, line {number} has {len(words)} columns; give an image, or a tab and its labels")
        yield f"line {number}", dict(zip(("image", "label"), words, strict=False))


def _entry(path: str, fields: Mapping[str, Any], place: str) -> RasterSource:
    for name in ("image", "label", "split"):
        if not isinstance(fields.get(name) or "", str):
            raise RasterError(f"{path}, {place} has {name} {shown(fields[name])}; give text")
    image, label, split = ((fields.get(name) or "").strip() for name in ("image", "label", "split"))
    if not image:
        raise RasterError(f"{path}, {place} names no image; give each its path")
    if split.lower() not in _SPLITS:
        raise RasterError(f"{path}, {place} has split {shown(split)!r}; give train, val or test")
    folder = os.path.dirname(path)
    image, label = (
        name if not name or "://" in name or name.startswith("/") else os.path.join(folder, name)
        for name in (image, label)
    )
    return RasterSource(image, label or None, (), f"{path}, {place}", _SPLITS[split.lower()])
