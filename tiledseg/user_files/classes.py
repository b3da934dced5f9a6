"""`data.classes` as people give it: the classes themselves, or the name of a CSV file that holds them."""

from __future__ import annotations

import json
from typing import Any

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError

_ENDING = ".csv"


def read_classes(classes: Any, key: str = "data.classes") -> Any:
    """Return the classes, read where a file is named: a run does not depend on the file any more. `key` is what
    messages name.

    Raises ConfigError, naming the file, where it holds no classes.
    """
    if not isinstance(classes, str):
        return classes
    if not classes.lower().endswith(_ENDING):
        raise ConfigError(
            f"{key} is '{classes}'; give a number, a list of records, or a file that ends with {_ENDING} and has a "
            "header such as name,r,g,b,class"
        )
    from tiledseg.raster.labels.classes import read_class_file

    return read_class_file(classes)


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; where a name stands twice, one value would be lost."""
    for name, _ in pairs:
        if sum(name == other for other, _ in pairs) > 1:
            raise ConfigError(f"--classes gives {shown(name)} a second time; keep one of them")
    return dict(pairs)


def parse_classes(text: str) -> Any:
    """Return what a flag --classes gives: a number, a JSON list, or the records of a class file. Raises ConfigError."""
    if text.lower().endswith(_ENDING):
        return read_classes(text, "--classes")
    try:
        value = json.loads(text, object_pairs_hook=_each_once)
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, bool) or not isinstance(value, (int, list)):
        raise ConfigError(
            f"--classes is {shown(text)!r}; give a number, a JSON list such as "
            '\'[{"name": "road", "values": [7, 8]}, {"name": "tree", "value": 21}]\', or a file that ends with .csv'
        )
    return value


def class_files(classes: Any) -> list[str]:
    """Return the file that is named, for a list of all that a run reads."""
    return [classes] if isinstance(classes, str) else []
