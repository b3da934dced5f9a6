"""The weights of classes in the loss: as a configuration gives them, or as they were counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError
from tiledseg.raster.labels.label_map import LabelMap

_KEY = "train.class_weights"


def given_weights(given: str | Sequence[float] | Mapping[str | int, float], label_map: LabelMap) -> tuple[float, ...]:
    """The weight of each class: of a list, or a map of class number or name to weight, 1 elsewhere; none for a word.

    Raises ConfigError where they are not of these classes, or all are 0.
    """
    if isinstance(given, str):
        return ()
    if isinstance(given, Mapping):
        found = _of_map(given, label_map)
    else:
        found = tuple(float(weight) for weight in given)
        if len(found) != label_map.count:
            raise ConfigError(
                f"{_KEY} has {len(found)} weights for {label_map.count} classes; give one a class, or a map"
            )
    if not any(found):
        raise ConfigError(f"{_KEY} is {shown(given)}, with which no pixel counts; give one of them more than 0")
    return found


def _of_map(given: Mapping[str | int, float], label_map: LabelMap) -> tuple[float, ...]:
    found = [1.0] * label_map.count
    named: set[int] = set()
    for key, weight in given.items():
        number = _class_number(key, label_map)
        if number in named:
            raise ConfigError(f"{_KEY} names class {number} twice; leave one of them out")
        named.add(number)
        found[number] = float(weight)
    return tuple(found)


def _class_number(key: str | int, label_map: LabelMap) -> int:
    known = {str(k): k for k in range(label_map.count)}
    known |= {record.name: k for k, record in enumerate(label_map.classes)}  # a name that is a number goes first
    number = known.get(str(key).strip())
    if number is None:
        names = shown(", ".join(record.name for record in label_map.classes))
        raise ConfigError(
            f"{_KEY} has '{shown(key)}', which is no class; give some of 0 to {label_map.count - 1}, or of {names}"
        )
    return number
