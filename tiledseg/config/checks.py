"""What a single value of a configuration may be: its range stands beside the field, its check is here.

A number that no range holds, a null where none may stand, or text that no file name can hold is a ConfigError in one
line, before anything else looks at the value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from tiledseg.errors import ConfigError

AUTO = "auto"
LARGEST_HALO = 2**20  # pixels
MOST = 2**31 - 1
"""The most of anything that is counted: what every index, whatever its width, can hold."""
_SHOWN = 60


@dataclass(frozen=True)
class Range:
    """The numbers that a key may hold: both ends, but not `least` where `above`, nor `most` where `below`.

    Whole numbers only, where the ends are whole. NaN is in a range that says so; infinite only where an end is.
    `remedy`: what to give instead of less, where the key takes more than a number.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    nan: bool = False
    remedy: str = ""

    @property
    def whole(self) -> bool:
        return isinstance(self.least, int) and isinstance(self.most, int)

    def check(self, key: str, value: object, whole: object = None) -> None:
        """Raise ConfigError, naming the key, the value (or the `whole` that it is a part of) and the range, where the
        value is not in it."""
        remedy = self._remedy(value)
        if remedy:
            raise ConfigError(f"{key} is {shown(value if whole is None else whole)}; give {remedy}")

    def _remedy(self, value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return self.remedy or ("a whole number" if self.whole else "a number")
        if isinstance(value, float) and math.isnan(value):
            return None if self.nan else self._ends() or "a number"
        if value < self.least or (self.above and value == self.least):
            return self.remedy or self._ends() or f"at least {_plain(self.least)}"
        if value > self.most or (self.below and value == self.most):
            return self._ends() or self._less()
        return None

    def _less(self) -> str:
        most = _plain(self.most)
        return self.remedy if re.search(rf"\b{most}\b", self.remedy) else f"at most {most}"

    def _ends(self) -> str:
        """The range in words, where one of its ends is not in it."""
        if self.below:
            return f"a number in [{self.least:g}, {self.most:g})"
        return f"a number above {self.least:g}, {_plain(self.most)} at most" if self.above else ""


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def number(
    default: Any,
    least: float,
    most: float,
    *,
    above: bool = False,
    below: bool = False,
    nan: bool = False,
    remedy: str = "",
) -> Any:
    """A field of a dataclass with the range of its numbers: its own, those in its list, or None where it may be."""
    metadata = {"range": Range(least, most, above, below, nan, remedy)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def range_of(described: Field[Any]) -> Range | None:
    """The range that stands beside a field."""
    found = described.metadata.get("range")
    return found if isinstance(found, Range) else None


def check_values(group: str, values: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value cannot be, whatever the other fields say."""
    for described in fields(values):
        check_value(f"{group}.{described.name}", getattr(values, described.name), described)


def check_value(key: str, value: object, described: Field[Any]) -> None:
    """Raise ConfigError for a null that the field does not take, a number out of its range, or impossible text."""
    if value is None and not str(described.type).endswith("None"):
        raise ConfigError(f"{key} is null; give a value, or leave it out")
    allowed = range_of(described)
    for part in _parts(value):
        if isinstance(part, str) and (
            allowed is None or {"str", "Literal"} & set(re.findall(r"\w+", str(described.type)))
        ):
            _check_text(key, part)
        elif allowed is not None and part is not None and not isinstance(part, Mapping):  # a record is read elsewhere
            allowed.check(key, part, value)


def _parts(value: object) -> Iterator[object]:
    """The value itself, or what a list or a map holds (its keys too, where they are text)."""
    if isinstance(value, Mapping):
        yield from (name for name in value if isinstance(name, str))
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    else:
        yield value


def _check_text(key: str, text: str) -> None:
    if "\0" in text:
        raise ConfigError(f"{key} is {shown(text)}, which holds a NUL character; no file can have such a name")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{key} is {shown(text)}, which is not text in UTF-8; give a name in UTF-8") from None


def shown(value: object) -> str:
    """A value as a message shows it: cut where it is long, whole numbers of any length among it."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, str) and not value.isprintable() else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


TRANSPORTS = ("auto", "nccl", "gloo", "mpi")
"""What can carry the ranks' tensors; auto chooses by the devices."""


def one_of(key: str, value: str, known: tuple[str, ...], removed: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError where `value` is not a known word. `removed`: words of older versions, each with the word that
    replaces it."""
    if removed and value in removed:
        raise ConfigError(f"{key} is '{value}', which was removed; use {removed[value]}, which gives the same result")
    if value not in known:
        raise ConfigError(f"{key} is '{shown(value)}'; give one of {', '.join(known)}")


def counts_of(text: str) -> tuple[int, ...] | None:
    """Whole numbers of '[14,24,30]', '{14,24,30}' (as papers write a balance) or '14,24,30'; None for other text."""
    inner = re.fullmatch(r"\s*(?:\[(.*)\]|\{(.*)\}|([^\[\]{}]*))\s*", text)
    words = next((part for part in inner.groups() if part is not None), "").split(",") if inner else []
    if not words or not all(re.fullmatch(r"\s*[+-]?\d{1,18}\s*", word) for word in words):
        return None
    return tuple(map(int, words))


def rows_cols(key: str, value: int | list[int] | str, remedy: str) -> tuple[int, int]:
    """A number for both dims, or [rows, cols]. Raises ConfigError for anything else."""
    if isinstance(value, str):
        raise ConfigError(f"{key} is '{shown(value)}'; give {remedy}")
    values = value if isinstance(value, list) else [value, value]
    if len(values) != 2:
        raise ConfigError(f"{key} is {shown(value)}; give {remedy}")
    return values[0], values[1]
