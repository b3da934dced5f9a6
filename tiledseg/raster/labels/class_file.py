"""Classes from a CSV file, as the records that `data.classes` takes.

A CSV has a header with `name`, and some of `r`, `g`, `b` (or `red`, `green`, `blue`), `colour`, `value`, `class`.

A column `class` groups rows: the class that a row's labels belong to, `ignored` or empty for none. Classes come in the
order in which they are named first, with the colour of the row of their own name, else of their first row. Without a
column `value` grouped labels hold the rows' colours.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError
from tiledseg.system.files import read_text

_MOST_BYTES = 1 << 20
_IGNORED = ("", "ignored", "ignore", "-")
_COLUMNS = {"red": "r", "green": "g", "blue": "b", "color": "colour", "id": "value"}
"""Other names of columns; those that are no column of ours are not looked at."""


@dataclass(frozen=True)
class _Row:
    name: str
    colour: str | None
    value: str | None
    group: str | None


def read_class_file(path: str) -> list[dict[str, Any]]:
    """Return the records that `data.classes` takes. Raises ConfigError, naming the file and the line."""
    text = read_text(path, "the class file", _MOST_BYTES, "give a line of text a class", ConfigError)
    return _records(list(_csv_rows(path, text)), path)


def _csv_rows(path: str, text: str) -> Iterator[_Row]:
    reader = csv.reader(text.splitlines(), skipinitialspace=True)
    header = [_COLUMNS.get(word.strip().lower(), word.strip().lower()) for word in next(reader, [])]
    if "name" not in header:
        raise ConfigError(f"{path}, line 1 is {shown(','.join(header))!r}; give a header such as name,r,g,b")
    try:
        for words in reader:
            if not any(word.strip() for word in words):
                continue
            if len(words) != len(header):
                raise ConfigError(
                    f"{path}, line {reader.line_num} has {len(words)} columns, its header {len(header)}; give as many"
                )
            yield _csv_row(dict(zip(header, (word.strip() for word in words), strict=True)))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num} is no CSV: {error}; mend it") from None


def _csv_row(found: dict[str, str]) -> _Row:
    colour = found.get("colour") or None
    if {"r", "g", "b"} <= found.keys():
        colour = ",".join(found[band] for band in "rgb")
    return _Row(found["name"], colour, found.get("value"), found.get("class"))


def _records(rows: Sequence[_Row], path: str) -> list[dict[str, Any]]:
    """One record a class, and one for all that is ignored."""
    if not rows:
        raise ConfigError(f"{path} holds no class; give a line for each")
    if all(row.value is None and row.group is None for row in rows):
        return [_record(row.name, row.colour) for row in rows]
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        name = row.name if row.group is None else "" if row.group.lower() in _IGNORED else row.group
        groups.setdefault(name, []).append(row)
    records = []
    for name, members in groups.items():
        own = next((row.colour for row in members if row.name == name and row.colour), members[0].colour)
        values = [_value(row, path) for row in members]
        record = _record(name, own) if name else {"name": "ignored", "ignored": True}
        records.append({**record, "values": values})
    return records


def _record(name: str, colour: str | None) -> dict[str, Any]:
    return {"name": name} if colour is None else {"name": name, "colour": colour}


def _value(row: _Row, path: str) -> str:
    value = row.value if row.value is not None else row.colour
    if not value:
        raise ConfigError(f"{path}: {row.name} has no value and no colour; give one of them")
    return value
