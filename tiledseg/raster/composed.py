"""Images made of several rasters: stacked bands, mosaics, and masks.

The name of such an image lists its rasters, as JSON after `composed:`. So ranks, maps and checkpoints open the same
files even if the list or the glob changes later. `label` is the short form for messages; that of several times has
braces around the differing texts of the paths, `s2/north_{0401,0620}.tif`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from tiledseg.errors import RasterError, renamed
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.array_names import file_of, parse_array_name
from tiledseg.raster.gdal_reader import MOST_PIXELS
from tiledseg.raster.info import RasterInfo, check_grids_match, is_placed
from tiledseg.raster.mirrored_reader import DerivedReader, RasterReader, as_stored, prefetch, reading
from tiledseg.raster.places import covers, warped_reader
from tiledseg.raster.statistics import check_alike

BANDS, TIMES, MOSAIC, VALID = "bands", "times", "mosaic", "valid"
_PREFIX = "composed:"
JOINED = re.compile(r"([^{}]*)\{([^{}]*,[^{}]*)\}([^{}]*)")
_WORDS = re.compile(r"(?:.*[/_.=-])?", re.DOTALL)


class Composed(NamedTuple):
    """An image of `kind`. `BANDS`, `TIMES`: the bands of its parts, one after the other. `MOSAIC`: its parts side by
    side, the first on top. `VALID`: the first part, valid where the second one, or the first's band `number`, has one
    of `values` (none: is not 0)."""

    label: str
    kind: str
    parts: tuple[Raster, ...]
    number: int | None = None
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        return _PREFIX + json.dumps(self, ensure_ascii=False, separators=(",", ":"))


Raster = str | Composed
"""An image as a value: the path of one raster, or several rasters. `str` gives its name."""

Opener = Callable[[Raster, Sequence[int] | None, bool], RasterReader]
"""Opens a raster with bands (None: all); True: it is an image, to which the user's nodata value applies."""


def parse_raster(name: Raster) -> Raster:
    """Parse the name of a composed image; return another raster unchanged."""
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return name
    with reading(f"read the name {name[:80]}", "give the path of a raster"):
        return _composed(json.loads(name.removeprefix(_PREFIX)))


def _composed(words: list[Any]) -> Composed:
    parts = tuple(part if isinstance(part, str) else _composed(part) for part in words[2])
    return Composed(words[0], words[1], parts, words[3], tuple(words[4]))


def files_of(raster: Raster) -> list[str]:
    """Return the paths of an image's rasters."""
    return [raster] if isinstance(raster, str) else [file for part in raster.parts for file in files_of(part)]


def label_of(raster: Raster) -> str:
    """Return the short name of an image, for messages and file names."""
    raster = parse_raster(raster)
    return raster if isinstance(raster, str) else raster.label


def has_kind(raster: Raster, kind: str) -> bool:
    """Return True if an image, or a part of it, is of this kind."""
    return isinstance(raster, Composed) and (raster.kind == kind or any(has_kind(part, kind) for part in raster.parts))


def joined_paths(name: str) -> tuple[str, ...]:
    """Return the paths, or patterns, of a name with braces, one for each time; none for another name."""
    match = None if os.path.exists(file_of(name)) else JOINED.fullmatch(name)
    return tuple(match[1] + text + match[3] for text in match[2].split(",")) if match else ()


def joined_label(paths: Sequence[str]) -> str:
    """Return the label of an image joined from rasters of several times."""
    before = _shared(paths)
    after = _shared([path[len(before) :][::-1] for path in paths])[::-1]
    texts = [path[len(before) : len(path) - len(after)] for path in paths]
    return f"{before}{{{','.join(texts)}}}{after}"


def _shared(texts: Sequence[str]) -> str:
    """Return the longest common prefix of whole words."""
    match = _WORDS.match(os.path.commonprefix(list(texts)))  # noqa: RUF071
    return match[0] if match else ""


def stem_of(raster: Raster) -> str:
    """Return the stem of files named after an image: its file's without ending, the item's, that of several times
    without braces, or the first part's."""
    raster = parse_raster(raster)
    if isinstance(raster, str):
        array = parse_array_name(raster)
        return os.path.splitext(os.path.basename(raster))[0] if array is None else array.stem
    if raster.kind in (BANDS, TIMES) and has_kind(raster, BANDS):
        return raster.label.rpartition("#")[2]
    name = os.path.basename(re.sub(r"[_.=-]?\{.*\}", "", raster.label)) if raster.kind == TIMES else ""
    return stem_of(raster.parts[0]) if name[:1] in ("", ".") else os.path.splitext(name)[0]


def open_composed(image: Composed, bands: Sequence[int] | None, opener: Opener) -> RasterReader:
    """Open a composed image. Raises RasterError with both values if its parts do not fit together."""
    if image.kind == VALID:
        return _open_valid(image, bands, opener)
    threads = 8 if len(image.parts) > 8 else 0  # parts on a server open slowly
    own = bands if image.kind in (MOSAIC, TIMES) else None
    parts = list(prefetch(image.parts, lambda part: opener(part, own, True), threads, 2 * threads))
    if image.kind == MOSAIC:
        return _mosaic_reader(image.label, parts)
    if image.kind == TIMES:
        read = [number for part in parts for number in part.info.band_numbers]
        return stacked_reader(image.label, parts, read, range(len(read)), len(parts))
    every = [(at, number) for at, part in enumerate(parts) for number in part.info.band_numbers]
    numbers = range(1, len(every) + 1) if bands is None else bands
    for number in numbers:
        if not 1 <= number <= len(every):
            raise RasterError(
                f"data.bands asks for band {number}, but {image.label} has bands 1 to {len(every)}; give some of these"
            )
    chosen = [every[number - 1] for number in numbers]
    if bands is not None:
        for part in parts:
            part.close()
        parts = [opener(image.parts[at], [k for one, k in chosen if one == at], True) for at in sorted(dict(chosen))]
    order = sorted(range(len(chosen)), key=lambda place: chosen[place][0])  # the order in which parts are read
    return stacked_reader(image.label, parts, numbers, [order.index(place) for place in range(len(chosen))])


def _open_valid(image: Composed, bands: Sequence[int] | None, opener: Opener) -> RasterReader:
    source = opener(image.parts[0], bands, True)
    if image.number is not None and bands is None:
        data = [number for number in source.info.band_numbers if number != image.number]
        if not data:
            raise RasterError(f"{source.info.path} has no band but {image.number}, its mask by data.valid; give others")
        source.close()
        source = opener(image.parts[0], data, True)
    with renamed({} if image.number is None else {"data.bands": "data.valid"}):
        mask = opener(image.parts[-1], None if image.number is None else [image.number], False)
    if mask.info.bands != 1:
        raise RasterError(
            f"data.valid is {mask.info.path} with {mask.info.bands} bands; give a raster of one, whose pixels are 0 "
            f"where {image.label} is not valid"
        )
    try:
        check_grids_match(source.info, mask.info)
        if source.info.crs is not None and mask.info.crs is None:
            raise RasterError(f"{mask.info.path} has no CRS")  # `warped_reader` raises the user's error
    except RasterError:
        own, mask = mask.info, warped_reader(mask, source.info, "data.valid")
        if not covers(own, source.info):
            part = f"{source.info.path}: {own.path} of data.valid covers only a part; pixels beyond it are not valid"
            source.info = replace(source.info, notes=(*source.info.notes, part))

    dtype = np.dtype(mask.info.dtype)
    stored = [value for value in (as_stored(value, dtype) for value in image.values) if value is not None]

    def inside(box: Box) -> NDArray[np.bool_]:
        (values_HW,), valid_HW = mask.read(box)
        counting_HW = np.isin(values_HW, stored) if image.values else np.nan_to_num(values_HW) != 0
        return counting_HW if image.number is not None else counting_HW & valid_HW

    return masked_reader(source, inside, [mask])


Inside = Callable[[Box], NDArray[np.bool_]]
"""Returns a mask (height, width) of the pixels that count, of a box within the raster."""


def masked_reader(source: RasterReader, inside: Inside, others: Sequence[RasterReader] = ()) -> RasterReader:
    """Return a reader of `source` whose pixels are valid only `inside`. It closes `source` and `others`, those of the
    mask."""

    def derive(box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        pixels_CHW, valid_HW = source.read(box)
        return pixels_CHW, valid_HW & inside(box)

    files = dict.fromkeys(file for reader in (source, *others) for file in reader.info.files)
    info = replace(source.info, has_mask=True, files=tuple(files))
    return DerivedReader(info, derive, (source, *others))


def stacked_reader(
    label: str, parts: Sequence[RasterReader], numbers: Sequence[int], order: Sequence[int], times: int = 1
) -> RasterReader:
    """Return a reader of the bands of `parts`, counted part by part and put into `order`. A pixel is valid by the rules
    of one file with all these bands; of several `times`, if it is valid in each."""
    infos = [part.info for part in parts]
    check_alike(infos if times > 1 else [replace(info, bands=1) for info in infos])
    for info in infos[1:]:
        check_grids_match(infos[0], info)
    files = [part for part in parts if not isinstance(part, DerivedReader)]  # a stack judges its own pixels
    stored = [value for part in files for value in part.nodata or ()]
    as_one = times == 1 and len(stored) == len(order)
    in_order = list(order) == sorted(order)

    def derive(box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        read = [part.read_stored(box) if as_one else part.read(box) for part in parts]
        pixels_CHW = np.concatenate([pixels for pixels, _ in read])
        valid_HW = reduce(np.logical_and, (valid for _, valid in read))
        return pixels_CHW if in_order else pixels_CHW[list(order)], valid_HW

    info = _merged(label, infos, bands=len(numbers), band_numbers=tuple(numbers), times=times)
    return DerivedReader(info, derive, parts, [stored[at] for at in order] if as_one else None)


def _mosaic_reader(label: str, parts: Sequence[RasterReader]) -> RasterReader:
    """Return a reader of a mosaic of rasters on one pixel grid. Each pixel comes from the first part with a valid one
    there; pixels outside all parts are not valid."""
    infos = [part.info for part in parts]
    check_alike(infos)
    boxes = [_place(infos[0], info) for info in infos]
    hull = Box(*(reduce(Interval.hull, (getattr(box, side) for box in boxes)) for side in ("row", "col")))
    if hull.area > MOST_PIXELS:
        raise RasterError(f"{label} spans {hull.height} x {hull.width} px, of at most {MOST_PIXELS} in all; cut it")
    if len({info.palette for info in infos}) > 1:
        raise RasterError(f"the rasters of {label} have different colour tables; write them with one")
    first = hull.row.start, hull.col.start
    starts = ((box.row.start, box.col.start) for box in boxes)
    corner = next((info.transform for info, at in zip(infos, starts, strict=True) if at == first), None)
    info = _merged(
        label,
        infos,
        height=hull.height,
        width=hull.width,
        transform=corner or infos[0].transform @ Affine.translation(hull.col.start, hull.row.start),
        ground=None,
        has_mask=True,
        palette=infos[0].palette,
        class_names=tuple(dict.fromkeys(name for info in infos for name in info.class_names)),
    )
    fill = as_stored(info.nodata, np.dtype(info.dtype)) or 0
    places = [box.relative_to(hull) for box in boxes]

    def derive(box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        pixels_CHW = np.full((info.bands, *box.shape), fill, info.dtype)
        valid_HW = np.zeros(box.shape, np.bool_)
        for part, place in zip(parts, places, strict=True):
            inner = box.clip(place)
            at = inner.relative_to(box).slices
            if inner.area and not valid_HW[at].all():
                part_CHW, part_HW = part.read(inner.relative_to(place))
                pixels_CHW[:, *at] = np.where(valid_HW[at], pixels_CHW[:, *at], part_CHW)
                valid_HW[at] |= part_HW
        return pixels_CHW, valid_HW

    return DerivedReader(info, derive, parts)


def _place(first: RasterInfo, info: RasterInfo) -> Box:
    """Return the box of a raster in the pixels of `first`. Raises RasterError if they do not share a pixel grid."""
    for one in (first, info):
        if one.crs is None or not is_placed(one.transform):
            raise RasterError(f"{one.path} has no CRS or transform, which data.mosaic needs; give it one")
    left, top = (round(place) for place in ~first.transform @ (info.transform @ (0, 0)))
    there = first.transform @ Affine.translation(left, top)
    check_grids_match(replace(first, height=info.height, width=info.width, transform=there, ground=None), info)
    return Box.of_shape(info.shape).shift(top, left)


def _merged(label: str, infos: Sequence[RasterInfo], **changes: Any) -> RasterInfo:
    """Return the first info with `changes`, and with files, notes and sizes of all."""
    for info in infos:
        if info.tiling is not None:
            raise RasterError(f"{info.path} is a tile store, which is no part of {label}; give rasters")
    about: dict[str, Any] = {
        "path": label,
        "has_mask": any(info.has_mask for info in infos),
        "palette": None,
        "class_names": (),
        "files": tuple(dict.fromkeys(file for info in infos for file in info.files)),
        "notes": tuple(dict.fromkeys(note for info in infos for note in info.notes)),
        "references": "; ".join(dict.fromkeys(info.references for info in infos if info.references)),
        "size": sum(info.size for info in infos),
    }
    return replace(infos[0], **{**about, **changes})
