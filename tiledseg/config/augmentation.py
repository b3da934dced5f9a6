"""Which augmentations a run asks for: `train.augment`, a list in the configuration, as a value.

What each does to a raster stands in `raster.samples.views` (places) and `raster.samples.photometry` (values);
`raster.samples.draws` draws it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError

KEY = "train.augment"
LARGEST_SHIFT = 2**20  # pixels
LARGEST_ANGLE = 180  # degrees
EACH = ("image", "tile")


@dataclass(frozen=True)
class Augmentation:
    """What is drawn for each raster; by default nothing.

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
        """Whether pixels change their places."""
        turned = self.turn > 0 or self.rotate > 0
        return any(self.reflect) or turned or self.translate > 0 or self.scale != (1.0, 1.0)

    @property
    def reach(self) -> float:
        """How many pixels of the raster, along rows or columns, a distance of one pixel may be, at most."""
        angle = math.radians(min(self.rotate, 45.0))
        return (math.cos(angle) + math.sin(angle)) / self.scale[0]

    @property
    def recolours(self) -> bool:
        """Whether pixels change their values."""
        return max(self.brightness, self.contrast, self.noise, self.drop_bands) > 0


NOTHING = Augmentation()


def augmentation(entries: Sequence[Any]) -> Augmentation:
    """The value of a list such as `[{reflect: [row, col]}, turn, {scale: [0.8, 1.25]}]`. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, value in _pairs(entries):
        if name not in _READERS:
            raise ConfigError(f"{KEY} has '{shown(name)}'; give some of {', '.join(_READERS)}")
        if name in found:
            raise ConfigError(f"{KEY} has {name} twice; give it once")
        found[name] = _READERS[name](name, value)
    return Augmentation(**found)


def _pairs(entries: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each entry; a bare name has the value None."""
    for entry in entries:
        if isinstance(entry, Mapping) and entry:
            yield from ((str(name), value) for name, value in entry.items())
        elif isinstance(entry, str):
            yield entry, None
        else:
            raise ConfigError(f"{KEY} has the entry {shown(entry)}; give a name, or a map of name to value")


def _reflect(name: str, value: Any) -> tuple[bool, bool]:
    wanted = ["row", "col"] if value is None else value if isinstance(value, list) else [value]
    if not wanted or any(dim not in ("row", "col") for dim in wanted) or len(set(wanted)) < len(wanted):
        raise _refusal(name, value, "row, col or [row, col]")
    return "row" in wanted, "col" in wanted


def _turn(name: str, value: Any) -> int:
    if value is None:
        return 90
    if isinstance(value, bool) or value not in (90, 180):
        raise _refusal(name, value, "90 (quarter turns) or 180 (half turns)")
    return int(value)


def _translate(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SHIFT:
        raise _refusal(name, value, f"a number of pixels from 1 to {LARGEST_SHIFT}")
    return value


def _scale(name: str, value: Any) -> tuple[float, float]:
    pair: list[Any] = value if isinstance(value, list) and len(value) == 2 else [None]
    if not all(_is_number(factor) and 0.5 <= factor <= 2 for factor in pair) or pair[0] > pair[1]:
        raise _refusal(name, value, "[least, largest] factor, from 0.5 to 2, such as [0.8, 1.25]")
    return float(pair[0]), float(pair[1])


def _amount(most: float, below: bool = False) -> Callable[[str, Any], float]:
    """A reader of a number above 0, up to `most`, or below it."""

    def read(name: str, value: Any) -> float:
        if not _is_number(value) or not 0 < value <= most or (below and value == most):
            raise _refusal(name, value, f"a number above 0, {'below' if below else 'at most'} {most:g}")
        return float(value)

    return read


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "reflect": _reflect,
    "turn": _turn,
    "translate": _translate,
    "scale": _scale,
    "rotate": _amount(LARGEST_ANGLE),
    "brightness": _amount(1e6),
    "contrast": _amount(1, below=True),
    "noise": _amount(1e6),
    "drop_bands": _amount(1, below=True),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _refusal(name: str, value: Any, remedy: str) -> ConfigError:
    told = "no value" if value is None else shown(value)
    return ConfigError(f"{KEY} has {name} with {told}; give {remedy}")
