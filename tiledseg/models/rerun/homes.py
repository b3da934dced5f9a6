"""Tensors that are computed once more when somebody asks for them, and what they are computed from.

A `Home` is the memory of one. It knows the nodes that made it (those that wrote over it too), and where their inputs
are: kept, or rebuilt themselves. It is shared by all who ask for it until the last has asked. So is one that was only
made on the way to another, unless it is made again for next to nothing (`geometry.memory_policy.passing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from tiledseg.models.rerun.notes import Notes
from tiledseg.models.rerun.still import still_statistics

Compute = Callable[[int, list[torch.Tensor]], torch.Tensor]


def _nothing() -> None: ...


class Hooks(NamedTuple):
    """What keeps a tensor somewhere, and gives it back. `passed`: called where a node has run, which may hold none of
    its tensors any more."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]
    passed: Callable[[], None] = _nothing


class KeptTensor:
    """A tensor that stays as it was at `version`, by hooks of others where there are some."""

    def __init__(self, tensor: torch.Tensor, hooks: Hooks | None, version: int) -> None:
        self._hooks, self._version = hooks, version
        self._held: Any = tensor.detach() if hooks is None else hooks.pack(tensor)

    def get(self) -> torch.Tensor:
        """Raises RuntimeError, as autograd does, where it has been written over meanwhile."""
        if self._hooks is not None:
            return self._hooks.unpack(self._held)
        tensor: torch.Tensor = self._held
        check_version(f"{tensor.dtype} {list(tensor.shape)}", tensor._version, self._version)
        return tensor


def check_version(what: str, version: int, expected: int) -> None:
    if version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{what} is at version {version}; expected version {expected} instead"
        )


class Look(NamedTuple):
    """How a tensor lies in its memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Look:
        return Look(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def seen(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if Look.of(whole) == self else whole.as_strided(*self)


@dataclass(eq=False)
class Home:
    """The memory of a tensor to rebuild: the steps that wrote it, in order, and how it lies there. `passing`: it does
    not stay where it was made on the way to another; `asks`: how many are still to ask for it; `tensor`: itself, while
    it is shared."""

    look: Look
    passing: bool
    steps: list[RebuildStep] = field(default_factory=list)
    asks: int = 0
    tensor: torch.Tensor | None = None

    def written_by(self, step: RebuildStep) -> None:
        own = (isinstance(place, Seen) and place.home is self for place in step.places)
        # No cycle: what is held here is to go as soon as nobody asks.
        step.places = [p.look if o and isinstance(p, Seen) else p for p, o in zip(step.places, own, strict=True)]
        self.steps.append(step)

    @property
    def sources(self) -> set[Home]:
        """What it is computed from and has to be rebuilt itself."""
        return {place.home for step in self.steps for place in step.places if isinstance(place, Seen)}


class Seen(NamedTuple):
    """A view of what is rebuilt, after so many writes."""

    home: Home
    look: Look
    writes: int

    @staticmethod
    def of(tensor: torch.Tensor, home: Home) -> Seen:
        return Seen(home, Look.of(tensor), len(home.steps))


@dataclass(eq=False)
class RebuildStep:
    """A node that may run once more: where its inputs are (a `Look`: in the memory that it writes over), which of them
    had gradients, what it has noted, and at which versions its weights were."""

    run: NodeRun
    k: int
    places: list[Seen | KeptTensor | Look]
    wants: list[bool]
    notes: Notes
    versions: list[int]

    def inputs(self, there: dict[Home, torch.Tensor], own: torch.Tensor | None = None) -> list[torch.Tensor]:
        return [self._input(place, there, own) for place in self.places]

    @staticmethod
    def _input(
        place: Seen | KeptTensor | Look, there: dict[Home, torch.Tensor], own: torch.Tensor | None
    ) -> torch.Tensor:
        match place:
            case Seen(home, look, _):
                return look.seen(there[home])
            case KeptTensor():
                return place.get()
        assert own is not None, "it writes over what has not been made"
        return place.seen(own)


class NodeRun:
    """How nodes of one pass are computed once more: by the same function, in the same precision."""

    def __init__(self, compute: Compute, modules: Sequence[nn.Module], device: str) -> None:
        self._compute, self._modules = compute, modules
        self._device = device
        self._dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def weights(self, k: int) -> list[nn.Parameter]:
        return list(self._modules[k].parameters())

    def again(self, step: RebuildStep, inputs: list[torch.Tensor]) -> torch.Tensor:
        for weight, version in zip(self.weights(step.k), step.versions, strict=True):
            check_version(f"a weight of {list(weight.shape)}", weight._version, version)
        with ExitStack() as stack:
            dtype = self._dtype or torch.get_autocast_dtype(self._device)
            stack.enter_context(torch.autocast(self._device, dtype, self._dtype is not None, cache_enabled=False))
            stack.enter_context(still_statistics([self._modules[step.k]]))
            stack.enter_context(step.notes.read())
            return self._compute(step.k, inputs)


def value(home: Home) -> torch.Tensor:
    """What is in the memory, computed once more where it is not there. Takes a chain of any length."""
    order = _missing(home)
    uses = Counter(source for each in order for source in each.sources)
    made: dict[Home, torch.Tensor] = {}
    for each in order:
        there = {source: _there(source, made) for source in each.sources}
        made[each] = _run_steps(each, there)
        for source in each.sources & made.keys():
            uses[source] -= 1
            if not uses[source]:
                _let_go(source, made)
    return _there(home, made)


def _there(home: Home, made: dict[Home, torch.Tensor]) -> torch.Tensor:
    return made[home] if home.tensor is None else home.tensor


def _let_go(home: Home, made: dict[Home, torch.Tensor]) -> None:
    tensor = made.pop(home)
    if home.asks and not home.passing:
        home.tensor = tensor


def _missing(home: Home) -> list[Home]:
    """What has to be computed for it, each after what it is computed from."""
    order: dict[Home, None] = {}
    pending = [(home, False)]
    while pending:
        each, expanded = pending.pop()
        if each in order or each.tensor is not None:
            continue
        if expanded:
            order[each] = None
        else:
            pending += [(each, True), *((source, False) for source in each.sources)]
    return list(order)


def _run_steps(home: Home, there: dict[Home, torch.Tensor]) -> torch.Tensor:
    own: torch.Tensor | None = None
    with torch.no_grad():
        for step in home.steps:
            made = step.run.again(step, step.inputs(there, own))
            own = made if own is None else own
    assert own is not None, "nobody has made it"
    assert Look.of(own) == home.look, f"node {home.steps[0].k} has given {Look.of(own)}, not {home.look}"
    return own


def hooks_around() -> Hooks | None:
    """The saved-tensor hooks that are in force, which others would hide."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if found is None else Hooks(*found)
