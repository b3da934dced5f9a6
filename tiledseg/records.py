"""`dataclass` as the standard library has it, made in a third of the time: for what each rank imports.

The standard library writes and compiles four to eight functions for each class, which took a third of the time in which
a rank imports this library. Here one is compiled, `__init__`; what shows, compares, hashes and protects asks the fields
and is the same for all classes. Standard library only.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, order=False):
        """`dataclasses.dataclass` without its other options, and without `InitVar` and fields that `__init__` takes by
        keyword alone, or not at all. `field`, `fields`, `replace` and `asdict` are those of the standard library."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, eq=eq, order=order)
        cls.__doc__ = cls.__doc__ or cls.__name__  # without one the standard library asks for the signature
        dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
        fields = dataclasses.fields(cls)
        methods = {"__init__": _init(cls, fields, frozen), "__repr__": _repr}
        if eq:
            methods |= _comparison([field.name for field in fields if field.compare], frozen, order)
        if frozen:
            methods |= _protection(cls, {field.name for field in fields})
        own = cls.__dict__.copy()
        if "__eq__" in own and own.get("__hash__", own) is None:
            del own["__hash__"]  # which Python sets where a class compares, not its author
        for name, function in methods.items():
            if name not in own:
                setattr(cls, name, function)
        return cls


_set = object.__setattr__
_MADE = object()  # by the field's factory


def _init(cls: type, fields: tuple[dataclasses.Field[Any], ...], frozen: bool) -> Callable[..., None]:
    parameters, lines = ["self"], []
    given: dict[str, Any] = {"_set": _set, "_MADE": _MADE}
    for field in fields:
        plain = field.init and not field.kw_only
        assert plain, f"{cls.__name__}.{field.name} is a field for the standard library's dataclass"
        name, value = field.name, field.name
        if field.default is not dataclasses.MISSING:
            given[f"_default_{name}"] = field.default
            parameters.append(f"{name}=_default_{name}")
        elif field.default_factory is not dataclasses.MISSING:
            given[f"_make_{name}"] = field.default_factory
            value = f"_make_{name}() if {name} is _MADE else {name}"
            parameters.append(f"{name}=_MADE")
        else:
            parameters.append(name)
        lines.append(f"_set(self, '{name}', {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    body = "\n    ".join(lines or ["pass"])
    exec(f"def __init__({', '.join(parameters)}):\n    {body}", given)  # of the names of fields, and nothing else
    made: Callable[..., None] = given["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made.__annotations__ = {field.name: field.type for field in fields} | {"return": None}
    return made


def _comparison(names: list[str], frozen: bool, order: bool) -> dict[str, Any]:
    get = operator.attrgetter(*names) if len(names) > 1 else lambda self: tuple(getattr(self, name) for name in names)

    def by(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
        return lambda self, other: (
            compare(get(self), get(other)) if other.__class__ is self.__class__ else NotImplemented
        )

    methods: dict[str, Any] = {"__eq__": by(operator.eq)}
    methods["__hash__"] = (lambda self: hash(get(self))) if frozen else None
    if order:
        methods |= {f"__{name}__": by(getattr(operator, name)) for name in ("lt", "le", "gt", "ge")}
    return methods


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _protection(cls: type, names: set[str]) -> dict[str, Any]:
    """Of all attributes, but in a subclass that is no dataclass of the fields alone."""

    def assign(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def delete(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    return {"__setattr__": assign, "__delattr__": delete}
