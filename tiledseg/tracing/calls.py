"""The calls of a module in a run, the comparison of two runs, and torch's functions by their use of pixels."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

_HERE = __file__.rsplit("/", 1)[0]
_BEGIN = f"{_HERE}/runs.py", f"{_HERE}/compare.py"  # code that begins a run
_FIRST = ("input", "self", "tensor", "x", "a", "x1")
# Other names of an argument: torch takes NumPy's too.
NAMES: dict[str, tuple[str, ...]] = dict.fromkeys(("input", "self"), _FIRST)
NAMES |= {"dim": ("dim", "axis", "dims"), "keepdim": ("keepdim", "keepdims"), "other": ("other", "x2", "mat2")}

# Functions of single values, by the name of the variant that makes a new tensor.
_ELEMENTWISE = """abs add addcdiv addcmul atan celu clamp clamp_max clamp_min cos detach div elu eq erf exp expm1
floor_divide ge gelu gt hardshrink hardsigmoid hardswish hardtanh le leaky_relu lerp log log1p
log2 logical_and logical_not logical_or logsigmoid lt maximum minimum mish mul ne neg pow prelu
reciprocal relu relu6 rsqrt rsub selu sigmoid sign silu sin softplus softshrink softsign sqrt
square sub tanh tanhshrink threshold where zeros_like ones_like full_like masked_fill nan_to_num
floor ceil round trunc frac fmod remainder logit erfc sinh cosh tan asin acos atan2 asinh
logaddexp hypot xlogy isnan isfinite logical_xor bitwise_and bitwise_or bitwise_not copysign
positive sgn"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
_RENAMED = """multiply:mul subtract:sub divide:div true_divide:div negative:neg absolute:abs clip:clamp
special_expit:sigmoid concat:cat concatenate:cat _threshold:threshold data:detach __invert__:bitwise_not
__and__:bitwise_and __or__:bitwise_or __xor__:logical_xor __add__:add __radd__:add __mul__:mul __rmul__:mul"""
RENAMED = dict(pair.split(":") for pair in _RENAMED.split())
_ALONG = "softmax log_softmax softmin cumsum sort argsort flip normalize glu"
ALONG_CHANNELS = frozenset(_ALONG.split())
UNKNOWN = "may give another result on a part of the image; use one of docs/reference/foreign-networks.md"
_COUNTED = "draws numbers by the order of calls, which tiles change; use Dropout2d"
_ELSEWHERE = "reads pixels at places that are computed, maybe outside a tile; resize or crop by fixed numbers"
_SORTED = "may sort values of the whole image; take means and maxima"
# Why a function that has no handler cannot be exact.
REASONS = {
    **dict.fromkeys(("rand_like", "randn_like", "bernoulli", "bernoulli_", "rrelu"), _COUNTED),
    **dict.fromkeys(("unfold", "fold"), "puts the neighbours of a pixel into one dim; use convolutions"),
    **dict.fromkeys(("grid_sample", "gather", "index_select", "take_along_dim"), _ELSEWHERE),
    "einsum": "may sum over pixels; mix channels by linear, or by matmul of (..., channels)",
    "roll": "moves pixels round the image's end, which a tile has not; pad and crop",
    **dict.fromkeys(("topk", "quantile", "unique", "histc"), _SORTED),
}


@dataclass(frozen=True)
class Made:
    """A tensor that depends on the input: result number `part` of call number `call`; the input itself has call -1."""

    call: int
    part: int = 0


@dataclass(frozen=True, eq=False)
class Given:
    """A constant, which does not depend on the input: a weight or buffer of the module by `name`, or else computed."""

    tensor: torch.Tensor
    name: str | None = None
    from_weights: bool = False  # a weight, or computed from weights
    owner: tuple[nn.Module, str] | None = None  # of a buffer: module, name in it; of a module's result: module, path
    recipe: tuple[Any, ...] | None = None  # the call that made it: function, arguments, keywords, part of the result


@dataclass(frozen=True)
class Call:
    """One call of the module `module`, or of torch's function `function`."""

    function: str
    module: nn.Module | None
    owner: str  # the path of the module that makes it
    at: str  # file and line
    arguments: tuple[Any, ...]  # `Made` or `Given` for each tensor
    keywords: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]  # of the result
    floats: tuple[bool, ...]  # of each tensor of the result: True if it holds no booleans or whole numbers
    is_method: bool  # of a tensor


@dataclass
class Record:
    """All calls of one run, and the module's result."""

    batch: int
    size: tuple[int, int]
    dtype: torch.dtype = torch.float32
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    own_gradients: list[str] = field(default_factory=list)  # why a backward pass is not torch's alone
    moved: list[str] = field(default_factory=list)  # buffers that no norm moves
    kept: list[str] = field(default_factory=list)  # attributes in which forward keeps tensors
    hangs: bool = False  # forward hangs hooks on parts, and changes nothing else
    returned: Any = None
    form: Any = None  # of the result, with an `OutputPlace` for each tensor
    drew: tuple[str, ...] = ()  # names of generators of random numbers that were drawn from
    counted: list[nn.Module] = field(default_factory=list)  # batch norms that count their batches


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return the tensors of a module's output: in a list, tuple or dict of any depth."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def values_in(value: Any) -> list[Made | Given]:
    """Return the `Made` and `Given` in a result or in arguments, at any depth."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Made | Given)]


def function_name(func: Any) -> str:
    """Return `relu` for torch.nn.functional.relu, `shape` for a property's getter."""
    name = str(getattr(func, "__name__", repr(func)))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def plain(name: str) -> str:
    """Return the name of the variant that makes a new tensor: `add` for `add_`, torch's name of `+=`."""
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return RENAMED.get(name, name)


def calling_line() -> str:
    """Return the file and line of the innermost code that is neither torch's nor of this room."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        name = frame.f_code.co_filename
        if name in _BEGIN:
            break
        if "/torch/" not in name and not name.startswith((_HERE, "<")):
            package = frame.f_globals.get("__package__") or ""
            return f"{'/'.join(name.split('/')[-1 - package.count('.') - bool(package) :])}:{line}"
    return "an unknown line"


def where(call: Call) -> str:
    """Return in words the module that makes a call, the function, file and line."""
    kind = type(call.module).__name__ if call.module is not None else call.function
    return f"'{call.owner or 'the module itself'}' ({kind}, {call.at})"


def given_to(call: Call, index: int, name: str, default: Any) -> Any:
    """Return an argument of a call, by its place or its name."""
    if index < len(call.arguments):
        return call.arguments[index]
    return next((call.keywords[each] for each in NAMES.get(name, (name,)) if each in call.keywords), default)


def same(one: Any, other: Any) -> bool:
    """Return True for arguments that are alike in two runs: equal numbers, the same `Made`, and constants of equal
    values; constants computed from weights, or without values, must have the same recipe."""
    match one, other:
        case Given(), Given() if one.name or other.name:
            return one.name == other.name
        case Given(), Given():
            a, b = one.tensor, other.tensor
            has_values = not isinstance(a, FakeTensor) and not isinstance(b, FakeTensor)
            alike = (a.shape, a.dtype) == (b.shape, b.dtype)
            equal = alike and (not has_values or torch.equal(a.nan_to_num(), b.nan_to_num()))
            return equal and ((has_values and not one.from_weights) or same(one.recipe, other.recipe))
        case tuple(), tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict(), dict():
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        case slice(), slice():
            return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    is_nan = isinstance(one, float) and isinstance(other, float) and one != one and other != other
    return one is other or is_nan or (type(one) is type(other) and (one == other) is True)


def differing(one: Record, again: Record, how: str | None = None, other: Record | None = None) -> str | None:
    """Return in words the first difference of the run `again` from the run `one`, dropout apart; None without one.
    `how`: the condition of `again`, of the size of `one`; all numbers must be equal. `other`: a run of another size;
    numbers that `one` and `other` share must be equal in `again` too."""
    there = how or f"at {again.batch} x {again.size[0]} x {again.size[1]} pixels"
    for call, second in zip_longest(one.calls, again.calls):
        if call is None or second is None or _identity(call) != _identity(second):
            instead, only = where(second) if second else "no call", where(call) if call else "nothing more"
            return f"{instead} comes {there} in the place of {only}"
    given = [[(call.arguments, dict(call.keywords)) for call in run.calls] for run in (one, again, other or one)]
    for call, mine, theirs, third in zip(one.calls, *given, strict=True):
        excused = "dropout" in call.function or (call.function == "batch_norm" and how == "in training")
        fixed = same(mine, third) if other else how is not None and not excused
        if fixed and not same(mine, theirs):
            return f"{where(call)} is given other numbers {there}"
    found = [f"it draws {each}'s random numbers, on which more may depend" for each in again.drew if each != "torch"]
    found += [*(f"it moves its buffer '{each}', which no graph does" for each in again.moved), *again.faults]
    return next(iter(found), None) if how is not None else None


def _identity(call: Call) -> tuple[Any, ...]:
    made = [value for value in values_in((call.arguments, call.keywords)) if isinstance(value, Made)]
    return call.function, call.module, call.at, made
