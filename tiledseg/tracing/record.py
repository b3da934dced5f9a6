"""A record of what a module calls: it runs on real tensors, and every call of torch that sees one is written down.

torch.fx's own tracer hands modules stand-ins of tensors. Code that asks `isinstance(x, torch.Tensor)`, or what
`x.shape` is, then goes another way without a word. Here tensors are tensors and sizes numbers; what depends on them is
found by a second record at another size (`tracing.runs`). Decision 0016.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tiledseg.models.network import Output

READS_VALUES = frozenset(
    (
        *("__bool__", "item", "__int__", "__float__", "__index__", "__contains__", "__array__", "tolist", "numpy"),
        *("is_nonzero", "equal", "allclose", "nonzero", "unique", "masked_select", "argwhere"),
    )
)
DRAWS = frozenset(("rand", "randn", "randint", "randperm", "normal", "bernoulli", "poisson", "multinomial"))


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


@dataclass
class Record:
    """All calls of one run, and what the module returned."""

    size: tuple[int, int]
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    given: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # calls that see weights alone
    returned: Any = None
    form: Any = None  # of what it returned, with an `Output` for each tensor
    drew: tuple[str, ...] = ()  # whose random numbers moved

    def shape(self, made: Made) -> tuple[int, ...]:
        return self.calls[made.call].shapes[made.part]


class Recorder(TorchFunctionMode):
    """Writes calls down while it is entered. `is_unit`: whether a module is one call, whatever it does inside."""

    def __init__(self, root: nn.Module, size: tuple[int, int], is_unit: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.record = Record(size)
        self._is_unit = is_unit
        self._paths = {id(module): name for name, module in root.named_modules()}
        self._owners: list[str] = [""]
        self._inside = 0  # units
        self._in_training = root.training
        self._is_method = False
        self._known: dict[int, Made | Given] = {}
        self._alive: list[torch.Tensor] = []  # an id belongs to one tensor as long as it lives
        for path, module in root.named_modules():
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                self.know(parameter, Given(parameter, name, (parameter,)))
            for name, buffer in module.named_buffers(prefix=path, recurse=False):
                self.know(buffer, Given(buffer, name, (buffer,), (module, name.rpartition(".")[2])))

    def know(self, tensor: torch.Tensor, value: Made | Given) -> None:
        self._known[id(tensor)] = value
        self._alive.append(tensor)

    def placed(self, value: Any) -> Any:
        """A value with what is known of each tensor in its place."""
        if isinstance(value, torch.Tensor):
            return self._known.get(id(value)) or Given(value)
        if isinstance(value, tuple | list):
            return tuple(self.placed(each) for each in value)
        if isinstance(value, Mapping):
            return {key: self.placed(each) for key, each in value.items()}
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        placed, named = self.placed(args), self.placed(kwargs)
        name = function_name(func)
        if name == "_set_grad_enabled" and not _in_checkpoint():
            self.record.faults.append(
                f"{self._owners[-1] or 'the module'} at {calling_line()}: switches gradients on or off, which a graph "
                "does not know; detach tensors instead"
            )
        result = func(*args, **kwargs)
        known = list(values_in((placed, named)))
        depends = any(isinstance(value, Made) for value in known)
        if depends and name in READS_VALUES:
            self.record.faults.append(
                f"{self._owners[-1] or 'the module'} at {calling_line()}: {name} reads the values of a tensor, and "
                "what is computed next may depend on them; compute with tensors alone"
            )
        if name in DRAWS and not self._in_training:
            self.record.faults.append(
                f"{self._owners[-1] or 'the module'} at {calling_line()}: {name} draws numbers in evaluation too, "
                "which no graph keeps; leave it to training, or make it a buffer"
            )
        if depends and name == "__setitem__":
            self.record.faults.append(
                f"{self._owners[-1] or 'the module'} at {calling_line()}: writes into a part of a tensor, which no "
                "graph says; join the parts by torch.cat, or choose by torch.where"
            )
        self._is_method = getattr(func, "__objclass__", None) is not None
        self._note(name, None, placed, named, result, depends, known)
        return result

    def call_module(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of nn.Module.__call__."""
        path = self._paths.get(id(module), f"{self._owners[-1]}.{type(module).__name__}".lstrip("."))
        lasting = id(module) in self._paths  # not made in the middle of a call
        if self._inside or not lasting or not self._is_unit(module):
            self._owners.append(path)
            try:
                return call(module, *args, **kwargs)
            finally:
                self._owners.pop()
        placed, named = self.placed(args), self.placed(kwargs)
        self._inside += 1
        try:
            result = call(module, *args, **kwargs)
        finally:
            self._inside -= 1
        known = list(values_in((placed, named)))
        self._owners.append(path)
        self._note(type(module).__name__, module, placed, named, result, any(isinstance(v, Made) for v in known), known)
        self._owners.pop()
        return result

    def _note(
        self, name: str, module: nn.Module | None, placed: Any, named: Any, result: Any, depends: bool, known: list[Any]
    ) -> None:
        parts = list(tensors_in(result))
        if not depends:
            weights = tuple(dict.fromkeys(w for value in known for w in value.weights))
            for number, part in enumerate(parts):
                self.record.given.append((f"'{self._owners[-1]}' ({name}, {calling_line()})", tuple(part.shape)))
                if id(part) not in self._known:
                    recipe = (name, placed, named, number if isinstance(result, tuple | list) else None)
                    self.know(part, Given(part, None, weights, recipe=recipe))
            return
        if not parts:
            return
        shapes = tuple(tuple(part.shape) for part in parts)
        for number, part in enumerate(parts):
            self.know(part, Made(len(self.record.calls), number))
        at, method = calling_line(), self._is_method and module is None
        self.record.calls.append(Call(name, module, self._owners[-1], at, placed, named, shapes, method))


def record(root: nn.Module, x_BCHW: torch.Tensor, is_unit: Callable[[nn.Module], bool]) -> Record:
    """What `root` calls for this input. No buffer moves, nor does a common generator of random numbers."""
    recorder = Recorder(root, (x_BCHW.shape[2], x_BCHW.shape[3]), is_unit)
    recorder.know(x_BCHW, Made(-1))
    with torch.no_grad(), _still_draws(recorder.record), _still_buffers(root), _calls_of_modules(recorder), recorder:
        returned = root(x_BCHW)
    recorder.record.returned = recorder.placed(returned)
    recorder.record.form = _form(returned, count())
    return recorder.record


def _form(value: Any, numbers: Iterator[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return Output(next(numbers))
    if isinstance(value, Mapping):
        return {key: _form(each, numbers) for key, each in value.items()}
    if isinstance(value, list | tuple):
        made = [_form(each, numbers) for each in value]
        return made if isinstance(value, list) else tuple(made)
    return value


@contextmanager
def _calls_of_modules(recorder: Recorder) -> Iterator[None]:
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, original, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


@contextmanager
def _still_buffers(root: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in root.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


@contextmanager
def _still_draws(noted: Record) -> Iterator[None]:
    """Notes whose generators draw, and sets them back."""
    before = _generators()
    with torch.random.fork_rng():
        try:
            yield
            noted.drew = tuple(name for name, state in _generators().items() if state != before[name])
        finally:
            random.setstate(before["Python"])
            np.random.set_state(before["NumPy"])


def _generators() -> dict[str, Any]:
    numpys: Any = np.random.get_state()
    kind, keys, *rest = numpys
    states = torch.random.get_rng_state().tolist()
    return {"torch": states, "Python": random.getstate(), "NumPy": (kind, tuple(keys), *rest)}


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


def _in_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def calling_line() -> str:
    """The file and line of the innermost code that is neither torch's nor of this room."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.startswith(_HERE) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


_HERE = __file__.rsplit("/", 1)[0]
