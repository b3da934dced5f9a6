"""`data.classes` as people give it: the classes themselves, or the name of a file that holds them."""

from __future__ import annotations

import json
import os
from typing import Any

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError
from tiledseg.user_files.yaml_text import read_yaml

ENDINGS = (".csv", ".txt", ".json", ".yaml", ".yml")


def read_classes(classes: Any, key: str = "data.classes") -> Any:
    """The classes, read where a file is named: what a run keeps does not depend on the file any more. `key`: what
    messages name.

    Raises ConfigError, naming the file, where it holds no classes.
    """
    if not isinstance(classes, str):
        return classes
    ending = os.path.splitext(classes)[1].lower()
    if ending not in ENDINGS:
        raise ConfigError(
            f"{key} is '{classes}'; give a number, a map, a list of records, or a file that ends with "
            f"{', '.join(ENDINGS)}"
        )
    if ending in (".json", ".yaml", ".yml"):
        found = read_yaml(classes)
    else:
        from tiledseg.raster.labels.class_file import read_class_file

        found = read_class_file(classes)
    if isinstance(found, bool) or not isinstance(found, (int, list, dict)):
        raise ConfigError(f"{classes} holds no classes; give a list of records {{name, colour, values}}")
    return found


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; where a name stands twice, one value would be lost."""
    for name, _ in pairs:
        if sum(name == other for other, _ in pairs) > 1:
            raise ConfigError(f"--classes gives {shown(name)} a second time; keep one of them")
    return dict(pairs)


def parse_classes(text: str) -> Any:
    """What a flag --classes gives: a number, a JSON object or list, or what a class file holds; raises ConfigError."""
    if text.lower().endswith(ENDINGS):
        return read_classes(text, "--classes")
    try:
        value = json.loads(text, object_pairs_hook=_each_once)
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, bool) or not isinstance(value, (int, dict, list)):
        raise ConfigError(
            f'--classes is {shown(text)!r}; give a number, a JSON map such as \'{{"1": 0, "2": 1}}\', or a class file'
        )
    return value


def class_files(classes: Any) -> list[str]:
    """The file that is named, for a list of all that a run reads."""
    return [classes] if isinstance(classes, str) else []
