"""The classes of a user: `data.classes`, its CSV files, names and colours.

`data.classes` is
- a number K: the labels' values are the classes 0 to K - 1;
- a list of records `{name, colour, value or values}`, in the order of the classes. A record with `ignored: true` is no
  class: its values do not count. If no record has values, labels of one band hold the classes' numbers, and labels of
  three bands their colours;
- the name of a CSV file with such records."""

from __future__ import annotations

import colorsys
import contextlib
import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as Xml

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError, InputError
from tiledseg.system.files import read_text

Colour = tuple[int, int, int]
Classes = int | Sequence[Mapping[str, Any]]

_FIRST: tuple[Colour, ...] = (
    *((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167)),
    *((86, 180, 233), (213, 94, 0), (240, 228, 66)),
)
"""Okabe and Ito's colours, distinct for any colour vision (Wong, Nature Methods 8, 441, 2011)."""

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
    """A class: name, and colour as red, green and blue, 0 to 255."""

    name: str
    colour: Colour


class ClassEntry(NamedTuple):
    """A record of `data.classes`. `values`: numbers, colours, and words of polygons' attributes; None if the record has
    none."""

    name: str
    colour: Colour | None
    values: tuple[int | Colour | str, ...] | None
    ignored: bool

    def record(self, number: int) -> ClassRecord:
        """Return the class, coloured by its own colour, else by its first value, else by the palette."""
        first = next((value for value in self.values or () if not isinstance(value, str)), None)
        by_value = first if isinstance(first, tuple) else default_class(number).colour
        return ClassRecord(self.name, self.colour or by_value)


def default_class(number: int) -> ClassRecord:
    """Return a class without a record, with a distinct colour for each `number` (0 to 254)."""
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


def in_hex(colour: tuple[int, ...]) -> str:
    return f"#{pack(colour):06x}"


def records_of_map(classes: Any) -> Any:
    """Return the records of an older version's map, from values or names to classes; other forms unchanged."""
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


def read_entry(written: Any, at: int) -> ClassEntry:
    """Parse record number `at` of `data.classes`. Raises ConfigError."""
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
    colour = record.get("colour")
    if colour is not None:
        with contextlib.suppress(ConfigError):
            colour = _value(colour)
        if not isinstance(colour, tuple):
            written = shown(record["colour"])
            raise ConfigError(f"class {name} has the colour {written}; give one such as '#ff0000' or [255, 0, 0]")
    if values is ...:
        return ClassEntry(name, colour, None, ignored)
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ConfigError(f"class {name} has values {shown(values)!r}; give a list such as [0, 7], or value: 0")
    return ClassEntry(name, colour, tuple(map(_value, values)), ignored)


def _value(written: object) -> int | Colour | str:
    """Return a value of labels: a number, a colour, or a word of an attribute. Raises ConfigError for anything else."""
    text = str(written).strip() if isinstance(written, str) or type(written) is int else ""
    if isinstance(written, (tuple, list)) and len(written) == 3 and all(type(part) is int for part in written):
        text = ",".join(map(str, written))
    if match := _HEX.fullmatch(text):
        red, green, blue = bytes.fromhex(match[1])
        return red, green, blue
    if match := _TRIPLE.fullmatch(text):
        red, green, blue = map(int, match.groups())
        if max(red, green, blue) <= 255:
            return red, green, blue
    if any(map(str.isalpha, text)) and not text.startswith("#"):
        return text
    if not _NUMBER.fullmatch(text):
        raise ConfigError(
            f"classes has the value {shown(written)!r}; give a raw value (7) or a colour ('#ff0000' or '255,0,0')"
        )
    if abs(int(text)) > _LARGEST_RAW:
        raise ConfigError(f"classes has the value {shown(written)}; give raw values that 64 bits can hold")
    return int(text)


def read_class_file(path: str) -> list[dict[str, Any]]:
    """Return the records of a CSV file in the form of `data.classes`. Raises ConfigError, naming file and line.

    The header has `name`, and some of `r`, `g`, `b` (or `red`, `green`, `blue`), `colour`, `value`, `class`. The column
    `class` groups rows into classes; `ignored` or empty: none. A class has the colour of the row of its name, else of
    its first row. Without the column `value`, the labels of a group hold its rows' colours.
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
        return [{key: row[key] for key in ("name", "colour") if row.get(key) or key == "name"} for row in rows]
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        group = row.get("class", row["name"])
        groups.setdefault("" if "class" in row and group.lower() in _IGNORED_GROUPS else group, []).append(row)
    records = []
    for name, members in groups.items():
        own = next((row.get("colour") for row in members if row["name"] == name), None) or members[0].get("colour")
        record = {"name": name, **({"colour": own} if own else {})} if name else {"name": "ignored", "ignored": True}
        values = [row.get("value", row.get("colour")) for row in members]
        if not all(values):
            lacks = members[[bool(value) for value in values].index(False)]["name"]
            raise ConfigError(f"{path}: {lacks} has no value and no colour; give one of them")
        records.append({**record, "values": values})
    return records


def csv_rows(
    path: str, text: str, column: str, example: str, error: type[InputError]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (`line 2`, words by column) of each row of a CSV; columns are in lower case. Raises `error`, with the
    `example` of a header, if the header lacks `column`, and for a row of another length."""
    reader = csv.reader(text.splitlines(), skipinitialspace=True)
    header = [word.strip().lower() for word in next(reader, [])]
    if column not in header:
        raise error(f"{path}, line 1 is {shown(','.join(header))!r}; give a header such as {example}")
    try:
        for words in reader:
            if not any(word.strip() for word in words):
                continue
            if len(words) != len(header):
                raise error(
                    f"{path}, line {reader.line_num} has {len(words)} columns, its header {len(header)}; give as many"
                )
            yield f"line {reader.line_num}", dict(zip(header, (word.strip() for word in words), strict=True))
    except csv.Error as problem:
        raise error(f"{path}, line {reader.line_num} is no CSV: {problem}; mend it") from None


def class_files(classes: Any) -> list[str]:
    """Return the file that `data.classes` names, in a list; an empty list for classes given in place."""
    return [classes] if isinstance(classes, str) else []


def read_classes(classes: Any) -> Any:
    """Return the classes, read from the file if one is named. Raises ConfigError if it holds no classes."""
    if not isinstance(classes, str):
        return classes
    if not classes.lower().endswith(".csv"):
        raise ConfigError(
            f"data.classes is '{classes}'; give a number, a list of records, or a file that ends with .csv and has a "
            "header such as name,r,g,b,class"
        )
    return read_class_file(classes)


def style_of(classes: Sequence[ClassRecord]) -> bytes:
    """Return QGIS's style of a class map, as XML: a colour and a name for each number."""
    root = Xml.Element("qgis", version="3.22", styleCategories="Symbology")
    pipe = Xml.SubElement(root, "pipe")
    renderer = Xml.SubElement(pipe, "rasterrenderer", type="paletted", band="1", opacity="1", alphaBand="-1")
    palette = Xml.SubElement(renderer, "colorPalette")
    for number, one in enumerate(classes):
        colour = in_hex(one.colour)
        Xml.SubElement(palette, "paletteEntry", value=str(number), label=one.name, color=colour, alpha="255")
    return Xml.tostring(root, encoding="utf-8", xml_declaration=True)


def add_names(sidecar: Path, classes: Sequence[ClassRecord]) -> None:
    """Add the classes' names to GDAL's file beside a map, and keep its other entries."""
    root = Xml.Element("PAMDataset")
    with contextlib.suppress(FileNotFoundError):
        root = Xml.parse(sidecar).getroot()
    band = root.find("PAMRasterBand[@band='1']")
    if band is None:
        band = Xml.SubElement(root, "PAMRasterBand", band="1")
    names = Xml.SubElement(band, "CategoryNames")
    for one in classes:
        Xml.SubElement(names, "Category").text = one.name
    Xml.ElementTree(root).write(sidecar, encoding="utf-8")
