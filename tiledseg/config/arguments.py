"""Arguments of the functions that a Python program calls: each of a kind that the signature names, or a ConfigError."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
_WIDER: dict[Any, Any] = {int: Integral, float: Real, Path: os.PathLike}  # numpy's numbers are some too


class _Names(dict[str, Any]):
    """The names of a module; one that is imported for type checkers alone stands for anything."""

    def __missing__(self, name: str) -> Any:
        return Any


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that an argument of a wrong kind is a ConfigError in one line, before anything is done."""
    signature = inspect.signature(function)
    title = function.__qualname__.removesuffix(".__init__")

    @cache
    def kind_of(name: str) -> Any:
        parameter = signature.parameters[name]
        if parameter.annotation is parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            return Any
        try:
            holder = types.SimpleNamespace(__annotations__={name: parameter.annotation})
            return get_type_hints(holder, {}, _Names(vars(builtins) | vars(sys.modules[function.__module__])))[name]
        except AttributeError:  # of what stands for anything
            return Any

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if not _fits(value, kind_of(name)):
                wanted = re.sub(r"Sequence\[([^\[\]]+)\]", r"a list of \1", signature.parameters[name].annotation)
                wanted, kind = {"int": "a whole number"}.get(wanted, wanted), type(value).__name__
                raise ConfigError(f"{name} is {shown(value)}; give {wanted}, not {kind} (tiledseg.{title})")
        return function(*args, **kwargs)

    return call


def _fits(value: Any, kind: Any) -> bool:
    """Return True if a value is of a kind of type hint; what a container holds counts where it is a list or a tuple."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Any:
        return True
    if kind is None:
        return value is None
    if isinstance(value, bool):
        return kind is bool
    if origin is tuple:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is not None and issubclass(origin, Mapping | Callable):
        return isinstance(value, origin)
    if origin is not None:  # a sequence: an array is one too
        held = all(_fits(each, inner[0]) for each in value) if isinstance(value, list | tuple) else True
        return held and hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)
    return isinstance(value, _WIDER.get(kind, kind))
