"""Figures as words, parts of an answer as values and as lines of plain text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tiledseg.units import size

WIDTH = 80
_COUNTS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


class Row(NamedTuple):
    """A figure of a part: its key in JSON ("exact.bytes" lies in a map "exact") and its value. Its line of text, if it
    has a `label`: the value by a `form` (of `format`; B: bytes, #: a count with a prefix), and a remark."""

    key: str
    value: Any
    label: str = ""
    form: str = ""
    remark: str = ""


class Part(NamedTuple):
    """A part of an answer: its values as JSON has them, and the same as text."""

    values: dict[str, Any]
    text: str


def listed(title: str, rows: Sequence[Row], below: Sequence[str] = ()) -> Part:
    """Return the part with a line for each row that has a label: labels to the left, values to the right."""
    values, cells = dict[str, Any](), list[tuple[str, str, str]]()
    for key, value, label, form, remark in rows:
        outer, _, inner = key.rpartition(".")
        (values.setdefault(outer, {}) if outer else values)[inner] = value
        number, prefix = words(value), ""
        if form in ("B", "#"):
            number, prefix = size(value).split() if form == "B" else count_parts(value)
        elif form:
            number = format(value, form)
        cells += [(label, number, f"{prefix} {remark}".strip())] if label else []
    labels, numbers = (max(len(row[i]) for row in cells) for i in range(2))
    lines = (f"{label.ljust(labels)}  {number.rjust(numbers)}  {remark}" for label, number, remark in cells)
    text = [title, *(wrapped(line, other=" " * (labels + numbers + 6)) for line in lines), *map(wrapped, below)]
    return Part(values, "\n".join(text))


def tabled(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    shown: Mapping[str, Callable[[Mapping[str, Any]], str]],
    below: Sequence[str] = (),
) -> str:
    """Return a title, a table of the rows whose columns are `shown` so, and lines below it."""
    cells = [tuple(shown), *(tuple(show(row) for show in shown.values()) for row in rows)]
    return "\n".join([wrapped(title, ""), columns(cells), *map(wrapped, below)])


def wrapped(text: str, first: str = "  ", other: str = "    ") -> str:
    """Break a long line into lines, the first of which and the others begin so."""
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=other, break_on_hyphens=False)


def wrapped_lines(text: str) -> list[str]:
    """Break each line of a text into lines."""
    return [part for line in text.splitlines() for part in wrapped(line, "", "").splitlines()]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is its head: the first column and remarks, which have no head, to the left.
    Remarks that are too long for a line stand below their rows."""
    widths = [max(map(len, column)) if column[0] else 0 for column in zip(*rows, strict=True)]
    cells = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    lines = ["  " + "  ".join(row).rstrip() for row in cells]
    if rows[0][-1] or max(map(len, lines)) <= WIDTH:
        return "\n".join(lines)
    pairs = zip(columns([row[:-1] for row in rows]).splitlines(), rows, strict=True)
    return "\n".join(filter(None, (part for line, row in pairs for part in (line, wrapped(row[-1], "    ")))))


def words(value: Any) -> str:
    """Return a number, or the numbers of a list as '8 x 8'."""
    return " x ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def count_parts(value: int) -> tuple[str, str]:
    """Return a number with the largest fitting prefix, ('1.53', 'T')."""
    return next(((f"{value / unit:.2f}", word) for unit, word in _COUNTS if value >= unit), (str(value), ""))


def milliseconds(seconds: float) -> float:
    """Return milliseconds to four decimals."""
    return round(1000 * seconds, 4)


def time_of(milliseconds: float) -> str:
    """Return a time to four digits, '814 ms' or '1.604 s'."""
    return f"{milliseconds:.4g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.4g} s"


def duration(seconds: float) -> str:
    """Return seconds in the unit in which they are read."""
    for unit, word in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {word}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.4g} ms"
