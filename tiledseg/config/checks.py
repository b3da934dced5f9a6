"""Checks of values. A range, a list of words, or a condition on another key stands beside each field of a group. Type
hints give the kinds of YAML's values, and of the arguments of a Python program.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, wraps
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, ParamSpec, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from tiledseg.errors import ConfigError

AUTO = "auto"
LARGEST_HALO = 2**20  # pixels
MOST = 2**31 - 1
"""Largest count of anything: an index of any width can hold it."""
LIST_ENDINGS = (".txt", ".csv", ".geojson", ".json", ".gti.gpkg", ".gti.fgb", ".parquet")
"""Endings of files that hold a list of images."""
ITEM_ENDINGS = (".geojson", ".json", ".parquet")
"""Endings of lists that may hold STAC items."""
TIME = "{time}"
TRANSPORTS = ("auto", "nccl", "xccl", "gloo", "mpi")
_SHOWN = 60


@dataclass(frozen=True)
class Range:
    """Numbers that a key may hold, from `least` to `most`. `above`: `least` itself is excluded; `below`: `most` is.

    Ends that are whole numbers allow whole numbers only. `nan`: NaN is allowed. `remedy`: the words for all values of a
    key that takes more than a number.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    nan: bool = False
    remedy: str = ""

    @property
    def whole(self) -> bool:
        """True for a range of whole numbers."""
        return isinstance(self.least, int) and isinstance(self.most, int)

    @property
    def in_words(self) -> str:
        """Return the words for the numbers of the range."""
        kind, most = "a whole number" if self.whole else "a number", _plain(self.most)
        if self.below:
            return f"{kind} in {'(' if self.above else '['}{self.least:g}, {self.most:g})"
        least = f" above {self.least:g}" if self.above else f", at least {_plain(self.least)}"
        return kind + least * (self.least > -math.inf) + f", at most {most}" * (self.most < MOST - 1)

    def check(self, key: str, value: object, container: object = None) -> None:
        """Raise ConfigError for a value out of the range. `container`: the list or map that holds it, to be shown."""
        above = False
        if isinstance(value, int if self.whole else (int, float)) and not isinstance(value, bool):
            above = value > self.most or (self.below and value == self.most)
            below = value < self.least or (self.above and value == self.least)
            if not (above or below) and (self.nan or not math.isnan(value)):
                return
        words = self.remedy or self.in_words
        most = f"at most {_plain(self.most)}"
        words += f", {most}" if above and most not in words and not self.below else ""
        raise ConfigError(f"{key} is {shown(value if container is None else container)}; give {words}")


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


class Need(NamedTuple):
    """A condition of a key on another `key` of its group. `words`: the values that meet it. `holds`: a function that
    takes the group, and returns a true value where they do."""

    key: str
    words: str
    holds: Callable[[Any], object]


def number(
    default: Any,
    least: float,
    most: float,
    *,
    texts: tuple[str, ...] = (),
    pair: bool = False,
    need: Need | None = None,
    **ends: Any,
) -> Any:
    """Return a field with the range of its number, or of the numbers in its list. `texts`: words that it may hold
    instead. `pair`: a list has two numbers. `ends`: other fields of `Range`."""
    return conditional(default, need, range=Range(least, most, **ends), texts=texts, pair=pair)


def word(default: Any, *known: str, need: Need | None = None) -> Any:
    """Return a field that holds one of the `known` words, or a list of them."""
    return conditional(default, need, words=known)


def conditional(default: Any, need: Need | None, **metadata: Any) -> Any:
    """Return a field that may be given only where its `need` holds."""
    metadata["need"] = need
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def range_of(described: Field[Any]) -> Range | None:
    """Return the range that stands beside a field."""
    found = described.metadata.get("range")
    return found if isinstance(found, Range) else None


class Group:
    """A group of keys: the base of the configuration's dataclasses, whose names are GROUPConfig."""

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot be, or that contradicts another."""
        group = type(self).__name__.removesuffix("Config").lower()
        check_values(group, self)
        for described in fields(self):  # type: ignore[arg-type]
            need, value = described.metadata.get("need"), getattr(self, described.name)
            if need is not None and value != default_of(described) and not need.holds(self):
                other = f"{group}.{need.key}"
                is_other = f"{other} is {shown(getattr(self, need.key))}"
                refuse(f"{group}.{described.name}", value, is_other, f"leave it out, or give {other} {need.words}")
        self.check_together()

    def check_together(self) -> None:
        """Raise ConfigError for the first values that do not go together."""

    @classmethod
    def of(cls, key: str, given: Mapping[str, Any]) -> Self:
        """Return the group of a key that holds a map. Raise ConfigError for unknown fields, and for wrong values."""
        known, values = get_type_hints(cls), {}
        for name, value in check_fields(key, given, known).items():
            try:
                values[name] = convert(value, known[name])
            except TypeError:
                raise ConfigError(f"{key}: {name} is {shown(value)}; give {in_words(known[name])}") from None
        made = cls(**values)
        check_values(key, made, ": ")
        made.check_together()
        return made


def check_fields(key: str, given: Any, known: Collection[str]) -> dict[str, Any]:
    """Return the value of a key, a map whose fields are `known`. Raise ConfigError for any other value."""
    if not isinstance(given, Mapping):
        what = "holds nothing" if given is None else f"is {shown(given)}"
        raise ConfigError(f"{key} {what}; give some of {', '.join(known)}")
    for name in given:
        if name not in known:
            raise ConfigError(f"{key} has the unknown key '{shown(name)}'; give some of {', '.join(known)}")
    return dict(given)


def default_of(described: Field[Any]) -> Any:
    """Return the default of a field."""
    return described.default if described.default_factory is MISSING else described.default_factory()


def check_values(group: str, values: Any, dot: str = ".") -> None:
    """Raise ConfigError for the first field of a dataclass whose value cannot be, whatever the other fields hold."""
    for described in fields(values):
        check_value(group + dot + described.name, getattr(values, described.name), described)


def check_value(key: str, value: object, described: Field[Any]) -> None:
    """Raise ConfigError for a null that the field does not take, a number out of its range, a word that it does not
    know, or impossible text."""
    kinds = set(re.findall(r"\w+", str(described.type)))
    if value is None and "None" not in kinds:
        state, remedy = ("not given", "") if default_of(described) is None else ("null", ", or leave it out")
        raise ConfigError(f"{key} is {state}; give a value{remedy}")
    allowed, extra = range_of(described), described.metadata
    if extra.get("pair") and isinstance(value, list) and len(value) != 2:
        raise ConfigError(f"{key} is {shown(value)}; give {allowed and allowed.remedy}")
    for part in _parts(value):
        if isinstance(part, str) and (allowed is None or {"str", "Literal"} & kinds):
            if "\0" in part:
                raise ConfigError(f"{key} is {shown(part)}, which holds a NUL character; no file can have such a name")
            try:
                part.encode()
            except UnicodeEncodeError:
                raise ConfigError(f"{key} is {shown(part)}, which is not text in UTF-8; give a name in UTF-8") from None
            if extra.get("texts") and part is value and part not in extra["texts"]:
                words = allowed and (allowed.remedy or f"{', '.join(extra['texts'])} or {allowed.in_words}")
                raise ConfigError(f"{key} is '{shown(part)}'; give {words}")
            if "words" in extra:
                one_of(key, part, extra["words"])
        elif allowed is not None and part is not None and not isinstance(part, Mapping):  # a record is read elsewhere
            allowed.check(key, part, value)


def _parts(value: object) -> Iterator[object]:
    """Yield the value itself, or the values of a list or a map, whose keys are yielded too where they are text."""
    if isinstance(value, Mapping):
        yield from (name for name in value if isinstance(name, str))
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    else:
        yield value


def shown(value: object) -> str:
    """Return a value as a message shows it: cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if value is None:
        return "null"
    text = repr(value) if isinstance(value, str) and not value.isprintable() else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is a known word."""
    if value not in known:
        raise ConfigError(f"{key} is '{shown(value)}'; give one of {', '.join(known)}")


def refuse(key: str, value: object, because: str, remedy: str) -> None:
    """Raise ConfigError for a value that contradicts another key."""
    words = str(value).lower() if isinstance(value, bool) else shown(value)
    raise ConfigError(f"{key} is {words}, but {because}; {remedy}")


def rows_cols(value: int | list[int] | str) -> tuple[int, int] | None:
    """Return a number for both dims, or [rows, cols]; None for a word."""
    if isinstance(value, str):
        return None
    return (value[0], value[1]) if isinstance(value, list) else (value, value)


P = ParamSpec("P")
R = TypeVar("R")
_UNIONS = Union, types.UnionType
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_LISTS = {int: "a list of whole numbers [a,b]", float: "a list of numbers [a,b]", str: "a list of texts ['a','b']"}


def convert(value: Any, kind: Any) -> Any:
    """Return a value as a type hint has it: a value of YAML, where text such as 1e-3 may stand for a float, or one of a
    Python program: any number, path or sequence. Raise TypeError for any other value."""
    origin, inner = get_origin(kind), get_args(kind)
    number = kind if isinstance(value, Real) and not isinstance(value, bool) else None
    if kind is Any or (origin is Literal and value in inner):
        return value
    if origin in _UNIONS:
        for each in inner:
            with suppress(TypeError):
                return convert(value, each)
    elif origin is tuple and isinstance(value, list | tuple) and len(value) == len(inner):
        return tuple(map(convert, value, inner))
    elif origin in (list, Sequence) and isinstance(value, list | tuple):
        return [convert(each, inner[0]) for each in value]
    elif origin is dict and isinstance(value, dict):
        return {convert(key, inner[0]): convert(each, inner[1]) for key, each in value.items()}
    elif origin is Sequence and hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping):
        return value  # an array
    elif origin in (Mapping, Callable) and isinstance(value, origin):
        return value
    elif number is float or (kind is float and isinstance(value, str)):
        with suppress(ValueError, OverflowError):
            return float(value)
    elif number is int and isinstance(value, Integral):
        return int(value)
    elif kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    elif origin is None and number is None and isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
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
    if origin in (list, tuple):
        return _LISTS.get(inner[0], "a list [a,b]")
    if origin is dict:
        return f"a map of name to {'number' if inner[1] is float else 'value'}"
    return _WORDS[kind]


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that an argument of a wrong kind is a ConfigError in one line, before anything is done."""
    signature = inspect.signature(function)
    title = function.__qualname__.removesuffix(".__init__")

    @cache
    def kinds() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, text in function.__annotations__.items():
            with suppress(NameError):  # imported for type checkers alone: taken as it comes
                argument = types.SimpleNamespace(__annotations__={name: text})
                found |= get_type_hints(argument, vars(sys.modules[function.__module__]))
        return found

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            try:
                convert(value, kinds().get(name, Any))
            except TypeError:
                wanted = re.sub(r"Sequence\[([^\[\]]+)\]", r"a list of \1", signature.parameters[name].annotation)
                wanted, kind = {"int": "a whole number"}.get(wanted, wanted), type(value).__name__
                raise ConfigError(f"{name} is {shown(value)}; give {wanted}, not {kind} (tiledseg.{title})") from None
        return function(*args, **kwargs)

    return call


def with_times(patterns: Sequence[str], times: Sequence[str], key: str) -> list[str]:
    """Return patterns with `{time}` replaced by all times, in braces. Raises ConfigError where these do not match."""
    is_wrong = any(not time or set(time) & set("{},") for time in times) or len(set(times)) < len(times)
    if is_wrong or len(times) == 1:
        remedy = "give two texts or more, different, without commas and braces"
        raise ConfigError(f"data.times is {shown(times)}; {remedy}")
    for pattern in patterns:
        if (TIME in pattern) != bool(times) and not (times and pattern.lower().endswith(ITEM_ENDINGS)):
            name = "--times" if key.startswith("--") else "data.times"
            wrong = f"no {TIME}, but {name} is given" if times else f"{TIME}, but {name} is empty"
            raise ConfigError(f"{key} {pattern} has {wrong}; give both or neither, as s2/*_{TIME}.tif")
    return [pattern.replace(TIME, f"{{{','.join(times)}}}") for pattern in patterns]
