"""From what JSON holds to dataclasses, each value checked against the type of its field."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from tiledseg.config.checks import shown

T = TypeVar("T")

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


class MalformedError(ValueError):
    """A value that does not fit: one line that names it, says what it is and what it should be."""


def parse(
    kind: type[T],
    value: Any,
    name: str,
    required: Collection[str] = (),
    readers: Mapping[str, Callable[[Any, str], Any]] | None = None,
) -> T:
    """The dataclass `kind` from a map of its fields, nested ones too.

    A field without a default must be there, and so must those of `required` ("a" of this one, "a.b" of a nested one);
    an unknown one is refused: it would be ignored. Tuples come from lists. `readers` read fields whose type cannot tell
    how, from the value and its name. Raises MalformedError.
    """
    if not isinstance(value, Mapping):
        raise MalformedError(f"{name} is {quoted(value)}, not a map")
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    readers = readers or {}
    for key in value:
        if key not in known:
            raise MalformedError(f"{name}.{quoted(key)[1:-1]} is unknown")
    found = {}
    for key, field in known.items():
        below = [word.partition(".")[2] for word in required if word.partition(".")[0] == key]
        if key in value and key in readers:
            found[key] = readers[key](value[key], f"{name}.{key}")
        elif key in value:
            found[key] = _fitted(hints[key], value[key], f"{name}.{key}", [word for word in below if word])
        elif below or (field.default is MISSING and field.default_factory is MISSING):
            raise MalformedError(f"{name}.{key} is missing")
    return kind(**found)


def quoted(value: Any) -> str:
    """A value in a message, text in quotes: "2" is none of the numbers."""
    return shown(repr(value))


def _fitted(hint: Any, value: Any, name: str, required: Collection[str]) -> Any:
    """`value` as the type `hint` has it; raises MalformedError where it is not one."""
    if is_dataclass(hint):
        return parse(hint, value, name, required)  # type: ignore[arg-type]
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and is_dataclass(inner[0]) and isinstance(value, list):
        return tuple(_fitted(inner[0], one, f"{name}[{at}]", ()) for at, one in enumerate(value))
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and _has_dataclass(inner[0]):
        return None if value is None else _fitted(inner[0], value, name, ())
    if hint is Any or fits(hint, value):
        return _as_tuples(hint, value)
    raise MalformedError(f"{name} is {quoted(value)}, not {in_words(hint)}")


def _has_dataclass(hint: Any) -> bool:
    """Whether a type is a dataclass, or a tuple of one."""
    return is_dataclass(hint) or (typing.get_origin(hint) is tuple and is_dataclass(typing.get_args(hint)[0]))


def fits(hint: Any, value: Any) -> bool:
    """Whether a JSON value is of a type: true is no number, 2.0 no whole one, and the keys of maps are text."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(one, value) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(inner[0], one) for one in value)
    if origin is tuple and inner[-1] is not Ellipsis:
        return isinstance(value, list) and len(value) == len(inner) and all(map(fits, inner, value))
    if origin is tuple:
        return isinstance(value, list) and all(fits(inner[0], one) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(inner[1], one) for one in value.values())
    if hint is Any:
        return True
    if origin is typing.Literal:
        return value in inner
    return type(value) in ((int, float) if hint is float else (hint,)) and abs_fits(value)


def abs_fits(value: Any) -> bool:
    """Whole numbers beyond 64 bits belong nowhere: floats and arrays cannot hold them."""
    return not isinstance(value, int) or abs(value) < 1 << 64


def _as_tuples(hint: Any, value: Any) -> Any:
    if typing.get_origin(hint) is not tuple:
        return value
    inner = typing.get_args(hint)[0]
    return tuple(_as_tuples(inner, one) for one in value)


def in_words(hint: Any) -> str:
    """A type in a message."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(one) for one in inner)
    if origin is typing.Literal:
        return " or ".join(inner)
    if origin in (list, tuple):
        return "a list of such: " + in_words(inner[0])
    return "a map" if origin is dict else _WORDS.get(hint, "as it should be")
