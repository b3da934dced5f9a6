"""The mapping from raw values or colours of labels to class numbers.

Classes are 0 ... count - 1. Pixels that must not count (nodata, alpha, values of ignored records) become
`ignore_index`. Any other raw value is an error with value, file and position, so wrong classes never train silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError, LabelError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import (
    ClassEntry,
    Classes,
    ClassRecord,
    Colour,
    default_classes,
    in_hex,
    pack,
    read_entry,
    records_of_map,
)
from tiledseg.raster.mirrored_reader import RasterReader

Pairs = tuple[tuple[int, int], ...]

_UNKNOWN = -1


@dataclass(frozen=True)
class LabelMap:
    """A map of raw values, or with `colours` of colours packed as 0xRRGGBB, to classes; `ignore_index`: not counted.

    `classes`: name and colour of each. `three_bands`: pairs of colours for labels of three bands, if no class has
    values (labels of one band then hold class numbers). `texts`: (word, class) pairs for attributes of polygons.
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
        """Return the map of `data.classes`, a number or a list of records. Raises ConfigError.

        Several raw values may share a class. The raw value `ignore_index` does not count, unless a record has it.
        """
        if isinstance(classes, int) and not isinstance(classes, bool):
            pairs = tuple((k, k) for k in range(min(classes, 256)))
            records = default_classes(classes) if 0 <= classes <= 255 else ()
            label_map = LabelMap(pairs, False, classes, ignore_index, records)
        else:
            if isinstance(classes, Mapping):
                raise ConfigError(
                    f"classes is a map, {shown(classes)}; give a list of records: {records_of_map(classes)}"
                )
            if not isinstance(classes, Sequence) or isinstance(classes, (str, bytes)):
                raise ConfigError(
                    f"classes is {shown(classes)!r}; give a number of classes, or a list with a record for each class, "
                    "such as [{name: road, values: [7, 8]}, {name: void, ignored: true, values: [0]}]"
                )
            label_map = _of_entries([read_entry(record, at) for at, record in enumerate(classes)], ignore_index)
        count = label_map.count
        if not 2 <= count <= 255:
            raise ConfigError(f"{count} classes; give 2 to 255")
        if not count <= ignore_index <= 255:
            raise ConfigError(
                f"ignore_index {ignore_index} with classes 0 to {count - 1}; "
                f"give ignore_index {count} to 255, or a record with ignored: true"
            )
        return label_map

    def agrees(self, other: LabelMap) -> bool:
        """Return True if both map every label to the same class, and no name stands for different classes."""
        same = replace(self, classes=(), three_bands=()) == replace(other, classes=(), three_bands=())
        ours, theirs = ({record.name: k for k, record in enumerate(of.classes)} for of in (self, other))
        return (
            same
            and (self.three_bands == other.three_bands or not (self.three_bands and other.three_bands))
            and all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
        )

    @property
    def numbers(self) -> dict[str, int]:
        """Return class numbers by name, and by number as text; a class named like a number takes precedence."""
        return {str(k): k for k in range(self.count)} | {record.name: k for k, record in enumerate(self.classes)}

    def class_of(self, value: object) -> int | None:
        """Return the class of an attribute's value, a number or text (a value or a class's name); None if unknown."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return (self._of_numbers if is_number else self._of_texts).get(str(value))

    @cached_property
    def _of_numbers(self) -> dict[str, int]:
        return {} if self.colours else {str(raw): number for raw, number in self.pairs}

    @cached_property
    def _of_texts(self) -> dict[str, int]:
        names = {record.name: number for number, record in enumerate(self.classes)}
        return self._of_numbers | names | dict(self.texts)

    def resolve(self, info: RasterInfo) -> LabelMap:
        """Return the map for a raster: colours become palette indices if its one band has a colour table.

        Raises LabelError if the number of bands does not fit the classes, or if the raster's own class numbers mean
        other classes here.
        """
        if info.holds_classes:
            ours = {record.name: number for number, record in enumerate(self.classes)}
            for number, name in info.class_names:  # a class may have been renamed
                if ours.get(name, number) != number:
                    raise LabelError(
                        f"{info.path} holds class {name} as {number}, but in data.classes it is {ours[name]}; give the "
                        "classes in the order in which its polygons were drawn, or cut it again"
                    )
            return replace(self, pairs=tuple((k, k) for k in range(self.count)), colours=False)
        if self.three_bands and info.bands == 3:
            return replace(self, pairs=self.three_bands, colours=True, three_bands=())
        if self.colours and info.bands == 1 and info.palette is not None:
            numbers = dict(self.pairs)
            indices = ((index, numbers.get(pack(colour))) for index, colour in info.palette)
            pairs = tuple((index, number) for index, number in indices if number is not None)
            return replace(self, pairs=pairs, colours=False)
        if info.bands != (3 if self.colours else 1):
            what = "colours, which need 3 bands or a colour table" if self.colours else "raw values, which need 1 band"
            raise LabelError(f"{info.path} has bands: {info.bands}, but classes are {what}; change one of them")
        return self

    def apply(
        self,
        raw_CHW: NDArray,
        valid_HW: NDArray[np.bool_] | None = None,
        origin: tuple[int, int] = (0, 0),
        path: object = "labels",
    ) -> NDArray[np.uint8]:
        """Return the classes, uint8 (H, W), of raw pixels (C, H, W); invalid pixels become `ignore_index`.

        Raises LabelError for the first valid pixel whose value is in no class; `origin` (row, col) and `path` serve its
        message only.
        """
        if not np.issubdtype(raw_CHW.dtype, np.integer):
            raise LabelError(f"{path} holds {raw_CHW.dtype} values; labels must be whole numbers (uint8 ... int32)")
        raw_HW = raw_CHW[0]
        if self.colours:
            if raw_CHW.dtype != np.uint8 or raw_CHW.shape[0] < 3:
                raise LabelError(
                    f"{path} has {raw_CHW.shape[0]} bands of {raw_CHW.dtype}, but classes are colours; "
                    "give 3 bands of uint8, or classes as raw values"
                )
            red, green, blue = raw_CHW[:3].astype(np.uint32)
            raw_HW = (red << 16) | (green << 8) | blue
        pairs = dict(self.pairs)
        if not self.colours:
            pairs.setdefault(self.ignore_index, self.ignore_index)
        if raw_HW.dtype.itemsize <= 2:
            limits = np.iinfo(raw_HW.dtype)
            table = np.full(limits.max - limits.min + 1, _UNKNOWN, np.int16)
            for raw, number in pairs.items():
                if limits.min <= raw <= limits.max:
                    table[raw % table.size] = number
            classes_HW = table[raw_HW.view(f"u{raw_HW.dtype.itemsize}")]
        else:
            keys = np.array(sorted(pairs), np.int64)
            numbers = np.array([pairs[key] for key in keys.tolist()], np.int16)
            at = np.minimum(np.searchsorted(keys, raw_HW), keys.size - 1)
            classes_HW = np.where(keys[at] == raw_HW, numbers[at], np.int16(_UNKNOWN))
        if valid_HW is not None:
            classes_HW[~valid_HW] = self.ignore_index
        if classes_HW.size and classes_HW.min() == _UNKNOWN:
            row, col = np.unravel_index(int(np.argmax(classes_HW == _UNKNOWN)), classes_HW.shape)
            form = "#{:06x}" if self.colours else "{}"
            known = sorted(key for key, _ in self.pairs)
            listed = ", ".join(map(form.format, known[:6])) + (", ..." if len(known) > 6 else "")
            raise LabelError(
                f"{path} holds {'colour' if self.colours else 'value'} {form.format(int(raw_HW[row, col]))} at "
                f"(row {origin[0] + row}, col {origin[1] + col}), outside the classes ({listed}); add it to the values "
                "of a class, or of a record with ignored: true"
            )
        return classes_HW.astype(np.uint8)


def _of_entries(entries: Sequence[ClassEntry], ignore_index: int) -> LabelMap:
    """Return the map of records. Raises ConfigError if two share a name or a value, or only some have values."""
    kept = [entry for entry in entries if not entry.ignored]
    if not kept:
        raise ConfigError("classes holds no class; give 2 to 255")
    records = tuple(entry.record(number) for number, entry in enumerate(kept))
    names = [record.name for record in records]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"classes has two classes named {name}; give each class a name of its own")
    plain = [entry for entry in entries if entry.values is None]
    if plain:
        if len(plain) < len(entries) or len(kept) < len(entries):
            raise ConfigError(
                f"class {plain[0].name} has no values, but other classes have, or are ignored; give each its values"
            )
        three_bands: Pairs = ()
        if all(entry.colour is not None for entry in kept):
            table = _table([(record.name, number, (record.colour,)) for number, record in enumerate(records)])
            three_bands = tuple(sorted((pack(colour), number) for colour, number in table.items()))
        pairs = tuple((number, number) for number in range(len(kept)))
        return LabelMap(pairs, False, len(kept), ignore_index, records, three_bands)
    numbers = [ignore_index if entry.ignored else names.index(entry.name) for entry in entries]
    table = _table([(entry.name, number, entry.values or ()) for entry, number in zip(entries, numbers, strict=True)])
    texts = tuple((value, number) for value, number in table.items() if isinstance(value, str))
    colours = tuple(sorted((pack(value), number) for value, number in table.items() if isinstance(value, tuple)))
    raws = tuple(sorted((value, number) for value, number in table.items() if isinstance(value, int)))
    if colours and raws:
        raise ConfigError("classes mixes raw values and colours; use one kind")
    return LabelMap(colours or raws, bool(colours), len(kept), ignore_index, records, texts=texts)


def _table(owners: Sequence[tuple[str, int, Sequence[int | Colour | str]]]) -> dict[Any, int]:
    """Return the class of each value, from (name, class, values). Raises ConfigError for a value of two records."""
    first: dict[Any, int] = {}
    for at, (name, _, values) in enumerate(owners):
        for value in values:
            other = first.setdefault(value, at)
            if other != at:
                what = f"value {value}" if isinstance(value, int) else repr(value)
                what = f"colour {in_hex(value)}" if isinstance(value, tuple) else shown(what)
                raise ConfigError(f"classes gives {what} to both {owners[other][0]} and {name}; keep one")
    return {value: owners[at][1] for value, at in first.items()}


def read_labels(reader: RasterReader, label_map: LabelMap, box: Box) -> NDArray[np.uint8]:
    """Return the classes of the pixels of `box`, uint8 (H, W); invalid pixels become `ignore_index`.

    Raises LabelError for a value outside the classes, and errors of the reader.
    """
    pixels_CHW, valid_HW = reader.read(box)
    resolved = label_map.resolve(reader.info)
    return resolved.apply(pixels_CHW, valid_HW, (box.row.start, box.col.start), reader.info.path)


def count_classes(classes_HW: NDArray[np.uint8], valid_HW: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """Count the valid pixels of each of `count` classes; larger class numbers do not count."""
    return np.bincount(classes_HW[valid_HW], minlength=256)[:count].astype(np.int64)


def median_frequency_weights(counts: NDArray[np.int64]) -> tuple[float, ...]:
    """Return the weight of each class: the median of all classes' frequencies over its own. `counts`: int64 (images,
    classes), pixels.

    A class's frequency is its number of pixels over the valid pixels of all images that have it (Eigen and Fergus, ICCV
    2015, section 5; SegNet, section 3.1; MATLAB's PixelCount / ImagePixelCount). A class without pixels is not in the
    median; its weight is 1. Fractions make the result independent of the order.
    """
    frequencies = []
    for of_class in counts.T:
        having = counts[of_class > 0]
        frequencies.append(Fraction(int(of_class.sum()), int(having.sum())) if len(having) else None)
    middle = median(present) if (present := [one for one in frequencies if one]) else Fraction(1)
    return tuple(float(middle / frequency) if frequency else 1.0 for frequency in frequencies)
