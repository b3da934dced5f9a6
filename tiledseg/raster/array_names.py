"""Names of arrays with x and y: `store.zarr:/group/variable`, `scene.nc:/variable`, and a program's own DataArrays.

A program's arrays are named while a call uses them (`takes_arrays`), so that all code below handles texts alone.
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
"""The attribute of what `tiledseg tile` has cut, and fields of `RasterInfo` that it holds for each raster."""

_NAME = re.compile(r"(?!/vsi|\w{2,}:(?!//))(.+?\.(?:zarr|nc4?|cdf))/?(?::/*(.*))?", re.IGNORECASE | re.DOTALL)
_OF_FOLDER = re.compile(r"([^:]+):/+(.*)", re.DOTALL)
_arrays: dict[str, Any] = {}
P = ParamSpec("P")
R = TypeVar("R")


class ArrayName(NamedTuple):
    """A store, or a netCDF file, and one of its variables with its group (empty: its only one)."""

    store: str
    variable: str = ""

    def __str__(self) -> str:
        return f"{self.store}:/{self.variable}" if self.variable else self.store

    @property
    def stem(self) -> str:
        """Return a name for what is made of the variable."""
        stem = os.path.splitext(os.path.basename(self.store))[0]
        return f"{stem}-{self.variable}" if self.variable else stem


def parse_array_name(path: str) -> ArrayName | None:
    """Return the store and the variable that a path names; None for any other path."""
    match = _NAME.fullmatch(path)
    if match is not None:
        return ArrayName(match[1], (match[2] or "").strip("/"))
    if is_zarr(path):
        return ArrayName(path.rstrip("/"))
    match = _OF_FOLDER.fullmatch(path)
    return ArrayName(match[1], match[2].strip("/")) if match is not None and is_zarr(match[1]) else None


def file_of(path: str) -> str:
    """Return the store, or the file, in which a raster lies."""
    name = parse_array_name(path)
    return path if name is None else name.store


def array_of(path: str) -> Any:
    """Return the program's array of a name; None where there is none."""
    return _arrays.get(path)


def takes_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function whose arguments may hold DataArrays, in lists and maps too: it gets their names. They last as
    long as the call, or as the object that `__init__` makes."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arrays: dict[str, Any] = {}
        lasts = False
        try:
            given = [_named(one, arrays) for one in args]
            result = function(*given, **{key: _named(one, arrays) for key, one in kwargs.items()})
            if function.__name__ == "__init__" and arrays:
                weakref.finalize(args[0], _forget, tuple(arrays))
                lasts = True
            return result
        finally:
            if not lasts:
                _forget(tuple(arrays))

    return call


def arrays_of(paths: Iterable[str]) -> dict[str, Any]:
    """Return the arrays among paths, by their names; `restore_arrays` takes them in another process."""
    return {path: _arrays[path] for path in paths if path in _arrays}


def restore_arrays(arrays: Mapping[str, Any]) -> None:
    """Name arrays as another process did."""
    _arrays.update(arrays)


def _named(one: Any, arrays: dict[str, Any]) -> Any:
    """Return a value with names in the place of its arrays. Ranks that name alike arrays get alike names."""
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
