"""Calls of a module in one run, what each took and gave, and where; and comparison of runs: at several sizes and
batches, with gradients, in training."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


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


def where(call: Call) -> str:
    kind = type(call.module).__name__ if call.module is not None else call.function
    return f"'{call.owner or 'the module itself'}' ({kind}, {call.at})"


_FIRST = ("input", "self", "tensor", "x", "a", "x1")
NAMES = {  # torch takes NumPy's too
    **dict.fromkeys(_FIRST, _FIRST),
    **{"dim": ("dim", "axis"), "keepdim": ("keepdim", "keepdims"), "other": ("other", "x2", "mat2")},
}


def given_to(call: Call, index: int, name: str, default: Any) -> Any:
    if index < len(call.arguments):
        return call.arguments[index]
    return next((call.keywords[each] for each in NAMES.get(name, (name,)) if each in call.keywords), default)


def same_arguments(one: Call, other: Call) -> bool:
    """Return True if a call was given the same in two runs."""
    return same((one.arguments, dict(one.keywords)), (other.arguments, dict(other.keywords)))


def same(one: Any, other: Any) -> bool:
    """Return True for equal numbers, the same tensors of the graph, and weights of equal values, computed alike."""
    match one, other:
        case Given(), Given() if one.name or other.name:
            return one.name == other.name
        case Given(), Given():
            a, b = one.tensor, other.tensor
            known = not isinstance(a, FakeTensor) and not isinstance(b, FakeTensor)
            if (a.shape, a.dtype) != (b.shape, b.dtype) or (known and not torch.equal(a.nan_to_num(), b.nan_to_num())):
                return False
            return (known and not one.weights) or same(one.recipe, other.recipe)
        case tuple(), tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict(), dict():
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        case slice(), slice():
            return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
        case np.ndarray(), np.ndarray():
            return np.array_equal(one, other)
    is_nan = isinstance(one, float) and isinstance(other, float) and one != one and other != other
    return one is other or is_nan or (type(one) is type(other) and (one == other) is True)


PLAINLY = {"in training": "in evaluation", "with gradients": "without gradients", "at its next call": "first"}


def differing(one: Record, other: Record) -> str | None:
    """Return where two runs go different ways; None where they do not."""
    for call, again in zip(one.calls, other.calls, strict=False):
        same = call.function == again.function and call.module is again.module and call.at == again.at
        if not same or list(_made(call)) != list(_made(again)):
            return f"{where(call)} comes next at {one.in_words}, and {where(again)} at {other.in_words}"
    if len(one.calls) != len(other.calls):
        longer = max(one, other, key=lambda each: len(each.calls))
        return f"{where(longer.calls[min(len(one.calls), len(other.calls))])} comes at {longer.in_words} only"
    return None


def differing_at_third(one: Record, other: Record, third: Record) -> str | None:
    """Return where a third run goes another way, or is given other numbers than two that agree; None if nowhere."""
    if different := differing(one, third):
        return different
    for call, again, last in zip(one.calls, other.calls, third.calls, strict=True):
        if same_arguments(call, again) and not same_arguments(call, last):
            return f"{where(call)} is given other numbers at {third.in_words} than at {one.in_words}"
    return None


def differing_otherwise(one: Record, trained: Record, how: str) -> str | None:
    """Return what a module does otherwise in a run of the same size, dropout apart; None where nothing.

    `how`: "in training", "with gradients" or "at its next call".
    """
    if different := differing(one, trained):
        plainly = f" {PLAINLY[how]}, and"
        return different.replace(f" at {one.in_words}, and", plainly, 1).replace(f" at {trained.in_words}", f" {how}")
    for call, again in zip(one.calls, trained.calls, strict=True):
        known = "dropout" in call.function or (call.function == "batch_norm" and how == "in training")
        if not known and not same_arguments(call, again):
            return f"{where(call)} is given other numbers {how}"
    others = [name for name in trained.drew if name != "torch"]
    if others:
        return f"it draws {others[0]}'s random numbers, and may do something else with others"
    if trained.moved:
        return f"it moves its buffer '{trained.moved[0]}', which no graph does"
    return trained.faults[0] if trained.faults else None


def _made(call: Call) -> list[Made]:
    return [value for value in values_in((call.arguments, call.keywords)) if isinstance(value, Made)]


_HERE = __file__.rsplit("/", 1)[0]
