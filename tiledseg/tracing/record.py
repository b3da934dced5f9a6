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
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from tiledseg.models.network import OutputPlace
from tiledseg.tracing.calls import Call, Given, Made, Record, calling_line, function_name, tensors_in, values_in
from tiledseg.tracing.kernels import Kernels, address, overlap
from tiledseg.tracing.state import Changes, drawn_from, in_mode, kept_state

READS_VALUES = frozenset(
    (
        *("__bool__", "item", "__int__", "__float__", "__index__", "__contains__", "__array__", "tolist", "numpy"),
        *("is_nonzero", "equal", "allclose", "nonzero", "unique", "masked_select", "argwhere"),
        *(
            "grad",
            "_version",
            "untyped_storage",
            "storage",
            "_typed_storage",
            "data_ptr",
            "__dlpack__",
            "__array_interface__",
        ),
    )
)
# Functions that a graph takes for changes of layout or of dtype alone.
CASTS = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "view", "asarray"))
HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad_fn"))
Watch = Callable[[list[Call], list[torch.Tensor]], None]


class Recorder(TorchFunctionMode):
    """Writes calls down while it is entered. `is_unit`: whether a module is one call, whatever it does inside."""

    def __init__(self, root: nn.Module, x_BCHW: torch.Tensor, is_unit: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.record = Record(len(x_BCHW), (x_BCHW.shape[2], x_BCHW.shape[3]))
        self.kernels = Kernels(x_BCHW)
        self._dtype = x_BCHW.dtype
        self._is_unit = is_unit
        self._paths = {id(module): name for name, module in root.named_modules()}
        self._owners: list[str] = [""]
        self._inside = 0  # units
        self._in_training = root.training
        self._is_method = False
        self._known: dict[int, Made | Given] = {}
        self.watch: Watch | None = None
        self._alive: dict[int | None, list[torch.Tensor]] = {}  # by address; an id belongs to a tensor while it lives
        self._stale: set[int] = set()  # tensors that share memory with one that was written since
        self._used: set[int] = set()  # tensors not of the input that a call on it has taken
        self._measured: set[int] = set()  # buffers that norms move
        self.know(x_BCHW, Made(-1))
        for path, module in root.named_modules():
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                self.know(parameter, Given(parameter, name, (parameter,)))
            for name, buffer in module.named_buffers(prefix=path, recurse=False):
                self.know(buffer, Given(buffer, name, (buffer,), (module, name.rpartition(".")[2])))

    def know(self, tensor: torch.Tensor, value: Made | Given) -> None:
        self._known[id(tensor)] = value
        self._stale.discard(id(tensor))
        self._alive.setdefault(address(tensor), []).append(tensor)

    def fault(self, what: str) -> None:
        self.record.faults.append(f"{self._here()}: {what}")

    def _here(self) -> str:
        return f"{self._owners[-1] or 'the module'} at {calling_line()}"

    def placed(self, value: Any) -> Any:
        """A value with what is known of each tensor in its place."""
        if isinstance(value, torch.Tensor):
            return self._placed(value)
        if isinstance(value, tuple | list):
            return tuple(self.placed(each) for each in value)
        if isinstance(value, Mapping):
            return {key: self.placed(each) for key, each in value.items()}
        return value

    def _placed(self, tensor: torch.Tensor) -> Made | Given:
        found = self._known.get(id(tensor))
        if id(tensor) in self._stale:
            self.fault(
                "takes a tensor that was written through another one of the same memory (a view, detach, .data), which "
                "no graph says; compute a new tensor instead"
            )
            self._stale.discard(id(tensor))
        function = getattr(tensor.grad_fn, "_forward_cls", None)
        if function is not None and not function.__module__.startswith(("torch.", "tiledseg.")):
            self.record.own_gradients.append(f"{self._here()}: {function.__name__} has a backward pass of its own")
        if found is None:
            if tensor.requires_grad and tensor.is_leaf:
                self.record.own_gradients.append(f"{self._here()}: learns a tensor that is no parameter of the module")
            found = Given(tensor)
            if self.kernels.depends(tensor):
                self.fault(
                    "takes a tensor of the input that was made out of sight (torch.jit.script, torch.vmap, dlpack, a "
                    "storage, DisableTorchFunction); make it by plain calls of torch"
                )
            self.know(tensor, found)
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        placed, named = self.placed(args), self.placed(kwargs)
        name = function_name(func)
        if name == "_set_grad_enabled" and not _in_checkpoint():
            self.fault("switches gradients on or off, which a graph does not know; detach tensors instead")
        self._settle(self.record.faults)
        result = func(*args, **kwargs)
        self._settle(self.record.faults)
        drew, self.kernels.reads, self.kernels.draws = self.kernels.draws, False, False
        if isinstance(result, torch.Tensor) and not result.numel():  # of no channels: nothing of the input in it
            self.know(result, Given(result))
            return result
        known = list(values_in((placed, named)))
        depends = any(isinstance(value, Made) for value in known)
        if name in READS_VALUES and (depends or any(isinstance(value, Given) and value.weights for value in known)):
            self.fault(
                f"{name} reads the values of a tensor, and what is computed next may depend on them; compute with "
                "tensors alone"
            )
        if drew and "dropout" not in name:
            too = "" if self._in_training else " in evaluation too"
            self.fault(f"{name} draws numbers{too}, which no graph keeps; drop by Dropout2d, or make them a buffer")
        if depends and name in ("__setitem__", "__set__", "set_"):
            self.fault(
                "writes into a part of a tensor, which no graph says; join the parts by torch.cat, or choose by "
                "torch.where"
            )
        if name in HOOKS:
            self.record.own_gradients.append(f"{self._here()}: hangs a hook ({name}) on a tensor")
        if name == "batch_norm":
            self._measured |= {id(value.tensor) for value in known if isinstance(value, Given)}
        self._is_method = getattr(func, "__objclass__", None) is not None
        self._note(name, None, placed, named, result, depends, known)
        if depends or any(isinstance(value, Given) and value.weights for value in known):
            self._check_dtype(name, args, result, not depends)
        return result

    def _settle(self, faults: list[str]) -> None:
        """Look at what kernels have written: state is a fault, and what shares that memory is stale."""
        for written in self.kernels.take_written():
            there = self._alive.get(address(written), [])
            names = [value.name for value in map(self._known.get, map(id, there)) if isinstance(value, Given)]
            name = next((f"'{name}'" for name in names if name), "a tensor that it keeps")
            if self.kernels.is_older(written):
                if not name.endswith("num_batches_tracked'"):
                    faults.append(f"{self._here()}: writes over {name}; no graph keeps what changes from call to call")
                continue
            over = [tensor for tensor in there if overlap(written, tensor)]
            constants = not self.kernels.depends(written)
            if any(id(tensor) in self._used for tensor in over):
                faults.append(f"{self._here()}: writes over a tensor that it has used; compute a new one")
            self._stale |= {id(tensor) for tensor in over if not (constants and _is_constant(self._known[id(tensor)]))}

    def _check_dtype(self, name: str, args: Any, result: Any, is_weight: bool = False) -> None:
        """Note casts that lose digits: a graph has one dtype. Each rank would round its part of a weight's gradient."""
        for tensor in tensors_in(result):
            is_cut = tensor.element_size() < self._dtype.itemsize if tensor.is_floating_point() else name in CASTS
            if is_cut and is_weight:
                self.record.own_gradients.append(f"{self._here()}: {name} rounds gradients to {tensor.dtype}")
            elif is_cut and next(tensors_in(args), tensor).is_floating_point():
                self.fault(f"{name} gives {tensor.dtype} in a network of {self._dtype}; keep the dtype of the network")

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
        self._inside += 1
        self._owners.append(path)
        try:
            placed, named = self.placed(args), self.placed(kwargs)
            self._settle(self.record.faults)
            result = call(module, *args, **kwargs)
            self._settle([])  # a norm moves its statistics
            self._measured |= {id(buffer) for buffer in module.buffers(recurse=False)}
            known = list(values_in((placed, named)))
            depends = any(isinstance(value, Made) for value in known)
            self._note(type(module).__name__, module, placed, named, result, depends, known)
            if depends:
                self._check_dtype("", args, result)
        finally:
            self._owners.pop()
            self._inside -= 1
        return result

    def _note(
        self, name: str, module: nn.Module | None, placed: Any, named: Any, result: Any, depends: bool, known: list[Any]
    ) -> None:
        parts = list(tensors_in(result))
        if not depends:
            owner = known[0].owner if known else None
            if name in ("add_", "__iadd__") and owner and owner[1] == "num_batches_tracked":
                self.record.counted.append(owner[0])
                self._measured.add(id(known[0].tensor))
                return
            weights = tuple(dict.fromkeys(w for value in known for w in value.weights))
            for number, part in enumerate(parts):
                if id(part) not in self._known or (id(part) in self._stale and not weights):
                    called = f"Tensor.{name}" if self._is_method and hasattr(torch.Tensor, name) else name
                    recipe = (called, placed, named, number if isinstance(result, tuple | list) else None)
                    self.know(part, Given(part, None, weights, recipe=recipe))
            return
        if not parts:
            return
        self._used |= {id(value.tensor) for value in known if isinstance(value, Given)}
        shapes = tuple(tuple(part.shape) for part in parts)
        for number, part in enumerate(parts):
            self.know(part, Made(len(self.record.calls), number))
        at, method = calling_line(), self._is_method and module is None
        training = module is not None and module.training
        call = Call(name, module, self._owners[-1], at, placed, named, shapes, method, training)
        self.record.calls.append(call)
        if self.watch is not None:
            self._inside += 1
            self.watch(self.record.calls, parts)
            self._inside -= 1

    def finish(self, returned: Any, changes: Changes) -> Record:
        """The record, with what the whole run says."""
        self._settle(self.record.faults)
        if self.kernels.reads:
            self.fault("a number is read of a tensor out of sight; compute with tensors alone")
        for name in changes.attributes:
            what = f"attribute '{name}' is changed by forward; no graph keeps what changes from call to call"
            self.record.faults.append(what)
        self.record.kept = changes.kept
        self.record.moved = [name for name, buffer in changes.buffers.items() if id(buffer) not in self._measured]
        self.record.returned = self.placed(returned)
        self.record.form = _form(returned, count())
        return self.record


def record(
    root: nn.Module,
    x_BCHW: torch.Tensor,
    is_unit: Callable[[nn.Module], bool],
    gradients: bool = False,
    watch: Watch | None = None,
    fakes: FakeTensorMode | None = None,
    first: bool | None = None,
) -> Record:
    """Record the calls of `root` for this input. No buffer, attribute or common generator of random numbers moves.

    `watch` takes the calls so far after each one, and the tensors that it gave. `fakes`: the mode of an input that has
    a size alone, for which nothing is computed. `first`: a mode in which it is called once before, unrecorded.
    """
    recorder = Recorder(root, x_BCHW, is_unit)
    recorder.watch = watch
    still = torch.set_grad_enabled(gradients), _still_draws(recorder.record)
    with still[0], still[1], kept_state(root) as changes:
        if first is not None:
            with in_mode(root, first):
                root(x_BCHW.clone())
        with _calls_of(recorder), recorder, fakes or recorder.kernels:
            returned = root(x_BCHW)
    return recorder.finish(returned, changes)


def _is_constant(value: Made | Given) -> bool:
    return isinstance(value, Given) and not value.weights


def _form(value: Any, numbers: Iterator[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return OutputPlace(next(numbers))
    if isinstance(value, Mapping):
        return {key: _form(each, numbers) for key, each in value.items()}
    if isinstance(value, list | tuple):
        made = [_form(each, numbers) for each in value]
        return made if isinstance(value, list) else tuple(made)
    return value


@contextmanager
def _calls_of(recorder: Recorder) -> Iterator[None]:
    """Hand calls of modules to the recorder."""
    call = nn.Module.__call__

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, call, *args, **kwargs)

    nn.Module.__call__ = call_module  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


@contextmanager
def _still_draws(noted: Record) -> Iterator[None]:
    """Note whose generators draw, and set them back."""
    with drawn_from(0):
        before = _generators()
        yield
        noted.drew = tuple(name for name, state in _generators().items() if state != before[name])


def _generators() -> dict[str, Any]:
    numpys: Any = np.random.get_state()
    kind, keys, *rest = numpys
    states = torch.random.get_rng_state().tolist()
    return {"torch": states, "Python": random.getstate(), "NumPy": (kind, tuple(keys), *rest)}


def _in_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
