"""A class as people know it: a name and a colour; and the colours of classes that have been given none."""

from __future__ import annotations

import colorsys
from typing import NamedTuple

Colour = tuple[int, int, int]

_FIRST: tuple[Colour, ...] = (
    *((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167)),
    *((86, 180, 233), (213, 94, 0), (240, 228, 66)),
)
"""Okabe and Ito's colours, which readers with any colour vision tell apart (Wong, Nature Methods 8, 441, 2011)."""

_GOLDEN = 0.6180339887498949
_TONES = ((0.75, 0.85), (0.45, 0.95), (0.85, 0.55), (0.35, 0.7))  # saturation and value, taken in turn


class ClassRecord(NamedTuple):
    """A class: `colour` is red, green and blue, 0 to 255."""

    name: str
    colour: Colour


def default_class(number: int) -> ClassRecord:
    """The class `number` (0 to 254) where nothing is known of it: its name says so, no other class has its colour."""
    if number < len(_FIRST):
        return ClassRecord(f"class {number}", _FIRST[number])
    saturation, value = _TONES[number % len(_TONES)]
    red, green, blue = colorsys.hsv_to_rgb(number * _GOLDEN % 1, saturation, value)
    return ClassRecord(f"class {number}", (round(255 * red), round(255 * green), round(255 * blue)))


def default_classes(count: int) -> tuple[ClassRecord, ...]:
    """`count` classes of which nothing is known."""
    return tuple(map(default_class, range(count)))


def pack(colour: tuple[int, ...]) -> int:
    """A colour as one number, 0xRRGGBB."""
    red, green, blue = colour[:3]
    return (red << 16) | (green << 8) | blue


def unpack(packed: int) -> Colour:
    return packed >> 16, packed >> 8 & 255, packed & 255


def in_hex(colour: tuple[int, ...]) -> str:
    return f"#{pack(colour):06x}"
