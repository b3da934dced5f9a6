"""A record of a module's calls: the module runs on real tensors, and each call of torch with tensors is noted.

A record holds sizes as plain numbers; a second record, at another size, shows which of them depend on the size.
`Kernels` follows the input's memory kernel by kernel: compiled code is out of `Recorder`'s sight. Decision 0016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tiledseg.errors import ConfigError
from tiledseg.models.layers.block import computes_blocks
from tiledseg.models.layers.times import TimeSeries
from tiledseg.models.network import OutputPlace
from tiledseg.spatial.twins import KINDS
from tiledseg.tracing.calls import Call, Given, Made, Record, calling_line, function_name, tensors_of, values_in
from tiledseg.tracing.declared import declaration, depths_of
from tiledseg.tracing.state import FORWARD_HOOKS, Changes, drawn_from, generators, in_mode, kept_state

INEXACT = "the module cannot be computed exactly on tiles"
MOST_VALUES = 1 << 24  # of a constant: a run without values does not compute a larger one
WIDEST = 2048.0  # values a pixel that a kernel may make of the input: one that makes more ends the run
NUMBERS = frozenset(("__bool__", "item", "__int__", "__float__", "__index__", "is_nonzero"))
_READS = """__contains__ __array__ tolist numpy equal allclose nonzero unique masked_select argwhere grad _version
untyped_storage storage _typed_storage data_ptr __dlpack__ __array_interface__ apply_ map_ map2_"""
READS_VALUES = NUMBERS | frozenset(_READS.split())
# torch's function of nn.MultiheadAttention, without its dispatch to a mode as a whole: a mode sees the calls inside.
_SEEN = {**vars(functional), "has_torch_function": lambda tensors: False}
_WHOLE: Any = functional.multi_head_attention_forward
_OPEN_MULTI_HEAD = FunctionType(_WHOLE.__code__, _SEEN, None, _WHOLE.__defaults__)
# Functions that a graph treats as changes of layout or dtype alone: a cast of these is noted.
CASTS = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "view", "asarray"))
HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad_fn"))
# Modules that resize to a size or by a factor: the call inside them shows which.
RESIZING = (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)


def _with_weights(y: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y, weights


class PairsError(ConfigError):
    """The refusal of a tensor of every pixel with every other."""


class Kernels(TorchDispatchMode):
    """A mode that sees each kernel: it notes storages that depend on the input, and tensors that are written. In a run
    without values, constants of up to MOST_VALUES have values, and a number that is read of the input is 1."""

    def __init__(self, x_BCHW: torch.Tensor, widest: float) -> None:
        super().__init__()
        self.reads = False  # a number was read of what depends on the input
        self.draws = False  # random numbers were drawn
        self._most_values, self._fake = widest * x_BCHW[:, :1].numel(), isinstance(x_BCHW, FakeTensor)
        self._kept: dict[int, torch.UntypedStorage] = {}  # by address: held, so that no address is used again
        self.older: set[int | None] = set()  # addresses of storages from before the run: weights, constants
        self._dependent: dict[int, int] = {}  # storages of the input: start, stop
        self.written: list[torch.Tensor] = []  # since it was last emptied
        self._note_storage(x_BCHW, True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            taken = tensors_of((args, kwargs))
            reads = func is torch.ops.aten._local_scalar_dense.default
            if reads and isinstance(args[0], FakeTensor) and args[0].constant is None:
                if address(args[0]) not in self._dependent:
                    raise PairsError(
                        f"{INEXACT}: at {calling_line()} it reads a number of a tensor of the image's size"
                    )
                return torch.ones((), dtype=args[0].dtype).item()
            before = {address(tensor) for tensor in taken}
            self.older |= {start for start in before if start and start not in self._kept}
            depends = not self._dependent.keys().isdisjoint(before)
            constant = self._fake and not any(isinstance(tensor, FakeTensor) for tensor in taken)
            result = None
            with suppress(RuntimeError) if constant else nullcontext():  # a shape that depends on values raises
                result = func(*args, **kwargs)
            if constant and (result is None or sum(tensor.numel() for tensor in tensors_of(result)) <= MOST_VALUES):
                with unset_fake_temporarily():  # a constant: computed with its values
                    result = func(*args, **kwargs)
            self.draws |= torch.Tag.nondeterministic_seeded in func.tags
            self.reads |= depends and reads
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))
                    self.written += written
                    for tensor in written if depends else ():
                        self._note_storage(tensor, True)
            for tensor in tensors_of(result):
                self._note_storage(tensor, depends)
                if depends:
                    self.check_pairs(tensor.numel())
        return result

    def check_pairs(self, values: float) -> None:
        """Raise PairsError for a tensor of so many values."""
        if values > self._most_values:
            what = f"{INEXACT}: at {calling_line()} it lets every pixel see every other, in too large a tensor"
            raise PairsError(f"{what}; attend where pixels are fewer, or use convolutions")

    def _note_storage(self, tensor: torch.Tensor, depends: bool) -> None:
        if start := address(tensor):
            storage = self._kept.setdefault(start, tensor.untyped_storage())
            if depends:
                self._dependent[start] = start + (1 if isinstance(tensor, FakeTensor) else storage.nbytes())

    def depends(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's memory depends on the input, even if it was made out of the recorder's sight."""
        start = address(tensor)
        return start is None or any(begin <= start < stop for begin, stop in self._dependent.items())


def address(tensor: torch.Tensor) -> int | None:
    """Return the address of the tensor's storage: 0 if it is empty, another unique number if it has no values; None for
    a tensor without a storage (of `torch.vmap`)."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def is_unit(module: nn.Module, opened: bool) -> bool:
    """Return True for a unit: a module that is recorded as one call, whatever functions it calls. `opened`: declared
    modules are no units."""
    kind = type(module)
    own = computes_blocks(module) or declaration(module) is not None
    special = kind in RESIZING or getattr(module, "return_indices", False) or getattr(module, "ceil_mode", False)
    return (kind in KINDS and not special) or (own and not opened)


class Recorder(TorchFunctionMode):
    """A mode that sees each function of torch: it notes calls of functions, and of units, in `record`.

    `watch`: a function of the calls so far and the last call's tensors. `widest`: values a pixel that a kernel may
    make. `opened`: look into declared modules, which may write into parts and cast.
    """

    def __init__(
        self, root: nn.Module, x_BCHW: torch.Tensor, watch: Any = None, widest: float = WIDEST, opened: bool = False
    ) -> None:
        super().__init__()
        self._opened = opened
        self.record = Record(len(x_BCHW), (x_BCHW.shape[2], x_BCHW.shape[3]), x_BCHW.dtype)
        self.kernels = Kernels(x_BCHW, widest)
        self._in_training, self._watch = root.training, watch
        named = root.whole if isinstance(root, TimeSeries) else root
        self._paths = {root: "", **{module: name for name, module in named.named_modules()}}
        self._depths = {root.get_submodule(path) for path in depths_of(root)}
        self._modes = {module: module.training for module in root.modules()}
        self._owners, self._inside = [""], 0  # paths of the modules that run, outermost first; how many are units
        self._values: dict[int, Made | Given] = {}  # by the tensor's id
        self._alive: dict[int | None, list[torch.Tensor]] = {}  # by address: held, so that no id is used again
        self._stale: set[int] = set()  # ids of tensors whose memory was written through another tensor
        self._used: set[int] = set()  # ids of constants that a call with tensors of the input has taken
        self._measured: set[int] = set()  # ids of buffers that norms move
        self._note(x_BCHW, Made(-1))
        for path, module in root.named_modules():
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                self._note(parameter, Given(parameter, name, True))
            for name, buffer in module.named_buffers(prefix=path, recurse=False):
                self._note(buffer, Given(buffer, name, True, (module, name.rpartition(".")[2])))

    def _note(self, tensor: torch.Tensor, value: Made | Given) -> None:
        self._values[id(tensor)] = value
        self._stale.discard(id(tensor))
        self._alive.setdefault(address(tensor), []).append(tensor)

    def _fault(self, what: str, kind: str = "faults", inside: bool = True) -> None:
        """Append to the record's list `kind`, with the place. `inside`: also inside an opened declared module."""
        if self._opened and not inside:
            return
        getattr(self.record, kind).append(f"{self._owners[-1] or 'the module'} at {calling_line()}: {what}")

    def _described(self, value: Any) -> Any:
        """Return a value with `Made` or `Given` in the place of each tensor."""
        if isinstance(value, torch.Tensor):
            return self._value_of(value)
        if isinstance(value, tuple | list):
            return tuple(map(self._described, value))
        return {key: self._described(each) for key, each in value.items()} if isinstance(value, Mapping) else value

    def _value_of(self, tensor: torch.Tensor) -> Made | Given:
        if id(tensor) in self._stale:
            self._fault("takes a tensor written through a view, detach or .data; compute a new one", inside=False)
            self._stale.discard(id(tensor))
        function = getattr(tensor.grad_fn, "_forward_cls", None)
        if function is not None and not function.__module__.startswith(("torch.", "tiledseg.")):
            self._fault(f"{function.__name__} has a backward pass of its own", "own_gradients")
        if id(tensor) not in self._values:
            if tensor.requires_grad and tensor.is_leaf:
                self._fault("learns a tensor that is no parameter of the module", "own_gradients")
            if self.kernels.depends(tensor):
                self._fault("takes a tensor that was made out of sight (jit, vmap, dlpack); use plain calls of torch")
            self._note(tensor, Given(tensor))
        return self._values[id(tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {}) if self._inside else self._run(func, None, args, kwargs or {})

    def call_module(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module in place of nn.Module.__call__."""
        whole = not self._inside and module in self._paths and (module in self._depths or is_unit(module, self._opened))
        self._owners.append(self._paths.get(module, f"{self._owners[-1]}.{type(module).__name__}".lstrip(".")))
        self._inside += whole
        try:
            return self._run(partial(call, module), module, args, kwargs) if whole else call(module, *args, **kwargs)
        finally:
            self._owners.pop()
            self._inside -= whole

    def _run(self, function: Any, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
        """Make one call and note it."""
        name = type(module).__name__ if module is not None else function_name(function)
        if name == "multi_head_attention_forward":
            with self:  # its calls are recorded one by one, without the weights of attention
                y, none = _OPEN_MULTI_HEAD(*args, **kwargs | {"need_weights": False})
            if not kwargs.get("need_weights", True):
                return y, none
            # In the place of the weights of all pairs of pixels, which a graph does not make, zeros of no memory.
            heads = () if kwargs.get("average_attn_weights", True) else (args[4],)
            shape = y.shape[1], *heads, len(args[0]), len(args[1])
            self.kernels.check_pairs(prod(shape) / 4)
            args, kwargs, unseen = (y,), {}, torch.zeros((), dtype=y.dtype, device=y.device).expand(shape)
            function = partial(_with_weights, weights=unseen)
        placed, named = self._described(args), self._described(kwargs)
        self._settle()
        if name in READS_VALUES - NUMBERS and any(isinstance(each, FakeTensor) for each in tensors_of(args)):
            raise NotImplementedError(f"{name} of a tensor without values")
        result = function(*args, **kwargs)
        if module in self._depths and any(result is each for each in args):  # in evaluation: give it its own id
            result = args[0].view_as(args[0])
        self._settle(module is not None)
        if isinstance(result, torch.Tensor) and not result.numel():  # empty: a constant
            self._note(result, Given(result))
            return result
        values = values_in((placed, named))
        constants = [value for value in values if isinstance(value, Given)]
        depends = len(constants) < len(values) and not name.startswith("new_")  # new_*: takes dtype and device alone
        from_weights = any(value.from_weights for value in constants)
        if module is None:
            self._check_function(name, depends, from_weights)
        self.kernels.reads = self.kernels.draws = False  # a unit may read and draw
        if module and (module.training != self._modes[module] or (module.training and not self._in_training)):
            self._fault(f"{name} is in another mode (train, eval) than the module; set modes outside of forward")
        if module is not None or name == "batch_norm":
            own = module.buffers(recurse=False) if module is not None and declaration(module) is None else ()
            self._measured |= {id(tensor) for tensor in (*own, *(value.tensor for value in constants))}
        is_method = module is None and getattr(function, "__objclass__", None) is not None
        parts = tensors_of(result)
        if not depends:
            self._note_constants(module or name, is_method, placed, named, result, constants)
        elif parts:
            self._used |= {id(value.tensor) for value in constants}
            for number, part in enumerate(parts):
                self._note(part, Made(len(self.record.calls), number))
            made = tuple(tuple(part.shape) for part in parts), tuple(part.is_floating_point() for part in parts)
            call = Call(name, module, self._owners[-1], calling_line(), placed, named, *made, is_method)
            self.record.calls.append(call)
            if self._watch is not None:
                self._inside += 1
                self._watch(self.record.calls, parts)
                self._inside -= 1
        for tensor in parts if depends or from_weights else ():
            is_float, taken = tensor.is_floating_point(), next(iter(tensors_of(args)), tensor)
            cuts = tensor.element_size() < self.record.dtype.itemsize if is_float else module is None and name in CASTS
            cuts = cuts or (tensor.dtype == torch.float64 != self.record.dtype and depends)
            if cuts and taken.is_floating_point() and depends:
                cast = f"{name} gives {tensor.dtype} in a network of {self.record.dtype}; keep the dtype of the network"
                self._fault(cast, inside=False)
            elif cuts and taken.is_floating_point():  # a weight: each rank would round its part of the gradient
                self._fault(f"{name} rounds gradients to {tensor.dtype}", "own_gradients")
        return result

    def _check_function(self, name: str, depends: bool, from_weights: bool) -> None:
        """Note a function that does more than compute a tensor: hooks, switched gradients, reads, draws, writes."""
        if name == "_set_grad_enabled":
            self._fault("switches gradients on or off, as torch.utils.checkpoint; detach, or use memory.recompute")
        if name in HOOKS:
            self._fault(f"hangs a hook ({name}) on a tensor, as torch.utils.checkpoint does", "own_gradients")
        if name in READS_VALUES and (depends or from_weights):
            self._fault(f"{name} reads the values of a tensor, on which calls may depend; compute with tensors alone")
        if self.kernels.draws and "dropout" not in name and name != "scaled_dot_product_attention":
            mode = "training" if self._in_training else "evaluation too"
            self._fault(f"{name} draws numbers in {mode}; drop by Dropout2d, or make them a buffer")
        if depends and name in ("__setitem__", "__set__", "set_"):
            self._fault("writes into a part of a tensor; join parts by torch.cat, or use torch.where", inside=False)

    def _note_constants(self, name: Any, is_method: bool, placed: Any, named: Any, result: Any, values: Any) -> None:
        owner = values[0].owner if values else None
        if name == "add_" and owner and owner[1] == "num_batches_tracked":
            self.record.counted.append(owner[0])
            self._measured.add(id(values[0].tensor))
            return
        of_module = isinstance(name, nn.Module)
        from_weights = of_module or any(value.from_weights for value in values)
        called = f"Tensor.{name}" if is_method and hasattr(torch.Tensor, name) else name
        if str(called).startswith("Tensor.new_"):  # of a tensor, maybe of the input, it takes dtype and device alone
            placed, named = placed[1:], {"dtype": result.dtype, "device": result.device, **named}
            called = called.removeprefix("Tensor.new_")
        by = (name, self._owners[-1]) if of_module else None
        for number, part in enumerate(tensors_of(result)):
            if id(part) not in self._values or (id(part) in self._stale and not from_weights):
                recipe = called, placed, named, number if isinstance(result, tuple | list) else None
                self._note(part, Given(part, None, from_weights, by, recipe))

    def _settle(self, is_unit: bool = False) -> None:
        """Check the tensors that kernels have written since the last check. A write to the module's state is a fault,
        except by a unit; other tensors of that memory become stale."""
        all_written, self.kernels.written = self.kernels.written, []
        for written in all_written:
            there = self._alive.get(address(written), [])
            constants = [value for t in there if isinstance(value := self._values[id(t)], Given)]
            if address(written) in self.kernels.older:
                name = next((f"'{value.name}'" for value in constants if value.name), "a tensor that it keeps")
                if not is_unit and not name.endswith("num_batches_tracked'"):
                    self._fault(f"writes over {name}; no graph keeps what changes from call to call")
                continue
            if not is_unit and any(id(tensor) in self._used for tensor in there):
                self._fault("writes over a tensor that it has used; compute a new one", inside=False)
            same = () if self.kernels.depends(written) else (id(v.tensor) for v in constants if not v.from_weights)
            self._stale |= {id(tensor) for tensor in there} - set(same)
            for tensor in there:  # its recipe no longer gives its values
                if isinstance(value := self._values[id(tensor)], Given) and not value.from_weights:
                    self._values[id(tensor)] = replace(value, recipe=None)

    def finish(self, returned: Any, changes: Changes) -> Record:
        """Return the record, with the changes of the whole run."""
        self._settle()
        if self.kernels.reads:
            self._fault("a number is read of a tensor out of sight; compute with tensors alone")
        record, numbers = self.record, count()
        record.faults += [f"attribute '{name}' is changed by forward; compute it anew" for name in changes.attributes]
        hung = not set(changes.marks).isdisjoint(FORWARD_HOOKS)
        record.kept, record.hangs = changes.kept, hung and len(changes.marks) == len(changes.attributes)
        record.moved = [name for name, buffer in changes.buffers.items() if id(buffer) not in self._measured]
        record.returned = self._described(returned)
        record.form = tree_map(lambda y: OutputPlace(next(numbers)) if isinstance(y, torch.Tensor) else y, returned)
        return record


def record(root: nn.Module, x_BCHW: torch.Tensor, fakes: Any = None, gradients: Any = 0, **how: Any) -> Record:
    """Record the calls of `root` for this input; afterwards set back buffers, attributes and random number generators.

    `fakes`: FakeTensorMode of an input without values. `how`: arguments of `Recorder`; `first`, the mode (training or
    not) of a run before; `hangs`: keep new hooks.
    """
    state, first = nullcontext(Changes()) if how.pop("hangs", False) else kept_state(root), how.pop("first", None)
    recorder, call = Recorder(root, x_BCHW, **how), nn.Module.__call__
    with torch.set_grad_enabled(bool(gradients)), drawn_from(0), state as changes:
        before = generators()
        if first is not None:
            with in_mode(root, first):
                root(x_BCHW.clone())
        nn.Module.__call__ = lambda *args, **kwargs: recorder.call_module(call, *args, **kwargs)  # type: ignore
        try:
            with recorder, fakes or nullcontext(), recorder.kernels:
                returned = root(x_BCHW)
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]
        recorder.record.drew = tuple(name for name, state in generators().items() if state != before[name])
    return recorder.finish(returned, changes)
