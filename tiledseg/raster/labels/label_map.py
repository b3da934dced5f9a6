"""Labels: from the raw values or colours of a file to class numbers.

Classes are 0 ... count - 1. Everything that must not count (nodata, alpha, values mapped to nothing) becomes
`ignore_index`. A raw value that is neither is an error that says which value, in which file and where: a wrong map
must never train quietly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import ConfigError, LabelError, RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.georeferencing import is_placed
from tiledseg.raster.info import Colour, RasterInfo
from tiledseg.raster.labels.class_forms import Classes, Pairs, class_table
from tiledseg.raster.labels.classes import ClassRecord, pack
from tiledseg.raster.mirrored_reader import RasterReader

_UNKNOWN = -1
_TOLERANCE_PIXELS = 0.01


@dataclass(frozen=True)
class LabelMap:
    """Which raw value, or colour packed as 0xRRGGBB, is which class; `ignore_index` as a class means "leave out".

    `classes`: name and colour of each. `three_bands`: pairs of colours for labels of three bands, where the classes
    have been given without values: labels of one band then hold their numbers. `texts`: values of polygons.
    """

    pairs: Pairs
    colours: bool
    count: int
    ignore_index: int
    classes: tuple[ClassRecord, ...] = ()
    three_bands: Pairs = ()
    texts: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def from_config(classes: Classes, ignore_index: int = 255) -> LabelMap:
        """A map from the `data.classes` key of a configuration, a number or a list of records (`class_forms`).

        Several raw values may share a class; class numbers must run from 0 without gaps. The raw value `ignore_index`
        is left out too, unless a record has it. Raises ConfigError.
        """
        table = class_table(classes, ignore_index)
        count = classes if isinstance(classes, int) else len(table.classes)
        more = table.classes, table.three_bands, table.texts
        return LabelMap(table.pairs, table.colours, count, ignore_index, *more)._checked()

    def agrees(self, other: LabelMap) -> bool:
        """Whether both give every label the same class, and no name has moved to another class."""
        same = replace(self, classes=(), three_bands=()) == replace(other, classes=(), three_bands=())
        ours, theirs = ({record.name: k for k, record in enumerate(of.classes)} for of in (self, other))
        return (
            same
            and (self.three_bands == other.three_bands or not (self.three_bands and other.three_bands))
            and all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
        )

    def _checked(self) -> LabelMap:
        if not 2 <= self.count <= 255:
            raise ConfigError(f"{self.count} classes; give 2 to 255")
        if not self.count <= self.ignore_index <= 255:
            raise ConfigError(
                f"ignore_index {self.ignore_index} with classes 0 to {self.count - 1}; "
                f"give ignore_index {self.count} to 255, or a record with ignored: true"
            )
        return self

    def class_of(self, value: object) -> int | None:
        """The class of a single value, which may be text: one of the values, else the name of a class; None for what is
        in no class."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return None if self.colours else dict(self.pairs).get(value)
        text = str(value)
        names = {record.name: number for number, record in enumerate(self.classes)}
        found = {**names, **dict(self.texts)}
        if text not in found and re.fullmatch(r"[+-]?\d{1,18}", text):
            return self.class_of(int(text))
        return found.get(text)

    def resolve(self, info: RasterInfo) -> LabelMap:
        """This map for the raster at hand: colours become palette indices where its one band has a colour table.

        Raises LabelError where the number of bands does not fit the keys of the map, or numbers of classes were stored
        that have another number here.
        """
        if info.holds_classes:
            self._check_stored(info)
            return replace(self, pairs=tuple((k, k) for k in range(self.count)), colours=False)
        if self.three_bands and info.bands == 3:
            return replace(self, pairs=self.three_bands, colours=True, three_bands=())
        if self.colours and info.bands == 1 and info.palette is not None:
            return self._through_palette(info.palette)
        if info.bands != (3 if self.colours else 1):
            what = "colours, which need 3 bands or a colour table" if self.colours else "raw values, which need 1 band"
            raise LabelError(f"{info.path} has bands: {info.bands}, but classes are {what}; change one of them")
        return self

    def _check_stored(self, info: RasterInfo) -> None:
        """A class may have another name, not another number."""
        ours = {record.name: number for number, record in enumerate(self.classes)}
        moved = [(number, name) for number, name in info.class_names if ours.get(name, number) != number]
        if moved:
            number, name = moved[0]
            raise LabelError(
                f"{info.path} holds class {name} as {number}, but in data.classes it is {ours[name]}; give the classes "
                "in the order in which its polygons were drawn, or cut it again"
            )

    def _through_palette(self, palette: tuple[tuple[int, Colour], ...]) -> LabelMap:
        known = dict(self.pairs)
        indices = ((index, known.get(pack(colour))) for index, colour in palette)
        pairs = tuple((index, number) for index, number in indices if number is not None)
        return replace(self, pairs=pairs, colours=False)

    def apply(
        self,
        raw_CHW: NDArray,
        valid_HW: NDArray[np.bool_] | None = None,
        origin: tuple[int, int] = (0, 0),
        path: object = "labels",
    ) -> NDArray[np.uint8]:
        """Class of every pixel, uint8 (H, W); `ignore_index` where `valid_HW` is False.

        `raw_CHW` is integer: one band of raw values, or red, green, blue for colours (further bands, alpha, are not
        looked at). `origin` (row, col) and `path` are only for the message of the LabelError raised at the first
        valid pixel, row by row, whose value is in no class.
        """
        if not np.issubdtype(raw_CHW.dtype, np.integer):
            raise LabelError(f"{path} holds {raw_CHW.dtype} values; labels must be whole numbers (uint8 ... int32)")
        raw_HW = self._packed(raw_CHW, path) if self.colours else raw_CHW[0]
        classes_HW = self._look_up(raw_HW)
        if valid_HW is not None:
            classes_HW[~valid_HW] = self.ignore_index
        if classes_HW.size and classes_HW.min() == _UNKNOWN:
            raise LabelError(self._unknown(raw_HW, classes_HW, origin, path))
        return classes_HW.astype(np.uint8)

    @staticmethod
    def _packed(raw_CHW: NDArray, path: object) -> NDArray[np.uint32]:
        if raw_CHW.dtype != np.uint8 or raw_CHW.shape[0] < 3:
            raise LabelError(
                f"{path} has {raw_CHW.shape[0]} bands of {raw_CHW.dtype}, but classes are colours; "
                "give 3 bands of uint8, or classes as raw values"
            )
        red, green, blue = raw_CHW[:3].astype(np.uint32)
        return (red << 16) | (green << 8) | blue

    def _look_up(self, raw_HW: NDArray) -> NDArray[np.int16]:
        pairs = dict(self.pairs)
        if not self.colours:
            pairs.setdefault(self.ignore_index, self.ignore_index)
        if raw_HW.dtype.itemsize <= 2:
            limits = np.iinfo(raw_HW.dtype)
            unsigned = np.dtype(f"u{raw_HW.dtype.itemsize}")
            table = np.full(limits.max - limits.min + 1, _UNKNOWN, np.int16)
            for raw, number in pairs.items():
                if limits.min <= raw <= limits.max:
                    table[raw % table.size] = number
            return table[raw_HW.view(unsigned)]
        keys = np.array(sorted(pairs), np.int64)
        numbers = np.array([pairs[key] for key in keys.tolist()], np.int16)
        at = np.minimum(np.searchsorted(keys, raw_HW), keys.size - 1)
        return np.where(keys[at] == raw_HW, numbers[at], np.int16(_UNKNOWN))

    def _unknown(self, raw_HW: NDArray, classes_HW: NDArray, origin: tuple[int, int], path: object) -> str:
        row, col = np.unravel_index(int(np.argmax(classes_HW == _UNKNOWN)), classes_HW.shape)
        raw = int(raw_HW[row, col])
        what = f"colour #{raw:06x}" if self.colours else f"value {raw}"
        known = sorted(key for key, _ in self.pairs)
        names = [f"#{key:06x}" if self.colours else str(key) for key in known[:6]]
        listed = ", ".join(names) + (", ..." if len(known) > 6 else "")
        return (
            f"{path} holds {what} at (row {origin[0] + row}, col {origin[1] + col}), outside the classes ({listed}); "
            "add it to the values of a class, or of a record with ignored: true"
        )


def read_labels(reader: RasterReader, label_map: LabelMap, box: Box) -> NDArray[np.uint8]:
    """Classes of the pixels of `box`, uint8 (H, W), `ignore_index` where the raster has no valid pixel.

    Raises LabelError for a value outside the classes, and what the reader raises. `label_map.resolve(reader.info)`
    once beforehand, and the map it gives, spares going through a colour table at each call.
    """
    pixels_CHW, valid_HW = reader.read(box)
    resolved = label_map.resolve(reader.info)
    return resolved.apply(pixels_CHW, valid_HW, (box.row.start, box.col.start), reader.info.path)


def check_grids_match(image: RasterInfo, labels: RasterInfo) -> None:
    """Raise RasterError, showing both, unless the two rasters lie on the same grid of pixels.

    Sizes must be equal. CRS and transform are compared where both rasters have one (a PNG has none), the transform
    at the raster's corners to a hundredth of a pixel, which forgives rounding in the file.
    """

    def differ(what: str, ours: object, theirs: object) -> RasterError:
        return RasterError(
            f"{image.path} and {labels.path} differ in {what}: {ours} against {theirs}; bring them to one grid"
        )

    if (image.height, image.width) != (labels.height, labels.width):
        ours, theirs = (f"{info.height} x {info.width} px" for info in (image, labels))
        raise differ("size", ours, theirs)
    if image.crs is not None and labels.crs is not None and image.crs != labels.crs:
        raise differ("CRS", image.crs, labels.crs)
    if image.ground is not None and labels.ground is not None and image.ground != labels.ground:
        raise differ("ground control", *(f"{len(ground.points)} points" for ground in (image.ground, labels.ground)))
    both = is_placed(image.transform) and is_placed(labels.transform)
    if both and _distance_pixels(image, labels) > _TOLERANCE_PIXELS:
        ours, theirs = (
            f"({', '.join(f'{x:.10g}' for x in tuple(t)[:6])})" for t in (image.transform, labels.transform)
        )
        raise differ("transform", ours, theirs)


def _distance_pixels(image: RasterInfo, labels: RasterInfo) -> float:
    """How far apart, in image pixels, the two transforms put the corners of the raster."""
    corners = np.array([(col, row, 1) for col in (0, image.width) for row in (0, image.height)], float).T
    ours, theirs = (np.array(tuple(info.transform), float)[:6].reshape(2, 3) for info in (image, labels))
    apart = np.linalg.lstsq(ours[:, :2], (theirs - ours) @ corners, rcond=None)[0]
    return float(np.abs(apart).max())
