"""Names of arrays with x and y: `store.zarr:/group/variable`, `scene.nc:/variable`, and a program's own DataArrays.

A program's arrays get names while a call uses them (`takes_arrays`), so the code below handles text only.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tiledseg.errors import ConfigError
from tiledseg.system.files import is_zarr

NETCDF, MEMORY = (".nc", ".nc4", ".cdf"), "dataarray:"
TILES, OWN = "tiledseg", ("times", "holds_classes", "palette")
"""The attribute of stores cut by `tiledseg tile`, and the fields of `RasterInfo` in it."""

_NAME = re.compile(r"(?!/vsi|\w{2,}:(?!//))(.+?\.(?:zarr|nc4?|cdf))/?(?::/*(.*))?", re.IGNORECASE | re.DOTALL)
_OF_FOLDER = re.compile(r"([^:]+):/+(.*)", re.DOTALL)
_arrays: dict[str, Any] = {}
P = ParamSpec("P")
R = TypeVar("R")


class ArrayName(NamedTuple):
    """A Zarr store or netCDF file, and one of its variables with its group (empty: the only one)."""

    store: str
    variable: str = ""

    def __str__(self) -> str:
        return f"{self.store}:/{self.variable}" if self.variable else self.store

    @property
    def stem(self) -> str:
        """Return the stem of files made from the variable."""
        stem = os.path.splitext(os.path.basename(self.store))[0]
        return f"{stem}-{self.variable}" if self.variable else stem


def parse_array_name(path: str) -> ArrayName | None:
    """Parse the name of a store's variable; return None for any other path."""
    match = _NAME.fullmatch(path)
    if match is not None:
        return ArrayName(match[1], (match[2] or "").strip("/"))
    if is_zarr(path):
        return ArrayName(path.rstrip("/"))
    match = _OF_FOLDER.fullmatch(path)
    return ArrayName(match[1], match[2].strip("/")) if match is not None and is_zarr(match[1]) else None


def file_of(path: str) -> str:
    """Return the store or file of a raster."""
    name = parse_array_name(path)
    return path if name is None else name.store


def array_of(path: str) -> Any:
    """Return the program's array with this name; None if there is none."""
    return _arrays.get(path)


def takes_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that DataArrays in its arguments, in lists and maps too, are replaced by names. The names last
    as long as the call, or as the object that `__init__` creates."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arrays: dict[str, Any] = {}
        lasts = False
        try:
            named = [_named(one, arrays) for one in args]
            result = function(*named, **{key: _named(one, arrays) for key, one in kwargs.items()})
            if function.__name__ == "__init__" and arrays:
                weakref.finalize(args[0], _forget, tuple(arrays))
                lasts = True
            return result
        finally:
            if not lasts:
                _forget(tuple(arrays))

    return call


def arrays_of(paths: Iterable[str]) -> dict[str, Any]:
    """Return the arrays among `paths` by name, for `restore_arrays` in another process."""
    return {path: _arrays[path] for path in paths if path in _arrays}


def restore_arrays(arrays: Mapping[str, Any]) -> None:
    """Register arrays under the names of another process."""
    _arrays.update(arrays)


def _named(one: Any, arrays: dict[str, Any]) -> Any:
    """Return a value with its arrays replaced by names, which are the same on all ranks for the same arrays."""
    if type(one).__name__ == "DataArray" and type(one).__module__.startswith("xarray."):
        stem = re.sub(r"[^\w.-]", "-", str(one.name or "array"))
        name = next(name for at in range(len(_arrays) + 1) if (name := f"{MEMORY}{stem}-{at}") not in _arrays)
        arrays[name] = _arrays[name] = one
        return name
    if type(one).__name__ == "Dataset" and type(one).__module__.startswith("xarray."):
        raise ConfigError(
            "an xarray.Dataset is given; give a DataArray, as .to_dataarray('band') makes it with its nodata"
        )
    if isinstance(one, Mapping):
        return {key: _named(each, arrays) for key, each in one.items()}
    return type(one)(_named(each, arrays) for each in one) if type(one) in (list, tuple) else one


def _forget(names: Iterable[str]) -> None:
    for name in names:
        _arrays.pop(name, None)
