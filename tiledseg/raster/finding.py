"""The rasters named by paths, globs, URLs and lists, with their labels, in an order that never changes.

A pattern may name the labels, or the masks of valid pixels: `{stem}` is the image's file name without its ending,
`{parent}` the name of its folder, and `{1}`, `{2}`, ... the text of the first, second, ... wildcard of the images'
glob. Paths and globs with braces, `s2/*_{0401,0620}.tif`, join rasters of several times.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

from tiledseg.config.checks import TIME, shown
from tiledseg.errors import ConfigError, RasterError
from tiledseg.raster.array_names import ArrayName, file_of, parse_array_name
from tiledseg.raster.array_open import stored_tiles
from tiledseg.raster.composed import (
    BANDS,
    MOSAIC,
    TIMES,
    VALID,
    Composed,
    Raster,
    has_kind,
    joined_paths,
    label_of,
    parse_raster,
    stem_of,
)
from tiledseg.raster.lists import (
    MISSING,
    RasterSource,
    SourceRules,
    existing,
    is_list,
    is_present,
    joined,
    listed,
)
from tiledseg.raster.remote import is_bucket_folder, is_named, is_remote, is_vector, list_folder, parse_s3
from tiledseg.raster.tile_store import is_tile_store, parse_store_name, store_images
from tiledseg.system.files import irregular_kind, is_zarr

IMAGE_ENDINGS = (".tif", ".tiff", ".png", ".jpg", ".jpeg", ".jp2")
"""Endings of the rasters in a folder."""
PLAIN = SourceRules()
_FIELD = re.compile(r"\{(\w*)\}")
_WILDCARDS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]")
_EXPRESSIONS = {"**/": r"((?:.*/)?)", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}


def as_list(paths: str | Sequence[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def expand_sources(patterns: Sequence[str], key: str, rules: SourceRules = PLAIN) -> tuple[str, ...]:
    """Return the names of the images of `patterns`, in their order; matches of a glob and rasters of a folder by name.

    s3:// URLs may be globs, or folders if they end in a slash. Any other URL, a `/vsi...` path or a subdataset name is
    one raster, and so is a file whose own name holds `*`, `?` or `[`. A tile store gives all of its images, a list
    those of `rules.parts`. An image made of several rasters has a name that holds theirs. `key` (such as
    "data.images") is the name in error messages.

    Raises RasterError for no pattern, a glob without a match, a missing file, a folder without rasters, a path that
    occurs twice, and a bucket that cannot be listed.
    """
    return tuple(map(str, _images(find_sources(patterns, key, rules), key, rules)))


def find_sources(patterns: Sequence[str], key: str, rules: SourceRules = PLAIN) -> list[RasterSource]:
    """Return the sources of `expand_sources` with their labels and places, before masks and mosaics."""
    if not patterns:
        raise RasterError(f"{key} is empty; give at least one path, folder, glob, list or URL")
    sources, first = list[RasterSource](), dict[Raster, int]()
    for pattern in map(os.fspath, patterns):
        for source in _expand(pattern, key, rules):
            path = source.path
            is_file = isinstance(path, str) and not is_named(path)
            at = first.setdefault(os.path.realpath(str(path)) if is_file else path, len(sources))
            if at < len(sources):
                name = " = ".join(dict.fromkeys(label_of(each) for each in (sources[at].path, path)))
                raise RasterError(f"{key} holds {name} twice, at positions {at} and {len(sources)}; remove one")
            sources.append(source._replace(entry=pattern))
    return sources


def _images(sources: Sequence[RasterSource], key: str, rules: SourceRules) -> list[Raster]:
    """Return the images, mosaics and masks included."""
    valid, rasters = rules.valid, [source.path for source in sources]
    if rules.valid_asset is not None and any(items := [has_kind(raster, BANDS) for raster in rasters]):
        if not all(items):
            path = label_of(rasters[items.index(False)])
            raise RasterError(f"data.valid is {valid}, an asset, but {key} has {path}, no STAC item; give items alone")
        valid = None
    if valid is None:
        return _mosaics(sources, rasters, rules)
    number, pattern = (valid, "") if isinstance(valid, int) else (None, valid)
    pattern = os.path.join(pattern, "{stem}.*") if _is_folder(pattern) else pattern
    mask_of = _by_pattern(pattern, (key, "data.valid"))

    def masked(raster: Raster, source: RasterSource, time: str = "") -> Raster:
        """Return an image with its mask; an image of several times gets a mask for each of them."""
        times = rules.times if TIME in pattern else ()
        if isinstance(raster, Composed) and raster.kind == TIMES and (number or times):
            pairs = zip(raster.parts, times or repeat(""), strict=False)
            return raster._replace(parts=tuple(masked(part, source, own) for part, own in pairs))
        parts = (raster,) if number else (raster, mask_of(source, time))
        return Composed(label_of(raster), VALID, parts, number, rules.values)

    if number or _FIELD.search(pattern):
        return _mosaics(sources, [masked(source.path, source) for source in sources], rules)
    images = _mosaics(sources, rasters, rules)
    if len(images) > 1 or (sources[0].place and not rules.mosaic):
        raise RasterError(
            f"data.valid is {valid} for {len(images)} images of {key}; give a pattern, as clouds/{{stem}}.tif"
        )
    return [masked(images[0], sources[0])]


def _mosaics(sources: Sequence[RasterSource], rasters: Sequence[Raster], rules: SourceRules) -> list[Raster]:
    """Return the images or labels of sources; with `data.mosaic`, one mosaic for each entry of the user."""
    if not rules.mosaic:
        return list(rasters)
    groups: dict[str, list[Raster]] = {}
    for source, raster in zip(sources, rasters, strict=True):
        groups.setdefault(source.entry, []).append(raster)
    return [group[0] if len(group) == 1 else Composed(entry, MOSAIC, tuple(group)) for entry, group in groups.items()]


def check_assets(assets: Sequence[str], images: Iterable[str]) -> None:
    """Raise ConfigError if `data.assets` is given, but no image is a STAC item."""
    if assets and not any(has_kind(parse_raster(name), BANDS) for name in images):
        raise ConfigError(
            f"data.assets is {list(assets)}, but no image is a STAC item; leave it out, or give a list of items"
        )


def pair_sources(
    images: Sequence[str], labels: Sequence[str], keys: tuple[str, str], rules: SourceRules = PLAIN
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the images and of their labels.

    Labels are paired in order; by name if images and labels are one folder each; by a pattern if `labels` is one. One
    vector file serves every image. Without `labels`, the images' list or tile store names them. Labels of a mosaic are
    a mosaic too.

    Raises RasterError as `expand_sources` does, and if counts differ or labels are missing.
    """
    sources = find_sources(images, keys[0], rules)
    rasters = _images(sources, keys[0], rules)
    pattern = labels[0] if len(labels) == 1 else ""
    if len(images) == 1 and _is_folder(images[0]) and _is_folder(pattern):
        pattern = os.path.join(pattern, "{stem}.*")  # two folders are paired by their files' names
    own: list[Raster]
    if _FIELD.search(pattern) and not os.path.exists(pattern):
        labels_of = _by_pattern(pattern, keys)
        own = _mosaics(sources, [labels_of(source) for source in sources], rules)
    elif is_vector(pattern):
        own = [existing(pattern, keys[1])] * len(rasters)
    elif labels:
        label_sources = find_sources(labels, keys[1], SourceRules(references=rules.references, parts=rules.parts))
        own = [source.path if source.place else source.labels or source.path for source in label_sources]
        own = _mosaics(label_sources, own, rules)
    else:
        for source in sources:
            named = source.place or label_of(source.path)
            if source.labels is None:
                raise RasterError(f"{named} names no labels, and {keys[1]} is empty; give one label raster an image")
            existing(source.labels, named)
        own = _mosaics(sources, [str(source.labels) for source in sources], rules)
    if len(rasters) != len(own):
        raise RasterError(
            f"{keys[0]} has {len(rasters)} rasters but {keys[1]} has {len(own)}; give one label raster for each image, "
            "in the same order"
        )
    return tuple(map(str, rasters)), tuple(map(str, own))


def _is_folder(path: str) -> bool:
    """Return True for a folder of rasters, in a bucket too."""
    return is_bucket_folder(path) or (os.path.isdir(path) and not is_zarr(path))


def _by_pattern(pattern: str, keys: tuple[str, str]) -> Callable[..., str]:
    """Return a function from an image's source, and one of its times, to the path of its labels by the pattern; `.*` is
    any ending. The function raises RasterError if they are missing. A bucket is listed once."""
    is_there: Callable[[str], bool] = os.path.isfile
    if parse_s3(pattern) and pattern.endswith(".*"):
        folder = os.path.dirname(pattern[: pattern.index("{")]) + "/"
        is_there = frozenset(list_folder(folder, keys[1], deep=True)).__contains__
    what = "masks" if keys[1] == "data.valid" else "labels"

    def find(source: RasterSource, time: str = "") -> str:
        image = label_of(source.path)
        file = file_of(source.path) if isinstance(source.path, str) else source.path
        stem = stem_of(file)
        fields = {"stem": stem, "parent": os.path.basename(os.path.dirname(label_of(file)))}
        fields |= {str(number): value for number, value in enumerate(source.wildcards, 1)}
        if stem != os.path.basename(stem) or stem in (".", ".."):
            raise RasterError(f"{image} is named {shown(stem)}, which leads to another folder; change its id")
        own = pattern.replace(TIME, time) if time else pattern
        for field in _FIELD.findall(own):
            if field not in fields:
                names = ", ".join(f"{{{name}}}" for name in fields)
                raise RasterError(f"{keys[1]} is {own}, but {image} has no {{{field}}}; give some of {names}")
        path = _FIELD.sub(lambda field: fields[field[1]], own)
        if not path.endswith(".*"):
            if is_present(path):
                return path
            raise RasterError(
                f"{keys[0]}: {image} has no {what} {path}, which {keys[1]} asks for; add them, or leave it out"
            )
        paths = [each for each in (path[:-2] + ending for ending in IMAGE_ENDINGS) if is_there(each)]
        if len(paths) != 1:
            count = f"no {what}" if not paths else f"several {what} ({', '.join(paths)})"
            raise RasterError(f"{keys[0]}: {image} has {count} {path}; give one raster of {keys[1]} for each image")
        return paths[0]

    return find


def _expand(pattern: str, key: str, rules: SourceRules) -> list[RasterSource]:
    if several := joined_paths(pattern):
        return joined([_expand(each, key, rules) for each in several], several, key)
    array = parse_array_name(pattern)
    if array is not None:
        return _arrays(pattern, array, key)
    if is_bucket_folder(pattern):
        return _rasters(pattern, list_folder(pattern, key), key)
    if parse_s3(pattern) and glob.has_magic(pattern):
        magic = next(at for at in range(len(pattern)) if glob.has_magic(pattern[at]))
        folder = os.path.dirname(pattern[:magic]) + "/"
        urls = list_folder(folder, key, deep="/" in pattern[len(folder) :] or "**" in pattern)
        if pattern not in urls:  # by the rules of `glob`: names that begin with a dot are hidden
            shown = [url for url in urls if "/." in pattern or "/." not in f"/{url[len(folder) :]}"]
            return _matches(pattern, sorted(url for url in shown if matched(pattern, url)), key)
        return _matches(pattern, [pattern], key)  # an object of this very name
    if is_named(pattern):
        return [RasterSource(pattern)]
    if parse_store_name(pattern) or is_tile_store(pattern):
        return [RasterSource(*names) for names in store_images(pattern)]
    if os.path.isdir(pattern):
        return _rasters(pattern, [os.path.join(pattern, name) for name in os.listdir(pattern)], key)
    kind = irregular_kind(pattern)
    if kind is not None:
        raise RasterError(f"{key}: {pattern} is {kind}; give a regular file")
    if is_list(pattern):
        return listed(pattern, key, rules)
    if os.path.exists(pattern):
        return [RasterSource(pattern)]
    if not glob.has_magic(pattern):
        raise RasterError(f"{key}: {pattern} does not exist; {MISSING}")
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path))
    return _matches(pattern, paths, key)


def _arrays(pattern: str, array: ArrayName, key: str) -> list[RasterSource]:
    """Return the variable of each store that a name, or a glob of local stores, matches."""
    if glob.has_magic(array.store) and not os.path.exists(array.store):
        if is_remote(array.store):
            raise RasterError(f"{key}: {pattern} is a glob of stores at a URL; name each of them, in a list say")
        stores = _matches(array.store, sorted(glob.glob(array.store, recursive=True)), key)
        own = [(one.wildcards, array._replace(store=str(one.path))) for one in stores]
        return [each._replace(wildcards=texts) for texts, one in own for each in _arrays(str(one), one, key)]
    tiles = [] if array.variable or not existing(pattern, key) else stored_tiles(array.store)
    return [RasterSource(image, labels) for image, labels in tiles] or [RasterSource(existing(pattern, key))]


def _matches(pattern: str, paths: Sequence[str], key: str) -> list[RasterSource]:
    if not paths:
        raise RasterError(f"{key}: nothing matches the glob {pattern}; {MISSING}")
    return [RasterSource(path, wildcards=matched(pattern, path)) for path in paths]


def matched(pattern: str, path: str) -> tuple[str, ...]:
    """Return the text of each wildcard of a glob in a path that it matches; nothing for another path."""
    expression, at = "", 0
    for wildcard in _WILDCARDS.finditer(pattern):
        expression += re.escape(pattern[at : wildcard.start()])
        inner = wildcard[0][1:-1]
        expression += _EXPRESSIONS.get(wildcard[0]) or f"([{'^' + inner[1:] if inner.startswith('!') else inner}])"
        at = wildcard.end()
    match = re.fullmatch(expression + re.escape(pattern[at:]), path)
    return tuple((part or "").rstrip("/") for part in match.groups()) if match else ()


def _rasters(folder: str, paths: Iterable[str], key: str) -> list[RasterSource]:
    """Return the rasters among a folder's `paths`, by their endings."""
    rasters = sorted(path for path in paths if path.lower().endswith(IMAGE_ENDINGS))
    if not rasters:
        endings = ", ".join(IMAGE_ENDINGS)
        raise RasterError(f"{key}: the folder {folder} holds no raster ({endings}); give another, or a glob")
    return [RasterSource(path, wildcards=(os.path.splitext(os.path.basename(path))[0],)) for path in rasters]
