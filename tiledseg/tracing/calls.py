"""What a run of a module has called: calls, what each took and gave, and where."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Made:
    """A tensor that depends on the input: `part` of what call `call` gave; the input itself is of call -1."""

    call: int
    part: int = 0


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor that does not depend on the input: a weight or buffer of the module by `name`, or else computed."""

    tensor: torch.Tensor
    name: str | None = None
    weights: tuple[torch.Tensor, ...] = ()  # those that it was computed from
    owner: tuple[nn.Module, str] | None = None  # of a buffer: the module that has it, and its name there
    recipe: tuple[Any, ...] | None = None  # and how: function, arguments, keywords, and which part of what that gives


@dataclass(frozen=True)
class Call:
    """One call: of the module `module`, or of torch's function `function`. `owner`: the path of the module that makes
    it, `at`: the file and line. Tensors among the arguments are `Made` or `Given`. `shapes`: of what it gave."""

    function: str
    module: nn.Module | None
    owner: str
    at: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    is_method: bool = False  # of a tensor
    training: bool = False  # of the module


@dataclass
class Record:
    """All calls of one run, and what the module returned."""

    batch: int
    size: tuple[int, int]
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    own_gradients: list[str] = field(default_factory=list)  # what a backward pass does besides torch's own
    moved: list[str] = field(default_factory=list)  # buffers that no norm moves
    kept: list[str] = field(default_factory=list)  # attributes that keep tensors from then on
    returned: Any = None
    form: Any = None  # of what it returned, with an `Output` for each tensor
    drew: tuple[str, ...] = ()  # whose random numbers moved
    counted: list[nn.Module] = field(default_factory=list)  # batch norms that count their batches

    def shape(self, made: Made) -> tuple[int, ...]:
        return self.calls[made.call].shapes[made.part]

    @property
    def in_words(self) -> str:
        return f"{self.batch} x {self.size[0]} x {self.size[1]} pixels"


def function_name(func: Any) -> str:
    """`relu` of torch.nn.functional.relu, `shape` of a property's getter."""
    if getattr(func, "__name__", "") == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", "__get__"))
    return str(getattr(func, "__name__", repr(func)))


def values_in(value: Any) -> Iterator[Made | Given]:
    if isinstance(value, Made | Given):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from values_in(each)
    elif isinstance(value, Mapping):
        yield from values_in(list(value.values()))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def calling_line() -> str:
    """The file and line of the innermost code that is neither torch's nor of this room."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.startswith(_HERE) and not name.startswith("<"):
            return f"{in_package(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


@cache
def in_package(path: str) -> str:
    """A file's path from its package's folder on."""
    top = os.path.dirname(path)
    while os.path.exists(os.path.join(top, "__init__.py")):
        top = os.path.dirname(top)
    return os.path.relpath(path, top)


_HERE = __file__.rsplit("/", 1)[0]
