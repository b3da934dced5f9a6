"""One call of a part of somebody's module: what autograd keeps of it is let go, and had from a second run when the
backward pass asks for it.

The second run takes the same inputs, in the state that the module and the generators of random numbers had, and stops
when all that is wanted has been seen: the same bits, and nothing changes twice. A call that writes over its inputs, of
which no second run could come, keeps what it keeps.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from tiledseg.memory.rerun.as_it_was import Autocast, Draws, Modules
from tiledseg.memory.saved import UnmovedTensor, overwritten

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
_ONE_AT_A_TIME = threading.RLock()  # a second run takes a module's state away for a while
_HERE = threading.local()


class ModulePart(NamedTuple):
    """A part of a module that runs by itself: `modules`, called by `forward`. `name` is for the user."""

    name: str
    modules: tuple[nn.Module, ...]
    forward: Callable[..., Any]


class _AllSeenError(BaseException):
    """What was wanted of a second run has been seen. No program's own error: nobody is to catch it on the way."""


class _Held:
    """Somewhere, by the hooks that are in force around the call, or here."""

    def __init__(self, tensor: torch.Tensor, around: Hooks | None) -> None:
        self._unpack = around[1] if around else None
        self._what = around[0](tensor) if around else UnmovedTensor(tensor)

    def get(self) -> torch.Tensor:
        tensor: torch.Tensor = self._unpack(self._what) if self._unpack else self._what.tensor()
        return tensor


class _Input:
    """A tensor that the call takes."""

    def __init__(self, tensor: torch.Tensor, around: Hooks | None) -> None:
        self._held, self._wants = _Held(tensor, around), tensor.requires_grad

    def again(self) -> torch.Tensor:
        """The same values, in a graph of its own."""
        return self._held.get().detach().requires_grad_(self._wants)


class PartHandle:
    """In autograd's graph in the place of a tensor, which it holds until the call has ended."""

    def __init__(self, call: PartCall, number: int, tensor: torch.Tensor) -> None:
        self.call, self.number = call, number
        self.tensor: torch.Tensor | None = tensor.detach()
        self.kind = tensor.dtype, tuple(tensor.shape)
        self.version = tensor._version
        self._watch = tensor.detach()
        self.held: _Held | None = None

    def keep(self, around: Hooks | None) -> None:
        assert self.tensor is not None, "the call has not ended"
        self.held, self.tensor = _Held(self.tensor, around), None
        self._watch = None  # type: ignore[assignment]

    def let_go(self) -> None:
        """Its version stays that of the tensor, whose bytes go."""
        self._watch.data = torch.empty(0, dtype=self._watch.dtype, device=self._watch.device)
        self.tensor = None

    def get(self) -> torch.Tensor:
        """Raises RuntimeError, as autograd does, where it has been written over."""
        if self.held is not None:
            return self.held.get()
        if self.tensor is not None:  # a backward pass within the call
            return self.tensor
        if self._watch._version != self.version:
            raise overwritten(str(self.kind[0]), self.kind[1], self._watch._version, self.version)
        return self.call.again(self.number)


class PartCall:
    """A call that runs. `freed`: bytes that have been let go at its end."""

    def __init__(self, part: ModulePart, args: Any, kwargs: Any) -> None:
        self._part = part
        leaves, self._form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._around = _hooks_around()
        self._inputs = [_Input(leaf, self._around) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._as_it_was = Modules(part.modules), Draws(tensors), Autocast(tensors)
        self._steady = {_memory(tensor) for tensor in tensors} | _memories(part.modules)
        self._handles: list[weakref.ref[PartHandle]] = []
        self._found: dict[int, torch.Tensor] = {}
        self.freed = 0

    def run(self, args: Any, kwargs: Any) -> Any:
        handles: list[PartHandle] = []

        def pack(tensor: torch.Tensor) -> PartHandle:
            handle = PartHandle(self, len(self._handles), tensor)
            self._handles.append(weakref.ref(handle))
            handles.append(handle)
            if _memory(tensor) in self._steady:
                handle.keep(self._around)
            return handle

        with saved_tensors_hooks(pack, PartHandle.get):
            result = self._part.forward(*args, **kwargs)
        self._let_go([handle for handle in handles if handle.held is None])
        return result

    def _let_go(self, handles: Sequence[PartHandle]) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            for handle in handles:
                handle.keep(self._around)
        else:
            sizes = {_memory(h.tensor): h.tensor.untyped_storage().nbytes() for h in handles if h.tensor is not None}
            self.freed = sum(sizes.values())
            for handle in handles:
                handle.let_go()
        self._versions.clear()
        self._steady.clear()

    def again(self, number: int) -> torch.Tensor:
        """What the call has kept as its tensor number so and so."""
        with _ONE_AT_A_TIME:
            if number not in self._found:
                self._found = self._second_run()
            return self._found.pop(number)

    def _second_run(self) -> dict[int, torch.Tensor]:
        living = [handle for reference in self._handles if (handle := reference()) is not None and handle.held is None]
        wanted = {handle.number: handle.kind for handle in living}
        found: dict[int, torch.Tensor] = {}
        seen = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal seen
            if seen in wanted:
                self._check(wanted[seen], (tensor.dtype, tuple(tensor.shape)))
                found[seen] = tensor.detach()
            seen += 1
            if len(found) == len(wanted):
                raise _AllSeenError

        leaves = [leaf.again() if isinstance(leaf, _Input) else leaf for leaf in self._inputs]
        args, kwargs = tree_unflatten(leaves, self._form)
        with ExitStack() as stack:
            for state in self._as_it_was:
                stack.enter_context(state.restored())
            stack.enter_context(_alone())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, _nothing))
            try:
                self._part.forward(*args, **kwargs)
            except _AllSeenError:
                return found
        raise self._other("fewer tensors than the first")

    def _check(self, expected: Any, found: Any) -> None:
        if expected != found:
            raise self._other(f"{found[0]} {list(found[1])} in the place of {expected[0]} {list(expected[1])}")

    def _other(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"a second run of {self._part.name} has kept {what}: it depends on more than its inputs, its module's "
            "attributes and random numbers; leave model out of large_model_support"
        )


def _nothing(packed: object) -> torch.Tensor:
    raise AssertionError("what a second run keeps is not differentiated")


@contextmanager
def _alone() -> Iterator[None]:
    """Parts within run as they are."""
    before = within()
    _HERE.within = True
    try:
        yield
    finally:
        _HERE.within = before


def within() -> bool:
    """Whether a call of a part runs in this thread."""
    return getattr(_HERE, "within", False)


def run_part(part: ModulePart, args: Any, kwargs: Any) -> tuple[Any, PartCall]:
    """What the part gives, and the call; nothing that it keeps for the backward pass stays."""
    call = PartCall(part, args, kwargs)
    with _alone():
        return call.run(args, kwargs), call


def _memory(tensor: torch.Tensor) -> int:
    """What tells the memory of a living tensor from that of any other."""
    return int(tensor.untyped_storage()._cdata)


def _memories(modules: Sequence[nn.Module]) -> set[int]:
    """Of all weights and buffers."""
    kept = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return {_memory(tensor) for tensor in kept}


def _hooks_around() -> Hooks | None:
    """The saved-tensor hooks that are in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
