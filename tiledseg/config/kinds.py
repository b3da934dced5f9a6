"""Kinds of values, as type hints name them: of YAML's values, and of the arguments of a Python program."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
_UNIONS = Union, types.UnionType
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_LISTS = {int: "a list of whole numbers [a,b]", float: "a list of numbers [a,b]"}
_WIDER: dict[Any, Any] = {int: Integral, float: Real, Path: os.PathLike}  # numpy's numbers are some too


def convert(value: Any, kind: Any) -> Any:
    """Return a value of YAML as a type hint has it; a whole number may stand for a float, and text such as 1e-3 too.
    Raise TypeError for any other value."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (kind is type(None) and value is None) or (origin is Literal and value in inner):
        return value
    if origin in _UNIONS:
        for each in inner:
            with suppress(TypeError):
                return convert(value, each)
    elif origin is list and isinstance(value, list):
        return [convert(each, inner[0]) for each in value]
    elif origin is dict and isinstance(value, dict):
        return {convert(key, inner[0]): convert(each, inner[1]) for key, each in value.items()}
    elif kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            return float(value)
    elif type(value) is kind:
        return value
    raise TypeError


def in_words(kind: Any) -> str:
    """Return a type hint in a user's words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        order = sorted(map(in_words, inner), key=lambda words: (words == "null", words == "text"))
        return " or ".join(dict.fromkeys(order))
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin is list:
        return _LISTS.get(inner[0], "a list [a,b]")
    if origin is dict:
        return f"a map of name to {'number' if inner[1] is float else 'value'}"
    return _WORDS[kind]


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
    """Return True if a Python program's value is of a kind: unlike `convert`, any number, path or sequence will do."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        return any(_fits(value, each) for each in inner)
    if kind is Any or kind is None:
        return kind is Any or value is None
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
