"""`data.classes` as people give it: the classes themselves, or the name of a CSV file that holds them."""

from __future__ import annotations

from typing import Any

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


def class_files(classes: Any) -> list[str]:
    """Return the file that is named, for a list of all that a run reads."""
    return [classes] if isinstance(classes, str) else []
