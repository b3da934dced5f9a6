"""Figures as words, and lines of plain text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

WIDTH = 80
_COUNTS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
Row = tuple[str, str, str]  # label, value, unit or remark


def wrapped(text: str, first: str = "  ", other: str = "    ") -> str:
    """Break a long line into lines, the first of which and the others begin so."""
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=other, break_on_hyphens=False)


def wrapped_lines(text: str) -> list[str]:
    """Break each line of a text into lines."""
    return [part for line in text.splitlines() for part in wrapped(line, "", "").splitlines()]


def aligned(rows: Sequence[Row]) -> str:
    """Return a line a row: labels to the left, values to the right, remarks after them."""
    labels, values = (max(len(row[i]) for row in rows) for i in range(2))
    lines = (f"{label.ljust(labels)}  {value.rjust(values)}  {remark}" for label, value, remark in rows)
    return "\n".join(wrapped(line, other=" " * (labels + values + 6)) for line in lines)


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


def figures_basis(machine: dict[str, Any]) -> str:
    """Return the source of a machine's figures."""
    basis = "measured" if machine["measured"] else "by datasheets and assumed shares of them, not measured"
    return f"{machine['profile']}, {basis}"
