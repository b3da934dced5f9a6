"""Classes as people write them: `data.classes`, its CSV files, names and colours.

`data.classes` is
- a number: classes 0 to K - 1, which are the labels' values;
- a list of records `{name, colour, value or values}`, in the order of the classes. A record with `ignored: true` is no
  class: its values are left out. Where no record has values, labels of one band hold the classes' numbers, and labels
  of three bands their colours;
- the name of a CSV file that holds such records."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError
from tiledseg.raster.text_files import csv_rows
from tiledseg.system.files import read_text

Colour = tuple[int, int, int]
Classes = int | Sequence[Mapping[str, Any]]

_FIRST: tuple[Colour, ...] = (
    *((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167)),
    *((86, 180, 233), (213, 94, 0), (240, 228, 66)),
)
"""Okabe and Ito's colours, which readers with any colour vision tell apart (Wong, Nature Methods 8, 441, 2011)."""

_GOLDEN = 0.6180339887498949
_TONES = ((0.75, 0.85), (0.45, 0.95), (0.85, 0.55), (0.35, 0.7))  # saturation and value, taken in turn

_LARGEST_RAW = 2**63 - 1
_KEYS = ("name", "colour", "value", "values", "ignored")
_LONGEST_NAME = 100
_HEX = re.compile(r"#([0-9a-fA-F]{6})")
_TRIPLE = re.compile(r"[\[(]?\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*[\])]?")
_NUMBER = re.compile(r"[+-]?\d{1,99}")

_MOST_FILE_BYTES = 1 << 20
_IGNORED_GROUPS = ("", "ignored", "ignore", "-")
_COLUMNS = {"red": "r", "green": "g", "blue": "b", "color": "colour", "id": "value"}


class ClassRecord(NamedTuple):
    """A class: `colour` is red, green and blue, 0 to 255."""

    name: str
    colour: Colour


class ClassEntry(NamedTuple):
    """A record of `data.classes`. `values`: raw values, and packed colours with True; None where it has none. `texts`:
    values that are words, which polygons may have."""

    name: str
    colour: Colour | None
    values: tuple[tuple[int, bool], ...] | None
    texts: tuple[str, ...]
    ignored: bool

    def record(self, number: int) -> ClassRecord:
        """Return the class. Without a colour of its own it has that of its first value, or the palette's."""
        if self.colour is not None:
            return ClassRecord(self.name, self.colour)
        raw, is_colour = self.values[0] if self.values else (0, False)
        return ClassRecord(self.name, unpack(raw) if is_colour else default_class(number).colour)


def default_class(number: int) -> ClassRecord:
    """Return the class `number` (0 to 254) that has no record, in a colour that no other such class has."""
    if number < len(_FIRST):
        return ClassRecord(f"class {number}", _FIRST[number])
    saturation, value = _TONES[number % len(_TONES)]
    red, green, blue = colorsys.hsv_to_rgb(number * _GOLDEN % 1, saturation, value)
    return ClassRecord(f"class {number}", (round(255 * red), round(255 * green), round(255 * blue)))


def default_classes(count: int) -> tuple[ClassRecord, ...]:
    return tuple(map(default_class, range(count)))


def pack(colour: tuple[int, ...]) -> int:
    """Return a colour as one number, 0xRRGGBB."""
    red, green, blue = colour[:3]
    return (red << 16) | (green << 8) | blue


def unpack(packed: int) -> Colour:
    return packed >> 16, packed >> 8 & 255, packed & 255


def in_hex(colour: tuple[int, ...]) -> str:
    return f"#{pack(colour):06x}"


def read_entries(classes: Any) -> list[ClassEntry]:
    """Return the records that `classes`, which is no number, means. Raises ConfigError in one line."""
    if isinstance(classes, Mapping):
        raise ConfigError(f"classes is a map, {shown(classes)}; give a list of records: {records_of_map(classes)}")
    if not isinstance(classes, Sequence) or isinstance(classes, (str, bytes)):
        raise ConfigError(
            f"classes is {shown(classes)!r}; give a number of classes, or a list with a record for each class, such as "
            "[{name: road, values: [7, 8]}, {name: void, ignored: true, values: [0]}]"
        )
    return [_entry(record, at) for at, record in enumerate(classes)]


def records_of_map(classes: Any) -> Any:
    """Return the list of records for a map, of a value or a name to a class, as older versions took; others as they
    are."""
    if not isinstance(classes, Mapping):
        return classes
    if any(isinstance(value, Mapping) for value in classes.values()):
        return [{"name": name, **record} for name, record in classes.items() if isinstance(record, Mapping)]
    values: dict[Any, list[Any]] = {}
    for value, number in classes.items():
        values.setdefault(number, []).append(value)
    ignored = values.pop(None, None)
    numbers = sorted(values, key=lambda number: (len(str(number)), str(number)))
    records = [{"name": f"class {number}", "values": values[number]} for number in numbers]
    return records if ignored is None else [*records, {"name": "ignored", "ignored": True, "values": ignored}]


def _entry(written: Any, at: int) -> ClassEntry:
    if not isinstance(written, Mapping):
        raise ConfigError(f"classes[{at}] is {shown(written)!r}; give a record such as {{name: road, values: [3]}}")
    record = {("colour" if key == "color" else key): value for key, value in written.items()}
    unknown = [key for key in record if key not in _KEYS]
    if unknown:
        raise ConfigError(f"classes[{at}] has the unknown key {shown(unknown[0])}; give some of {', '.join(_KEYS)}")
    name = record.get("name")
    name = str(name).strip() if isinstance(name, (str, int)) and not isinstance(name, bool) else ""
    if not name or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"classes[{at}] has the name {shown(record.get('name'))!r}; give each class a name, one line of "
            f"{_LONGEST_NAME} characters at most"
        )
    ignored = record.get("ignored", False)
    if not isinstance(ignored, bool):
        raise ConfigError(f"class {name} has ignored {shown(ignored)}; give true or false")
    values = (record["value"],) if "value" in record else record.get("values", ...)
    if "value" in record and "values" in record:
        raise ConfigError(f"class {name} has both value and values; keep one of them")
    colour = _colour(record.get("colour"), name)
    if values is ...:
        return ClassEntry(name, colour, None, (), ignored)
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ConfigError(f"class {name} has values {shown(values)!r}; give a list such as [0, 7], or one as value: 0")
    texts = tuple(value.strip() for value in values if _is_word(value))
    return ClassEntry(name, colour, tuple(_raw(value) for value in values if not _is_word(value)), texts, ignored)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and any(map(str.isalpha, value)) and not value.strip().startswith("#")


def _colour(written: object, name: str) -> Colour | None:
    if written is None:
        return None
    try:
        packed, is_colour = _raw(written)
    except ConfigError:
        is_colour = False
    if not is_colour:
        raise ConfigError(f"class {name} has the colour {shown(written)}; give one such as '#ff0000' or [255, 0, 0]")
    return unpack(packed)


def _raw(written: object) -> tuple[int, bool]:
    """Return the raw value, or the packed colour and True. Raises ConfigError for anything else."""
    text = str(written).strip() if isinstance(written, str) or type(written) is int else ""
    if isinstance(written, (tuple, list)) and len(written) == 3 and all(type(part) is int for part in written):
        text = ",".join(map(str, written))
    if match := _HEX.fullmatch(text):
        return int(match[1], 16), True
    if match := _TRIPLE.fullmatch(text):
        colour = tuple(int(part) for part in match.groups())
        if max(colour) <= 255:
            return pack(colour), True
    if not _NUMBER.fullmatch(text):
        raise ConfigError(
            f"classes has the value {shown(written)!r}; give a raw value (7) or a colour ('#ff0000' or '255,0,0')"
        )
    if abs(int(text)) > _LARGEST_RAW:
        raise ConfigError(f"classes has the value {shown(written)}; give raw values that 64 bits can hold")
    return int(text), False


def read_class_file(path: str) -> list[dict[str, Any]]:
    """Return the records of a CSV file as `data.classes` takes them. Raises ConfigError, naming the file and the line.

    Its header has `name`, and some of `r`, `g`, `b` (or `red`, `green`, `blue`), `colour`, `value`, `class`. A column
    `class` groups rows: the class that a row's labels belong to, `ignored` or empty for none. A class has the colour of
    the row of its own name, else of its first row. Without a column `value` grouped labels hold the rows' colours.
    """
    text = read_text(path, "the class file", _MOST_FILE_BYTES, "give a line of text a class", ConfigError)
    rows = []
    for _, words in csv_rows(path, text, "name", "name,r,g,b", ConfigError):
        row = {_COLUMNS.get(column, column): word for column, word in words.items()}
        if {"r", "g", "b"} <= row.keys():
            row["colour"] = ",".join(row[band] for band in "rgb")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path} holds no class; give a line for each")
    if not {"value", "class"} & rows[0].keys():
        return [_file_record(row["name"], row.get("colour")) for row in rows]
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        group = row.get("class", row["name"])
        groups.setdefault("" if "class" in row and group.lower() in _IGNORED_GROUPS else group, []).append(row)
    records = []
    for name, members in groups.items():
        own = next((row.get("colour") for row in members if row["name"] == name), None) or members[0].get("colour")
        record = _file_record(name, own) if name else {"name": "ignored", "ignored": True}
        records.append({**record, "values": [_file_value(row, path) for row in members]})
    return records


def _file_record(name: str, colour: str | None) -> dict[str, Any]:
    return {"name": name, "colour": colour} if colour else {"name": name}


def _file_value(row: Mapping[str, str], path: str) -> str:
    value = row.get("value", row.get("colour"))
    if not value:
        raise ConfigError(f"{path}: {row['name']} has no value and no colour; give one of them")
    return value


_ENDING = ".csv"


def read_classes(classes: Any, key: str = "data.classes") -> Any:
    """Return the classes, read where a file is named: a run does not depend on the file any more. `key` is what
    messages name.

    Raises ConfigError, naming the file, where it holds no classes.
    """
    if not isinstance(classes, str):
        return classes
    if not classes.lower().endswith(_ENDING):
        raise ConfigError(
            f"{key} is '{classes}'; give a number, a list of records, or a file that ends with {_ENDING} and has a "
            "header such as name,r,g,b,class"
        )
    return read_class_file(classes)


def class_files(classes: Any) -> list[str]:
    """Return the file that is named, for a list of all that a run reads."""
    return [classes] if isinstance(classes, str) else []
