"""Quantities as configurations write them: lengths (`250 m`, `512 px`) and numbers of bytes (`16GiB`)."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from tiledseg.errors import ConfigError

MOST_BYTES = 2**63 - 1
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)} | {"KB": 1000}


class Length(NamedTuple):
    """A length in pixels, or in metres."""

    number: float
    metres: bool = False

    def __str__(self) -> str:
        return f"{self.number:g} {'m' if self.metres else 'px'}"


def parse_length(text: str) -> Length | None:
    """Parse a number that is not negative with its unit; pixels are whole. Return None for other text."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(m|px)\s*", text)
    if match is None or (match[2] == "px" and "." in match[1]):
        return None
    return Length(float(match[1]), match[2] == "m")


def blocks_of(size: int, side: float) -> int:
    """Return the number of equal blocks of `size` pixels that come nearest to `side` pixels each, one at least."""
    return max(1, math.floor(size / side + 0.5))


def parse_bytes(text: str) -> int:
    """Return the bytes of '16GiB', '16 GB', '512MiB', '1.5TiB' or a plain number. Raises ConfigError for anything else,
    and for a plain number that is no memory's: whoever writes 16 means gibibytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*", text)
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"memory '{text}' is no number of bytes; give 16GiB, 16GB, 512MiB or a plain number")
    size = float(match[1]) * _UNITS[match[2]]
    if not match[2] and 0 < size < 2**20:
        raise ConfigError(f"memory '{text}' has no unit; give {match[1]}GiB, or {match[1]}B for so many bytes")
    return int(size) if math.isfinite(size) else MOST_BYTES + 1
