"""Augmentations: `train.augment`, a list in the configuration, as a value.

`raster.places` moves pixels, `raster.samples.draws` draws, and changes their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError

LARGEST_SHIFT = 2**20  # pixels


@dataclass(frozen=True)
class Augmentation:
    """Changes that are drawn for each raster; by default none.

    `reflect`: (rows, columns) in reverse order, each in every other draw. `turn`: 90 for quarter turns, 180 for half
    ones, 0 for none. `translate`: pixels at most, along both dims. `scale`: the least and the largest factor. `rotate`:
    degrees at most, either way. `brightness`, `contrast`: largest offset, and largest change of the factor, of each
    band; `noise`: its standard deviation at each pixel; `drop_bands`: the probability that a band is 0. Offsets and
    noise are in units of the network's input: standard deviations of a band, where it is normalised.
    """

    reflect: tuple[bool, bool] = (False, False)
    turn: int = 0
    translate: int = 0
    scale: tuple[float, float] = (1.0, 1.0)
    rotate: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    noise: float = 0.0
    drop_bands: float = 0.0

    @property
    def moves(self) -> bool:
        """Return True if pixels change their places."""
        turned = self.turn > 0 or self.rotate > 0
        return any(self.reflect) or turned or self.translate > 0 or self.scale != (1.0, 1.0)

    @property
    def reach(self) -> float:
        """Return the most pixels of the raster, along rows or columns, that a distance of one pixel may be."""
        angle = math.radians(min(self.rotate, 45.0))
        return (math.cos(angle) + math.sin(angle)) / self.scale[0]

    @property
    def recolours(self) -> bool:
        """Return True if pixels change their values."""
        return max(self.brightness, self.contrast, self.noise, self.drop_bands) > 0


NOTHING = Augmentation()
_AMOUNTS = {"rotate": (180, False), "brightness": (1e6, False), "contrast": (1, True), "noise": (1e6, False)}
_AMOUNTS["drop_bands"] = 1, True
"""The largest value of each, and whether it is excluded."""
_NAMES = ("reflect", "turn", "translate", "scale", *_AMOUNTS)


def augmentation(entries: Sequence[Any]) -> Augmentation:
    """Return the value of a list such as `[{reflect: [row, col]}, turn, {scale: [0.8, 1.25]}]`. Raise ConfigError."""
    values: dict[str, Any] = {}
    for entry in entries:
        if not entry or not isinstance(entry, Mapping | str):
            raise ConfigError(f"train.augment has the entry {shown(entry)}; give a name, or a map of name to value")
        for name, value in [(entry, None)] if isinstance(entry, str) else entry.items():
            if name not in _NAMES:
                raise ConfigError(f"train.augment has '{shown(name)}'; give some of {', '.join(_NAMES)}")
            if name in values:
                raise ConfigError(f"train.augment has {name} twice; give it once")
            values[name] = _read(name, value)
    return Augmentation(**values)


def _read(name: str, value: Any) -> Any:
    """Return the field of an augmentation. Raise ConfigError for a value that it cannot have."""
    if name == "reflect":
        dims = ["row", "col"] if value is None else value if isinstance(value, list) else [value]
        if dims and all(dim in ("row", "col") for dim in dims) and len(set(dims)) == len(dims):
            return "row" in dims, "col" in dims
        remedy = "row, col or [row, col]"
    elif name == "turn":
        if value is None or (value in (90, 180) and not isinstance(value, bool)):
            return int(value or 90)
        remedy = "90 (quarter turns) or 180 (half turns)"
    elif name == "translate":
        if type(value) is int and 1 <= value <= LARGEST_SHIFT:
            return value
        remedy = f"a number of pixels from 1 to {LARGEST_SHIFT}"
    elif name == "scale":
        pair = value if isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)) else [0, 0]
        if 0.5 <= pair[0] <= pair[1] <= 2:
            return float(pair[0]), float(pair[1])
        remedy = "[least, largest] factor, from 0.5 to 2, such as [0.8, 1.25]"
    else:
        most, below = _AMOUNTS[name]
        if _is_number(value) and 0 < value <= most and not (below and value == most):
            return float(value)
        remedy = f"a number above 0, {'below' if below else 'at most'} {most:g}"
    given = "no value" if value is None else shown(value)
    raise ConfigError(f"train.augment has {name} with {given}; give {remedy}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
