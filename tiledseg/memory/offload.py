"""Contexts in which what autograd keeps leaves memory, or is computed once more, as far as a budget demands.

The parts of somebody's module that may run once more are blocks of a few layers. In the first step all of them do. Then
it is known what each keeps and how long it takes, and those that take longest for a byte keep what they keep, as many
as the budget has room for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiledseg.config.checks import checked
from tiledseg.errors import ConfigError
from tiledseg.memory.allocations import exhausted, is_exhausted
from tiledseg.memory.device import is_gpu, kind_here
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.host import HostMover
from tiledseg.memory.ledger import Ledger
from tiledseg.memory.mover import HOST, Figures, Mover
from tiledseg.memory.second_run import run_part, within
from tiledseg.system.console import say
from tiledseg.units import parse_bytes, size

LEAST = 1 << 20
"""Bytes below which a storage stays: moving it would cost more than it frees."""
MOST_LAYERS = 12
"""Modules without parts in one that is run once more: what lies between them is there at once in the backward pass."""
_NO_LIMIT = 1 << 62


class Offload:
    """A context that may be entered again, and within itself.

    File, threads and memory belong to one `with` block and its graphs: the last of these gives them back.

    The law: outputs and gradients are the same, bit for bit. `budget`: bytes that autograd alone may hold in memory.
    Memory that runs out in the block is a MemoryLimitError, which says what would fit. `warns_above`: bytes beyond
    which a line at the end of the block says how many were held, and a remedy.
    """

    warns_above, remedy = sys.maxsize, ""

    def __init__(self, mover: Callable[[], Mover], budget: int, least: int = LEAST, all_kept: bool = True) -> None:
        """`all_kept`: all that autograd keeps may leave; else what is handed to `pack` alone."""
        self.budget = budget
        self.figures = Figures()
        self._mover, self._least, self._all_kept = mover, least, all_kept
        self._entered: list[tuple[Ledger, ExitStack]] = []

    def __enter__(self) -> Self:
        ledger = Ledger(self._mover(), self.budget, self._least, self.figures)
        hooks = ExitStack()
        if self._all_kept:
            hooks.enter_context(saved_tensors_hooks(ledger.pack, ledger.unpack))
        self._entered.append((ledger, hooks))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        ledger, hooks = self._entered.pop()
        hooks.__exit__(kind, error, at)
        held = ledger.resident_bytes
        peak = self.figures.peak_bytes
        if error is None and not self._entered and peak > self.warns_above:
            say(f"warning: autograd held {size(peak)}, beyond the budget of {size(self.warns_above)}; {self.remedy}")
        if error is not None and is_exhausted(error):
            raise exhausted(error, held, self.budget) from error

    def pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that gives back a tensor, which may leave meanwhile, in the innermost block. Raises as the
        ledger does."""
        ledger = self._entered[-1][0]
        return partial(ledger.unpack, ledger.pack(tensor))

    def passed(self) -> None:
        """Send away what was handed to `pack` and is no longer held by others, as far as it must leave."""
        self._entered[-1][0].look()


def mover_to(store: str | Path, device: torch.device, limit: int) -> Callable[[], Mover]:
    """Return a function that makes the mover of a store, of at most `limit` bytes outside: a GPU's tensors go to its
    host's memory, a CPU's to a folder. The caller checks that `device` has a way there."""
    if str(store) == HOST:
        return lambda: HostMover(device, limit)
    return lambda: FileStore(store, limit)


@dataclass(eq=False)
class ModulePart:
    """A part of a module that runs by itself: `module`, called by `forward`. `name` is for the user.

    `bytes`: most that it keeps in a step; `in_step`: in this step so far; `seconds`: the least of a run. `stays`: it
    keeps them.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    bytes: int = 0
    in_step: int = 0
    seconds: float = float("inf")
    stays: bool = False


Place = tuple[nn.Module, list[ModulePart | nn.Module]]
"""A module whose forward pass is replaced by these, one after the other. Modules in it are called as they are."""


class Recomputing(Offload):
    """An `Offload` that runs parts of `model` once more before anything leaves. The law is the same."""

    def __init__(
        self, model: nn.Module, mover: Callable[[], Mover], budget: int, limit: int, least: int = LEAST
    ) -> None:
        """`limit`: bytes beyond which tensors leave; `budget`: those that recomputation aims at. Raises ConfigError
        where the module cannot run again, or has no parts of at most `MOST_LAYERS` layers."""
        super().__init__(mover, limit, least)
        self.model, self.aim, name = model, budget, type(model).__name__
        for path, module in model.named_modules():
            compiled = hasattr(module, "_orig_mod")
            if compiled or isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction):
                what = f"{name}, of which {path or 'all'} is {'compiled' if compiled else 'a module of torch.jit'}"
                remedy = "give the module that it was made of, or leave model out"
                raise ConfigError(f"model is {what}: its layers cannot be run by themselves; {remedy}")
        self._places = list({id(place[0]): place for place in _places(model, name, True)}.values())
        if not self._places:
            raise ConfigError(
                f"model is {name}, which has no parts of several layers to run once more; leave model out"
            )
        self._parts = [part for _, calls in self._places for part in calls if isinstance(part, ModulePart)]
        self._without = 0  # most bytes that are held with all parts computed once more
        self._replaced = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        if len(self._entered) == 1:
            for module, calls in self._places:
                self._replaced.callback(_put_back, module, module.__dict__.get("forward"))
                module.forward = partial(self._forward, calls)
            self._replaced.callback(self.model.register_forward_pre_hook(self._begin).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if len(self._entered) == 1:
            self._replaced.close()
        super().__exit__(kind, error, at)

    def _forward(self, calls: list[ModulePart | nn.Module], *args: Any, **kwargs: Any) -> Any:
        """Call parts and modules one after the other."""
        for call in calls:
            result = self._run(call, args, kwargs) if isinstance(call, ModulePart) else call(*args, **kwargs)
            args, kwargs = (result,), {}
        return args[0]

    def _run(self, part: ModulePart, args: Any, kwargs: Any) -> Any:
        if part.stays or within() or not torch.is_grad_enabled() or torch.jit.is_tracing():
            return part.forward(*args, **kwargs)
        begun = time.perf_counter()
        result, freed = run_part(part.name, part.module, part.forward, args, kwargs)
        if not _in_backward():
            part.seconds = min(part.seconds, time.perf_counter() - begun)
            part.in_step += freed
        return result

    def _begin(self, model: nn.Module, args: Any) -> None:
        """Begin a step at a call of the whole model which is no part of a backward pass, where one has been: choose the
        parts that stay by the most bytes that autograd alone held."""
        held = None if _in_backward() else self._entered[-1][0].end_step()
        if held is None:
            return
        for part in self._parts:
            part.bytes, part.in_step = max(part.bytes, part.in_step), 0
        self._without = max(self._without, held - sum(part.bytes for part in self._parts if part.stays))
        for part in self._parts:
            part.stays = False
        room = self.aim - self._without
        for part in sorted(self._parts, key=lambda part: part.seconds / max(1, part.bytes), reverse=True):
            part.stays = True
            again = max((other.bytes for other in self._parts if not other.stays), default=0)  # back at once
            part.stays = part.bytes + again <= room
            room -= part.bytes * part.stays


def _put_back(module: nn.Module, own: Any) -> None:
    """Undo the replacement of a module's forward pass; `own`: the attribute that it had besides its class's."""
    del module.forward
    if own is not None:
        module.forward = own


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _places(module: nn.Module, name: str, is_root: bool = False) -> Iterator[Place]:
    few = not isinstance(module, nn.ModuleList | nn.ModuleDict) and not is_root and 2 <= _layers(module) <= MOST_LAYERS
    if few and not any(map(_is_watched, module.children())):
        yield module, [ModulePart(name, module, module.forward)]
        return
    runs: list[list[nn.Module]] = [[]]  # the modules of a sequence, as many together as are few layers
    in_turn = module._modules.values() if type(module).forward is nn.Sequential.forward else ()
    for child in filter(None, in_turn):  # one that stands there twice comes twice
        alone = _layers(child) > MOST_LAYERS or _is_watched(child)
        if alone or sum(map(_layers, runs[-1])) + _layers(child) > MOST_LAYERS:
            runs.append([])
        runs[-1].append(child)
        runs += [[]] if alone else []
    together = {id(child) for run in runs if len(run) > 1 for child in run}
    if together:
        made = [nn.Sequential(*run) if len(run) > 1 else run[0] for run in runs if run]
        is_part = [len(run) > 1 for run in runs if run]
        name_of = f"a part of {name}"
        yield module, [ModulePart(name_of, m, m.forward) if of else m for m, of in zip(made, is_part, strict=True)]
    for child_name, child in module.named_children():
        if id(child) not in together:
            yield from _places(child, f"{name}.{child_name}")


def _layers(module: nn.Module) -> int:
    """Count the modules without parts in it; one that has none counts as one."""
    return sum(1 for part in module.modules() if not any(True for _ in part.children()))


def _is_watched(module: nn.Module) -> bool:
    """Return True if a hook sees the results of a layer in it: it would see them twice."""
    return any(part._forward_hooks or part._backward_hooks for part in module.modules())


@checked
def large_model_support(
    model: nn.Module | None = None,
    *,
    budget: str | int = "16GiB",
    store: str | Path = HOST,
    store_limit: str | int = "64GiB",
) -> Offload:
    """Return a context in which what autograd keeps for the backward pass leaves memory as far as `budget` demands.

    `budget`: bytes ("16GiB", or a number) that autograd alone may hold in memory: not the weights, their gradients, the
    batch, or what the running layer needs for itself. `store`: host, the memory beside a GPU, to which its tensors are
    copied while it computes; for a CPU's a folder on a local disk. `store_limit`: the most bytes that may lie there.
    `model`: the network. Parts of it (blocks of a few layers) are recomputed in the backward pass as far as the budget
    demands, those that take least time for a byte first. Tensors that still do not fit leave for `store`. A model needs
    no store: on a CPU nothing leaves without one. Random numbers are drawn, and running statistics move, once.

    The oldest tensors leave first, and are prefetched in the order of their use. Put it around the loop: file and
    memory are then made once. The context's `figures` say what was held and moved; a line at the end of the block warns
    where that was more than the budget. Raises ConfigError for a size or a folder that cannot be; in the block
    MemoryLimitError where the store is too small, WriteError where its disk is full.
    """
    room, most = _size("budget", budget), _size("store_limit", store_limit)
    weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    device = weight.device if weight is not None else torch.empty(0, device=kind_here()).device
    on_host, on_cpu = str(store) == HOST, device.type == "cpu"
    if not on_cpu and not is_gpu(device):
        raise ConfigError(
            f"tensors of {device.type} go nowhere; large_model_support moves those of CPU, CUDA, ROCm, XPU"
        )
    if on_host and on_cpu and model is None:
        raise ConfigError("store is host, the memory beside a GPU's own; give a folder on a local disk, or model")
    if not on_host and not on_cpu:
        raise ConfigError(f"store is {store}, but tensors of {device} go to no file; give host")
    if not on_host:
        FileStore(store, most).close()  # a folder that cannot be is refused here
    stays = on_host and on_cpu
    mover = Mover if stays else mover_to(store, device, most)
    support = Offload(mover, room) if model is None else Recomputing(model, mover, room, _NO_LIMIT if stays else room)
    nothing_leaves = "give store a folder on a local disk, or use a smaller batch"
    support.warns_above, support.remedy = room, nothing_leaves if stays else "use a smaller batch"
    return support


def _size(name: str, size: str | int) -> int:
    try:
        return parse_bytes(size if isinstance(size, str) else f"{size}B")
    except ConfigError:
        raise ConfigError(f"{name} is {size!r}; give 16GiB, 16GB, 512MiB or a plain number of bytes") from None
