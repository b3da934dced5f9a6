"""Lengths on the ground or in a raster, as configurations write them: `250 m`, `512 px`. Standard library only."""

from __future__ import annotations

import math
import re
from typing import NamedTuple


class Length(NamedTuple):
    """So many pixels, or metres."""

    number: float
    metres: bool = False

    def __str__(self) -> str:
        return f"{self.number:g} {'m' if self.metres else 'px'}"


def parse_length(text: str) -> Length | None:
    """A number that is not negative, with its unit; pixels are whole. None for other text."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(m|px)\s*", text)
    if found is None or (found[2] == "px" and "." in found[1]):
        return None
    return Length(float(found[1]), found[2] == "m")


def blocks_of(size: int, side: float) -> int:
    """Of `size` pixels: as many equal blocks as come nearest to `side` pixels each; one at least."""
    return max(1, math.floor(size / side + 0.5))
