"""Nodes run by a memory policy: some tensors are dropped after the forward pass, and computed once more when the
backward pass asks for them.

Autograd hands over what it keeps (saved-tensor hooks), node by node. One of the node's own tensors is recognised by its
memory, while that is alive: no address outlives what it names. A tensor to rebuild has a `Home`, its memory, with the
steps that wrote it. Any view of it comes back with the same strides. Other tensors that a node keeps come from a second
run of it (`memory.second_run`).

Gradients are the same to the last bit. The same nodes run on the same values, in the same precision, with the
statistics, draws and halos that the first run has noted (`Notes`). Running statistics move once. The backward pass
sends nothing on account of it, so that it can deadlock no more than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from tiledseg.geometry.graph import OFFLOAD, REBUILD, Graph, MemoryPolicy
from tiledseg.geometry.memory_policy import passing
from tiledseg.memory.saved import Hooks, KeptTensor, StorageView, check_version, hooks_around, overwritten, storage_key
from tiledseg.memory.second_run import Notes, SavedHandle, SecondRun, still_statistics

Compute = Callable[[int, list[torch.Tensor]], torch.Tensor]


@dataclass(eq=False)
class Home:
    """The memory of a tensor to rebuild, shared by all who ask for it until the last has asked.

    `steps` wrote it, in their order. `passing`: it is let go where it was made on the way to another tensor, since it
    is made again for next to nothing (`geometry.memory_policy.passing`). `asks`: how many are still to ask for it.
    `tensor`: itself, while it is shared.
    """

    layout: StorageView
    passing: bool
    steps: list[RebuildStep] = field(default_factory=list)
    asks: int = 0
    tensor: torch.Tensor | None = None

    @property
    def sources(self) -> set[Home]:
        """The homes that it is computed from."""
        views = (place for step in self.steps for place in step.places if isinstance(place, HomeView))
        return {view.home for view in views if view.home is not None}


class HomeView(NamedTuple):
    """A view of a tensor to rebuild, after so many writes; without a home, of the memory that a node writes over."""

    home: Home | None
    layout: StorageView
    writes: int

    @staticmethod
    def of(tensor: torch.Tensor, home: Home) -> HomeView:
        return HomeView(home, StorageView.of(tensor), len(home.steps))

    def over(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.layout.shape, self.layout.stride, self.layout.offset)


@dataclass(eq=False)
class RebuildStep:
    """A node that may run once more: by the same function, in the same precision (`cast`).

    `places`: of its inputs. `wants`: those that had gradients. `versions`: of its weights.
    """

    compute: Callable[[list[torch.Tensor]], torch.Tensor]
    module: nn.Module
    cast: Callable[[], AbstractContextManager[object]]
    places: list[HomeView | KeptTensor]
    wants: list[bool]
    versions: list[int]
    notes: Notes = field(default_factory=Notes)

    def inputs(self, there: Mapping[Home | None, torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs, of which `there` has the tensors to rebuild, and the memory that the node writes over."""
        places = self.places
        return [place.get() if isinstance(place, KeptTensor) else place.over(there[place.home]) for place in places]

    def run(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        for weight, version in zip(self.module.parameters(), self.versions, strict=True):
            check_version(weight, version)
        with self.cast(), still_statistics([self.module]), self.notes.open(read=True):
            return self.compute(inputs)

    def save_again(self) -> None:
        """Run the node once more with gradients, for the tensors that it saves."""
        homes = {place.home for place in self.places if isinstance(place, HomeView)}
        there: dict[Home | None, torch.Tensor] = {home: _value(home) for home in homes if home is not None}
        inputs = [x.detach().requires_grad_(w) for x, w in zip(self.inputs(there), self.wants, strict=True)]
        del there
        self.run(inputs)


class Rebuilding:
    """A run of nodes, in their order, as `compute` does it, that keeps of them what `policy` says.

    `offload` keeps the tensors that the policy wants moved. Other kept tensors go to the hooks that are in force around
    it, if there are any.
    """

    def __init__(
        self,
        graph: Graph,
        policy: MemoryPolicy,
        compute: Compute,
        modules: Sequence[nn.Module],
        offload: Hooks | None = None,
    ) -> None:
        self._graph, self._policy, self._compute, self._modules = graph, policy, compute, modules
        self._offload, self._around = offload, hooks_around()
        self._passing = passing(graph, policy)
        self._homes: dict[int, Home] = {}  # of tensors to rebuild that are still to be taken

    def __call__(self, k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
        step = self._step(k, inputs)
        handles, versions = list[SavedHandle](), [x._version for x in inputs]

        def pack(tensor: torch.Tensor) -> SavedHandle:
            handles.append(SavedHandle(tensor))
            return handles[-1]

        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, SavedHandle.get))
            stack.enter_context(step.notes.open() if step else nullcontext())
            made = self._compute(k, inputs)
        writes = [x._version for x in inputs] != versions
        own = self._own_tensors(k, inputs, made, step, writes)
        inside = None
        if step is not None and not writes and self._policy.inside[k] == REBUILD:
            inside = SecondRun(step.save_again, f"node {k}")
        least = min(made.numel(), max(x.numel() for x in inputs))
        weights = {weight.shape for weight in self._modules[k].parameters()}  # cast or not
        for number, handle in enumerate(handles):
            memory = storage_key(handle.tensor)
            home, hooks = own.get(memory, (None, self._around))
            is_large = handle.tensor.numel() >= least and handle.tensor.shape not in weights
            if home is not None:
                home.asks += 1
                handle.have(_Asker(home, handle.tensor))
            elif inside is not None and memory not in own and is_large:
                inside.take(number, handle)
            else:
                handle.keep(hooks)
        for tensor in self._graph.released[k]:
            self._homes.pop(tensor, None)
        if self._offload is not None:
            self._offload.passed()
        return made

    def _step(self, k: int, inputs: list[torch.Tensor]) -> RebuildStep | None:
        """Return the node as a step that may run once more, if one may want that; before it writes over its inputs."""
        if REBUILD not in (self._policy.tensors[k + 1], self._policy.inside[k]):
            return None
        places: list[HomeView | KeptTensor] = []
        for x, source in zip(inputs, self._graph.sources[k], strict=True):
            home = self._homes.get(source)
            places.append(KeptTensor(x, self._hooks(source)) if home is None else HomeView.of(x, home))
        module, device = self._modules[k], inputs[0].device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        cast = partial(torch.autocast, device, dtype, enabled, cache_enabled=False)
        versions = [weight._version for weight in module.parameters()]
        return RebuildStep(partial(self._compute, k), module, cast, places, [x.requires_grad for x in inputs], versions)

    def _hooks(self, tensor: int) -> Hooks | None:
        return self._offload if self._policy.tensors[tensor] == OFFLOAD else self._around

    def _own_tensors(
        self, k: int, inputs: list[torch.Tensor], made: torch.Tensor, step: RebuildStep | None, writes: bool
    ) -> dict[int, tuple[Home | None, Hooks | None]]:
        """Return for the memory of each of the node's own tensors its home, if it is rebuilt, and the hooks for it."""
        sources = zip(inputs, self._graph.sources[k], strict=True)
        own = {storage_key(x): (self._homes.get(source), self._hooks(source)) for x, source in sources}
        key = storage_key(made)
        if key not in own:
            rebuilds = step is not None and self._policy.tensors[k + 1] == REBUILD
            own[key] = Home(StorageView.of(made), self._passing[k + 1]) if rebuilds else None, self._hooks(k + 1)
            writes = True
        home = own[key][0]
        if home is not None:
            self._homes[k + 1] = home
            if writes:
                assert step is not None, "a tensor to rebuild is written over by one that is not"
                # No cycle: what is held here is to go as soon as nobody asks.
                step.places = [
                    p._replace(home=None) if isinstance(p, HomeView) and p.home is home else p for p in step.places
                ]
                home.steps.append(step)
        return own


class _Asker:
    """One who asks for a tensor to rebuild, once or more often."""

    def __init__(self, home: Home, tensor: torch.Tensor) -> None:
        self._home, self._view, self._has_asked = home, HomeView.of(tensor, home), False

    def __call__(self) -> torch.Tensor:
        home, view = self._home, self._view
        if len(home.steps) != view.writes:
            raise overwritten(view.layout.dtype, view.layout.shape, len(home.steps), view.writes)
        tensor = _value(home)
        if not self._has_asked:
            self._has_asked, home.asks = True, home.asks - 1
        home.tensor = tensor if home.asks else None
        return view.over(tensor)


def _value(home: Home) -> torch.Tensor:
    """Return what is in the memory, computed once more where it is not there, through a chain of any length."""
    order: dict[Home, None] = {}  # all that has to be computed for it, each after what it is computed from
    pending = [(home, False)]
    while pending:
        each, expanded = pending.pop()
        if each in order or each.tensor is not None:
            continue
        if expanded:
            order[each] = None
        else:
            pending += [(each, True), *((source, False) for source in each.sources)]
    uses = Counter(source for each in order for source in each.sources)
    made: dict[Home, torch.Tensor] = {}

    def there(each: Home) -> torch.Tensor:
        return made[each] if each.tensor is None else each.tensor

    for each in order:
        inputs: dict[Home | None, torch.Tensor] = {source: there(source) for source in each.sources}
        own = torch.empty(0)  # until the first step has made it
        with torch.no_grad():
            for number, step in enumerate(each.steps):
                result = step.run(step.inputs({**inputs, None: own}))
                own = own if number else result
        assert StorageView.of(own) == each.layout, f"a node has given {StorageView.of(own)}, not {each.layout}"
        made[each] = own
        del inputs, own, result
        for source in each.sources & made.keys():
            uses[source] -= 1
            if not uses[source]:
                tensor = made.pop(source)
                source.tensor = tensor if source.asks and not source.passing else None
                del tensor
    return there(home)
