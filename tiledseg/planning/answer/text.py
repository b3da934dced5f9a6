"""Figures as words and aligned lines of plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_WIDTH = 116
Row = tuple[str, str, str]  # label, value, unit or remark


def aligned(rows: Sequence[Row]) -> str:
    """Return a line a row: labels to the left, values to the right, remarks after them."""
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {a.ljust(widths[0])}  {b.rjust(widths[1])}  {c}".rstrip() for a, b, c in rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is its head: the first column and remarks, which have no head, to the left."""
    widths = [max(map(len, column)) if column[0] else 0 for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  " + "  ".join(line).rstrip() for line in lines)


def wrapped(text: str) -> str:
    """Break a long remark into lines."""
    return textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def words(value: Any) -> str:
    """Return a number, or the numbers of a list as '8 x 8'."""
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)


def size(count: int) -> str:
    """Return bytes in the largest fitting unit, '5.39 GiB'."""
    return " ".join(size_parts(count))


def size_parts(count: int) -> tuple[str, str]:
    """Return bytes as ('5.39', 'GiB')."""
    return _scaled(count, _UNITS, "B")


def count_parts(value: int) -> tuple[str, str]:
    """Return a number with the largest fitting prefix, ('1.53', 'T')."""
    return _scaled(value, _COUNTS, "")


def _scaled(value: int, units: Sequence[tuple[int, str]], smallest: str) -> tuple[str, str]:
    return next(((f"{value / unit:.2f}", word) for unit, word in units if value >= unit), (str(value), smallest))


def milliseconds(seconds: float) -> float:
    """Return milliseconds to four decimals."""
    return round(1000 * seconds, 4)


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
