"""The rasters that a user means by paths, globs and URLs, in an order that never changes."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tiledseg.errors import RasterError
from tiledseg.raster.finding.manifest import TEST, TRAIN, VALIDATION, is_manifest, read_manifest
from tiledseg.raster.finding.patterns import (
    folder_of,
    is_pattern,
    labels_for,
    matched,
    matching_objects,
    objects_in,
)
from tiledseg.raster.names import REFERENCES, is_named, is_vector
from tiledseg.raster.remote.objects import is_bucket_folder, parse_s3
from tiledseg.raster.tile_store.store import is_tile_store, parse_store_name, store_images
from tiledseg.system.console import counted
from tiledseg.system.files import irregular_kind

IMAGE_ENDINGS = (".tif", ".tiff", ".png", ".jpg", ".jpeg", ".jp2")
"""Endings of the files that a folder stands for."""

Parts = tuple[str | None, ...]
LEARNT: Parts = (None, TRAIN)
HELD_OUT: Parts = (VALIDATION,)
HELD_OUT_ALONE: Parts = (None, VALIDATION)
"""Parts of a list that is given for validation."""
EVERY: Parts = (None, TRAIN, VALIDATION, TEST)
"""Parts of a list that is given to be mapped."""

_REMEDY = "give a path, glob or URL of a raster"


def as_list(paths: str | Sequence[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


class RasterSource(NamedTuple):
    """A raster's path, its `labels` where a list gives some, the texts of its glob's `wildcards`, and the `place` in a
    list that names it."""

    path: str
    labels: str | None = None
    wildcards: tuple[str, ...] = ()
    place: str = ""


def expand_sources(
    patterns: Sequence[str], key: str, parts: Parts = LEARNT, references: bool = False
) -> tuple[str, ...]:
    """Return the paths that `patterns` mean: in the order given, the matches of each glob, and the rasters of each
    folder, sorted by name.

    s3:// has globs too, and folders where the name ends in a slash. Any other URL, a `/vsi...` path or a subdataset
    name stands for itself, and so does a file whose own name holds `*`, `?` or `[`. A tile store stands for all of its
    images, a list (see `manifest`) for those of the `parts` of the data (None: images without a part). URLs in a list
    are opened with `references` only. `key` (such as "data.images") is the name in error messages.

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
    return any(entry.split == VALIDATION for path in _manifests(patterns) for entry in read_manifest(path))


def left_out(patterns: Sequence[str], key: str, parts: Parts = LEARNT) -> list[str]:
    """Return a line for each list that has images of none of the `parts`."""
    lines = []
    for path in _manifests(patterns):
        splits = [str(entry.split) for entry in read_manifest(path) if entry.split not in parts]
        if splits:
            lines.append(
                f"{key}: {counted(len(splits), 'image')} of {path} of split {' or '.join(sorted(set(splits)))} left "
                "out; to take them, give a list that names no split"
            )
    return lines


def _manifests(patterns: Sequence[str]) -> list[str]:
    return [pattern for pattern in patterns if not is_named(pattern) and is_manifest(pattern)]


def pair_sources(
    images: Sequence[str],
    labels: Sequence[str],
    keys: tuple[str, str],
    parts: Parts = LEARNT,
    references: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the images and, with them, their labels.

    Labels are paired in order; by name where both are one folder each; by a pattern (see `patterns`) where they are
    one; one file of vectors goes with every image. Without `labels` they are those of the images' list, or tile store.
    `parts` and `references`: as `expand_sources`.

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
    check_counts(image_paths, label_paths, keys)
    return image_paths, label_paths


def check_counts(images: Sequence[object], labels: Sequence[object], keys: tuple[str, str]) -> None:
    """Raise RasterError unless there are as many labels as images: they are paired in order."""
    if len(images) != len(labels):
        raise RasterError(
            f"{keys[0]} has {len(images)} rasters but {keys[1]} has {len(labels)}; give one label raster for "
            "each image, in the same order"
        )


def _pattern(images: Sequence[str], labels: Sequence[str]) -> str | None:
    """Return the pattern by which labels are named; None for other labels. Two folders are paired by their files'
    names."""
    if len(labels) != 1:
        return None
    if len(images) == 1 and all(os.path.isdir(path) or is_bucket_folder(path) for path in (images[0], labels[0])):
        return os.path.join(labels[0], "{stem}.*")
    return labels[0] if is_pattern(labels[0]) and not os.path.exists(labels[0]) else None


def _presence(pattern: str, key: str) -> Callable[[str], bool]:
    """Return a test for files that a pattern names. A bucket is listed once, where the ending is open."""
    if parse_s3(pattern) is None or not pattern.endswith(".*"):
        return os.path.isfile
    return frozenset(objects_in(folder_of(pattern[: pattern.index("{")]), key, deep=True)).__contains__


def _named_labels(source: RasterSource, pattern: str, keys: tuple[str, str], is_there: Callable[[str], bool]) -> str:
    """Return the labels of an image by the pattern; `.*` is any ending. Raises RasterError where there are none."""
    labels = labels_for(source.path, source.wildcards, pattern, keys[1])
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
    if not is_named(path) and not os.path.isfile(path):
        raise RasterError(f"{key}: {path} does not exist; {_REMEDY}")
    return path


def _store_labels(path: str) -> str | None:
    """Return the labels beside an image of a tile store; None for any other raster."""
    name = parse_store_name(path)
    return None if name is None else str(name._replace(labels=True))


def _expand(pattern: str, key: str, parts: Parts, references: bool) -> list[RasterSource]:
    if is_bucket_folder(pattern):
        return _rasters(pattern, objects_in(pattern, key), key)
    if parse_s3(pattern) and glob.has_magic(pattern):
        return _matches(pattern, matching_objects(pattern, key), key)
    if is_named(pattern) or parse_store_name(pattern):
        return [RasterSource(pattern)]
    if is_tile_store(pattern):
        return [RasterSource(str(name)) for name in store_images(pattern)]
    if os.path.isdir(pattern):
        return _rasters(pattern, [os.path.join(pattern, name) for name in os.listdir(pattern)], key)
    kind = irregular_kind(pattern)
    if kind is not None:
        raise RasterError(f"{key}: {pattern} is {kind}; give a regular file")
    if is_manifest(pattern):
        return _listed(pattern, key, parts, references)
    if os.path.exists(pattern):
        return [RasterSource(pattern)]
    if not glob.has_magic(pattern):
        raise RasterError(f"{key}: {pattern} does not exist; {_REMEDY}")
    return _matches(
        pattern, sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)), key
    )


def _matches(pattern: str, paths: Sequence[str], key: str) -> list[RasterSource]:
    if not paths:
        raise RasterError(f"{key}: nothing matches the glob {pattern}; {_REMEDY}")
    return [RasterSource(path, wildcards=matched(pattern, path)) for path in paths]


def _rasters(folder: str, paths: Iterable[str], key: str) -> list[RasterSource]:
    """Return the `paths` in a folder that end as rasters do."""
    rasters = sorted(path for path in paths if path.lower().endswith(IMAGE_ENDINGS))
    if not rasters:
        endings = ", ".join(IMAGE_ENDINGS)
        raise RasterError(f"{key}: the folder {folder} holds no raster ({endings}); give another, or a glob")
    return [RasterSource(path, wildcards=(os.path.splitext(os.path.basename(path))[0],)) for path in rasters]


def _listed(path: str, key: str, parts: Parts, references: bool) -> list[RasterSource]:
    entries = [entry for entry in read_manifest(path) if entry.split in parts]
    if not entries:
        raise RasterError(f"{key}: {path} lists no image of split {parts[-1]}; give some")
    for entry in entries:
        foreign = [name for name in (entry.image, entry.label) if name and is_named(name) and not references]
        if foreign:
            raise RasterError(
                f"{entry.place} names {foreign[0]}, which is no path of a file and was not typed; where you trust this "
                f"list, allow it with {REFERENCES}"
            )
        _existing(entry.image, entry.place)
    return [RasterSource(entry.image, entry.label, place=entry.place) for entry in entries]
