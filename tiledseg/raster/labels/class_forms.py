"""The two ways to write `data.classes`, and the one table that each of them means.

- a number: classes 0 to K - 1, which are the labels' values;
- a list of records `{name, colour, value or values}`, in the order of the classes. A record with `ignored: true` is no
  class: its values are left out. Where no record has values, labels of one band hold the classes' numbers, and labels
  of three bands their colours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError
from tiledseg.raster.labels.classes import ClassRecord, Colour, default_class, default_classes, pack, unpack

Classes = int | Sequence[Mapping[str, Any]]
Pairs = tuple[tuple[int, int], ...]

LARGEST_CLASS, LARGEST_RAW = 255, 2**63 - 1
_KEYS = ("name", "colour", "value", "values", "ignored")
_LONGEST_NAME = 100
_HEX = re.compile(r"#([0-9a-fA-F]{6})")
_TRIPLE = re.compile(r"[\[(]?\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*[\])]?")
_NUMBER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class ClassTable:
    """`pairs`: raw value, or where `colours` packed colour, and class; `three_bands`: pairs of packed colours, which
    take their place for labels of three bands (none: such labels are refused, or `colours` holds already). `texts`:
    values that are neither numbers nor colours, which polygons may have, and their class."""

    pairs: Pairs
    colours: bool
    classes: tuple[ClassRecord, ...]
    three_bands: Pairs = ()
    texts: tuple[tuple[str, int], ...] = ()


def class_table(classes: Classes, ignore_index: int) -> ClassTable:
    """Return the table that `classes` means. Raises ConfigError, in one line, where it means nothing."""
    if isinstance(classes, int) and not isinstance(classes, bool):
        pairs = tuple((k, k) for k in range(min(classes, 256)))
        return ClassTable(pairs, False, default_classes(classes) if 0 <= classes <= LARGEST_CLASS else ())
    if isinstance(classes, Sequence) and not isinstance(classes, (str, bytes)):
        return _of_records([_Record.read(one, at) for at, one in enumerate(classes)], ignore_index)
    if isinstance(classes, Mapping):
        raise ConfigError(f"classes is a map, {shown(classes)}; give a list of records: {records_of_map(classes)}")
    raise ConfigError(
        f"classes is {shown(classes)!r}; give a number of classes, or a list with a record for each class, such as "
        "[{name: road, values: [7, 8]}, {name: void, ignored: true, values: [0]}]"
    )


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
    records = [
        {"name": f"class {number}", "values": values[number]}
        for number in sorted(values, key=lambda number: (len(str(number)), str(number)))
    ]
    return records if ignored is None else [*records, {"name": "ignored", "ignored": True, "values": ignored}]


def parse_raw(key: object) -> tuple[int, bool]:
    """(raw value or packed colour, whether it is a colour) of what a user has written. Raises ConfigError."""
    if isinstance(key, int) and not isinstance(key, bool):
        return _in_64_bits(key, key), False
    text = key.strip() if isinstance(key, str) else ""
    if isinstance(key, (tuple, list)) and len(key) == 3 and all(type(part) is int for part in key):
        text = ",".join(map(str, key))
    if match := _HEX.fullmatch(text):
        return int(match[1], 16), True
    if match := _TRIPLE.fullmatch(text):
        colour = tuple(int(part) for part in match.groups())
        if max(colour) <= 255:
            return pack(colour), True
    if _NUMBER.fullmatch(text) and len(text) < 100:
        return _in_64_bits(int(text), key), False
    raise ConfigError(
        f"classes has the value {shown(key)!r}; give a raw value (7) or a colour ('#ff0000' or '255,0,0')"
    )


def _in_64_bits(raw: int, key: object) -> int:
    if abs(raw) > LARGEST_RAW:
        raise ConfigError(f"classes has the value {shown(key)}; give raw values that whole numbers of 64 bits can hold")
    return raw


def _check_one_kind(kinds: set[bool]) -> None:
    if len(kinds) > 1:
        raise ConfigError("classes mixes raw values and colours; use one kind")


@dataclass(frozen=True)
class _Record:
    """One record as it is written; `values` None where it has none, and `texts` those that are words."""

    name: str
    colour: Colour | None
    values: tuple[tuple[int, bool], ...] | None
    texts: tuple[str, ...] = ()
    ignored: bool = False

    @staticmethod
    def read(written: Any, at: int) -> _Record:
        if not isinstance(written, Mapping):
            raise ConfigError(f"classes[{at}] is {shown(written)!r}; give a record such as {{name: road, values: [3]}}")
        record = {("colour" if key == "color" else key): value for key, value in written.items()}
        unknown = [key for key in record if key not in _KEYS]
        if unknown:
            raise ConfigError(f"classes[{at}] has the unknown key {shown(unknown[0])}; give some of {', '.join(_KEYS)}")
        name = _checked_name(record.get("name"), at)
        if not isinstance(record.get("ignored", False), bool):
            raise ConfigError(f"class {name} has ignored {shown(record['ignored'])}; give true or false")
        values = _values_of(record, name)
        texts = tuple(value for value in values or () if isinstance(value, str))
        raws = None if values is None else tuple(value for value in values if not isinstance(value, str))
        return _Record(name, _colour_of(record.get("colour"), name), raws, texts, record.get("ignored", False))


def _checked_name(name: object, at: int) -> str:
    text = str(name).strip() if isinstance(name, (str, int)) and not isinstance(name, bool) else ""
    if not text or not text.isprintable() or len(text) > _LONGEST_NAME:
        raise ConfigError(
            f"classes[{at}] has the name {shown(name)!r}; give each class a name, one line of {_LONGEST_NAME} "
            "characters at most"
        )
    return text


def _colour_of(written: object, name: str) -> Colour | None:
    if written is None:
        return None
    try:
        packed, is_colour = parse_raw(written)
    except ConfigError:
        is_colour = False
    if not is_colour:
        raise ConfigError(f"class {name} has the colour {shown(written)}; give one such as '#ff0000' or [255, 0, 0]")
    return unpack(packed)


def _values_of(record: Mapping[str, Any], name: str) -> tuple[tuple[int, bool] | str, ...] | None:
    """Raw values and colours, or, where they are words, themselves."""
    if "value" in record and "values" in record:
        raise ConfigError(f"class {name} has both value and values; keep one of them")
    if "value" in record:
        return (_value_of(record["value"], name),)
    if "values" not in record:
        return None
    values = record["values"]
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ConfigError(f"class {name} has values {shown(values)!r}; give a list such as [0, 7], or one as value: 0")
    return tuple(_value_of(value, name) for value in values)


def _value_of(value: object, name: str) -> tuple[int, bool] | str:
    if isinstance(value, str) and any(letter.isalpha() for letter in value) and not value.strip().startswith("#"):
        return value.strip()
    return parse_raw(value)


def _of_records(records: Sequence[_Record], ignore_index: int) -> ClassTable:
    kept = [record for record in records if not record.ignored]
    _check_names(kept)
    if not kept:
        raise ConfigError("classes holds no class; give 2 to 255")
    without = [record for record in records if record.values is None]
    if without and (len(without) < len(records) or len(kept) < len(records)):
        raise ConfigError(
            f"class {without[0].name} has no values, but other classes have, or are ignored; give each its values"
        )
    classes = tuple(_class_of(record, number) for number, record in enumerate(kept))
    if without:
        pairs = tuple((number, number) for number in range(len(kept)))
        given = all(record.colour is not None for record in kept)
        return ClassTable(pairs, False, classes, _by_colour(classes) if given else ())
    numbers = {id(record): number for number, record in enumerate(kept)}
    found: dict[int, _Record] = {}
    for record in records:
        for raw, _ in record.values or ():
            if found.setdefault(raw, record) is not record:
                raise _twice(raw, record.values or (), found[raw].name, record.name)
    kinds = {is_colour for record in records for _, is_colour in record.values or ()}
    _check_one_kind(kinds)
    table = {raw: numbers.get(id(record), ignore_index) for raw, record in found.items()}
    return ClassTable(
        tuple(sorted(table.items())), kinds == {True}, classes, texts=_texts(records, numbers, ignore_index)
    )


def _texts(records: Sequence[_Record], numbers: Mapping[int, int], ignore_index: int) -> tuple[tuple[str, int], ...]:
    found: dict[str, _Record] = {}
    for record in records:
        for text in record.texts:
            if found.setdefault(text, record) is not record:
                raise ConfigError(
                    f"classes gives '{shown(text)}' to both {found[text].name} and {record.name}; keep one"
                )
    return tuple((text, numbers.get(id(record), ignore_index)) for text, record in found.items())


def _class_of(record: _Record, number: int) -> ClassRecord:
    """Without a colour of its own a class has that of its first value, or the palette's."""
    if record.colour is not None:
        return ClassRecord(record.name, record.colour)
    raw, is_colour = record.values[0] if record.values else (0, False)
    return ClassRecord(record.name, unpack(raw) if is_colour else default_class(number).colour)


def _check_names(records: Iterable[_Record]) -> None:
    known: set[str] = set()
    for record in records:
        if record.name in known:
            raise ConfigError(f"classes has two classes named {record.name}; give each class a name of its own")
        known.add(record.name)


def _by_colour(classes: Sequence[ClassRecord]) -> Pairs:
    found: dict[int, int] = {}
    for number, record in enumerate(classes):
        packed = pack(record.colour)
        if packed in found:
            raise _twice(packed, ((packed, True),), classes[found[packed]].name, record.name)
        found[packed] = number
    return tuple(sorted(found.items()))


def _twice(raw: int, values: Iterable[tuple[int, bool]], one: str, other: str) -> ConfigError:
    what = f"colour #{raw:06x}" if (raw, True) in values else f"value {raw}"
    return ConfigError(f"classes gives {what} to both {one} and {other}; keep one")
