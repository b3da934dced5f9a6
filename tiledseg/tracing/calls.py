"""The calls of a module in a run, and the comparison of runs: at several sizes and batches, with gradients, in
training."""

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

_HERE = __file__.rsplit("/", 1)[0]


@dataclass(frozen=True)
class Made:
    """A tensor that depends on the input: `part` of what call `call` gave; the input itself is of call -1."""

    call: int
    part: int = 0


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor that does not depend on the input: a weight or buffer of the module by `name`, or else computed.

    `from_weights`: it is one, or computed from some; `owner`: of a buffer, the module that has it and its name there;
    `recipe`: function, arguments, keywords, and which part of the function's result the tensor is.
    """

    tensor: torch.Tensor
    name: str | None = None
    from_weights: bool = False
    owner: tuple[nn.Module, str] | None = None
    recipe: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Call:
    """One call of the module `module`, or of torch's function `function`.

    `owner`: the path of the module that makes it, `at`: the file and line. Tensors among the arguments are `Made` or
    `Given`. `shapes`: of the result. `training`: the mode of the module.
    """

    function: str
    module: nn.Module | None
    owner: str
    at: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    is_method: bool = False  # of a tensor
    training: bool = False
    widest: int = 0  # values of the largest tensor that kernels made in it


@dataclass
class Record:
    """All calls of one run, and the module's result."""

    batch: int
    size: tuple[int, int]
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    own_gradients: list[str] = field(default_factory=list)  # what a backward pass does besides torch's own
    moved: list[str] = field(default_factory=list)  # buffers that no norm moves
    kept: list[str] = field(default_factory=list)  # attributes that keep tensors from then on
    returned: Any = None
    form: Any = None  # of the result, with an `OutputPlace` for each tensor
    drew: tuple[str, ...] = ()  # whose random numbers moved
    counted: list[nn.Module] = field(default_factory=list)  # batch norms that count their batches

    @property
    def in_words(self) -> str:
        return f"at {self.batch} x {self.size[0]} x {self.size[1]} pixels"


def function_name(func: Any) -> str:
    """Return `relu` for torch.nn.functional.relu, `shape` for a property's getter."""
    name = str(getattr(func, "__name__", repr(func)))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def values_in(value: Any) -> Iterator[Made | Given]:
    """Yield the tensors of the record in a result, or among arguments."""
    if isinstance(value, Made | Given):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from values_in(each)
    elif isinstance(value, Mapping):
        yield from values_in(list(value.values()))


def calling_line() -> str:
    """Return the file and line of the innermost code that is neither torch's nor of this room."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.startswith(_HERE) and not name.startswith("<"):
            return f"{_in_package(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


@cache
def _in_package(path: str) -> str:
    """Return a file's path from its package's folder on."""
    top = os.path.dirname(path)
    while os.path.exists(os.path.join(top, "__init__.py")):
        top = os.path.dirname(top)
    return os.path.relpath(path, top)


def where(call: Call) -> str:
    """Return the place of a call in words."""
    kind = type(call.module).__name__ if call.module is not None else call.function
    return f"'{call.owner or 'the module itself'}' ({kind}, {call.at})"


_FIRST = ("input", "self", "tensor", "x", "a", "x1")
NAMES = {  # torch takes NumPy's too
    **dict.fromkeys(_FIRST, _FIRST),
    **{"dim": ("dim", "axis"), "keepdim": ("keepdim", "keepdims"), "other": ("other", "x2", "mat2")},
}


def given_to(call: Call, index: int, name: str, default: Any) -> Any:
    """Return an argument of a call, by its place or its name."""
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
            has_values = not isinstance(a, FakeTensor) and not isinstance(b, FakeTensor)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return False
            if has_values and not torch.equal(a.nan_to_num(), b.nan_to_num()):
                return False
            return (has_values and not one.from_weights) or same(one.recipe, other.recipe)
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


def differing(one: Record, other: Record, how: str | None = None) -> str | None:
    """Return where two runs take different ways; None where they do not. `how`: the words for the second run."""
    mine, others = (one.in_words, other.in_words) if how is None else (PLAINLY[how], how)
    for call, again in zip(one.calls, other.calls, strict=False):
        if _way(call) != _way(again):
            return f"{where(call)} comes next {mine}, and {where(again)} {others}"
    if len(one.calls) != len(other.calls):
        longer, words = max((one, mine), (other, others), key=lambda pair: len(pair[0].calls))
        return f"{where(longer.calls[min(len(one.calls), len(other.calls))])} comes {words} only"
    return None


def _way(call: Call) -> tuple[Any, ...]:
    made = [value for value in values_in((call.arguments, call.keywords)) if isinstance(value, Made)]
    return call.function, call.module, call.at, made


def differing_at_third(one: Record, other: Record, third: Record) -> str | None:
    """Return where a third run takes another way, or other numbers than two that agree; None where it does not."""
    if different := differing(one, third):
        return different
    for call, again, last in zip(one.calls, other.calls, third.calls, strict=True):
        if same_arguments(call, again) and not same_arguments(call, last):
            return f"{where(call)} is given other numbers {third.in_words} than {one.in_words}"
    return None


def differing_otherwise(one: Record, again: Record, how: str) -> str | None:
    """Return what a module does otherwise in a run of the same size, dropout apart; None where nothing.

    `how`: "in training", "with gradients" or "at its next call".
    """
    if different := differing(one, again, how):
        return different
    for call, second in zip(one.calls, again.calls, strict=True):
        excused = "dropout" in call.function or (call.function == "batch_norm" and how == "in training")
        if not excused and not same_arguments(call, second):
            return f"{where(call)} is given other numbers {how}"
    for name in again.drew:
        if name != "torch":
            return f"it draws {name}'s random numbers, and may do something else with others"
    if again.moved:
        return f"it moves its buffer '{again.moved[0]}', which no graph does"
    return again.faults[0] if again.faults else None
