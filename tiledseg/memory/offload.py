"""Contexts in which tensors saved by autograd are offloaded or recomputed, as far as a budget demands.

The recomputed parts of a user's module are blocks of a few layers. In the first step all of them are recomputed, which
measures the bytes and seconds of each. From then on the parts with the most seconds a byte keep their tensors, as many
as fit the budget.
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
"""Bytes of the smallest storage that leaves: moving a smaller one costs more than it frees."""
MOST_LAYERS = 12
"""Most modules without children in a recomputed part: all their activations are in memory at once in its second run."""
_NO_LIMIT = 1 << 62


class Offload:
    """A context that offloads tensors saved by autograd. It may be entered again, also within itself.

    File, threads and memory belong to one `with` block and its graphs, and are freed with the last of these.

    The law: outputs and gradients are the same, bit for bit. `budget`: bytes that only autograd may hold in memory. If
    memory runs out in the block, it raises MemoryLimitError with a budget that would fit. `warns_above`: bytes held
    beyond which the end of the block prints a warning with `remedy`.
    """

    warns_above, remedy = sys.maxsize, ""

    def __init__(self, mover: Callable[[], Mover], budget: int, least: int = LEAST, all_kept: bool = True) -> None:
        """`all_kept`: all tensors saved by autograd may leave; else only those given to `pack`."""
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
        """Save a tensor, which may leave, in the innermost block; return a function that gives it back. Raises as the
        ledger does."""
        ledger = self._entered[-1][0]
        return partial(ledger.unpack, ledger.pack(tensor))

    def passed(self) -> None:
        """Send out tensors given to `pack` that only autograd holds by now, as far as the budget demands."""
        self._entered[-1][0].look()


def mover_to(store: str | Path, device: torch.device, limit: int) -> Callable[[], Mover]:
    """Return a function that makes the mover of a store of at most `limit` bytes: a GPU's tensors go to the host's
    memory, a CPU's to a folder. The caller checks that store and device match."""
    if str(store) == HOST:
        return lambda: HostMover(device, limit)
    return lambda: FileStore(store, limit)


@dataclass(eq=False)
class ModulePart:
    """A part of a model that runs by itself: `module`, called by `forward`. `name` appears in errors.

    `bytes`: the most that its calls of one step save; `in_step`: saved in this step so far; `seconds`: its quickest
    run. `stays`: it keeps its tensors and is not recomputed.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    bytes: int = 0
    in_step: int = 0
    seconds: float = float("inf")
    stays: bool = False


Place = tuple[nn.Module, list[ModulePart | nn.Module]]
"""A module and the calls, in order, that replace its forward pass: parts, and modules that are never recomputed."""


class Recomputing(Offload):
    """An `Offload` that recomputes parts of `model` before anything leaves. The law is the same."""

    def __init__(
        self, model: nn.Module, mover: Callable[[], Mover], budget: int, limit: int, least: int = LEAST
    ) -> None:
        """`limit`: bytes beyond which tensors leave; `budget`: bytes that recomputation aims at. Raises ConfigError if
        the model cannot run in parts, or has no parts of at most `MOST_LAYERS` layers."""
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
        self._without = 0  # most bytes held with all parts recomputed
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
        """Begin a step at a call of the whole model outside a backward pass, if the last step had one: choose the parts
        that stay by the most bytes that only autograd held."""
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
            again = max((other.bytes for other in self._parts if not other.stays), default=0)  # in its second run
            part.stays = part.bytes + again <= room
            room -= part.bytes * part.stays


def _put_back(module: nn.Module, own: Any) -> None:
    """Restore a module's forward pass. `own`: the attribute `forward` of the module itself, or None."""
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
    runs: list[list[nn.Module]] = [[]]  # children of a Sequential, grouped up to MOST_LAYERS layers
    in_turn = module._modules.values() if type(module).forward is nn.Sequential.forward else ()
    for child in filter(None, in_turn):  # a child that occurs twice comes twice
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
    """Count the modules without children in `module`, itself included."""
    return sum(1 for part in module.modules() if not any(True for _ in part.children()))


def _is_watched(module: nn.Module) -> bool:
    """Return True if any module in `module` has a hook, which a second run would call twice."""
    return any(part._forward_hooks or part._backward_hooks for part in module.modules())


@checked
def large_model_support(
    model: nn.Module | None = None,
    *,
    budget: str | int = "16GiB",
    store: str | Path = HOST,
    store_limit: str | int = "64GiB",
) -> Offload:
    """Return a context in which tensors saved for the backward pass leave memory as far as `budget` demands.

    `budget`: bytes ("16GiB", or a number) that only autograd may hold in memory, without the weights, their gradients,
    the batch, and the running layer's own memory. `store`: "host", the memory beside a GPU, or for a CPU's tensors a
    folder on a local disk. `store_limit`: the most bytes in the store. `model`: the network, of which blocks of a few
    layers are recomputed in the backward pass as far as the budget demands, those with the fewest seconds a byte first.
    Tensors that still do not fit leave for `store`. With a model on a CPU, no folder is needed: nothing leaves without
    one. Random numbers are drawn, and running statistics updated, once.

    The oldest tensors leave first, and are prefetched in the order of their use. Put the context around the loop: file
    and memory are then made once. Its `figures` count the bytes held and moved; the end of the block warns if the
    budget was exceeded. Raises ConfigError for a wrong size or folder; in the block MemoryLimitError if the store is
    too small, WriteError if its disk is full.
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
        raise ConfigError("store is host, which is for tensors of a GPU; give a folder on a local disk, or model")
    if not on_host and not on_cpu:
        raise ConfigError(f"store is {store}, but tensors of {device} go to no file; give host")
    if not on_host:
        FileStore(store, most).close()  # refuses a wrong folder now
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
