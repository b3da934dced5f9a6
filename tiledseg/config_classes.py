"""`data.classes` as people give it: the classes themselves, or the name of a file that holds them."""

from __future__ import annotations

import os
from typing import Any

from tiledseg.config_yaml import read_yaml
from tiledseg.errors import ConfigError
from tiledseg.raster.class_file import read_class_file

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
    found = read_yaml(classes) if ending in (".json", ".yaml", ".yml") else read_class_file(classes)
    if isinstance(found, bool) or not isinstance(found, (int, list, dict)):
        raise ConfigError(f"{classes} holds no classes; give a list of records {{name, colour, values}}")
    return found


def class_files(classes: Any) -> list[str]:
    """The file that is named, for a list of all that a run reads."""
    return [classes] if isinstance(classes, str) else []
