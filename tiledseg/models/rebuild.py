"""Execution of nodes under a memory policy: some tensors are dropped after the forward pass, and recomputed when the
backward pass needs them.

Saved-tensor hooks get the tensors that autograd keeps, node by node. A node's own inputs and output are recognised by
their storage, while it lives. A tensor to rebuild has a `Home`: its memory, with the steps that wrote it. Any view of
it comes back with the same strides. Other tensors that a node keeps come from its second run (`memory.second_run`).

Gradients are the same to the last bit: the same nodes run on the same values, in the same precision, with the
statistics, draws and halos recorded in the first run (`Notes`). Running statistics are updated once. Rebuilding sends
no messages, so it adds no deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from tiledseg.geometry.graph import OFFLOAD, REBUILD, Graph, MemoryPolicy
from tiledseg.geometry.memory_policy import passing
from tiledseg.memory.saved import (
    Hooks,
    SavedTensor,
    StorageView,
    check_version,
    hooks_around,
    overwritten,
    saving,
    storage_key,
)
from tiledseg.memory.second_run import Notes, SecondRun, still_statistics

Compute = Callable[[int, list[torch.Tensor]], torch.Tensor]


@dataclass(eq=False)
class Home:
    """The memory of a tensor to rebuild, shared by all its uses in the backward pass.

    `steps`: the nodes that wrote it, in order. `passing`: it is freed when it was only rebuilt for another tensor,
    since it is cheap to rebuild again (`geometry.memory_policy.passing`). `asks`: the number of uses left. `tensor`:
    the rebuilt tensor, until its last use.
    """

    layout: StorageView
    passing: bool
    steps: list[RebuildStep] = field(default_factory=list)
    asks: int = 0
    tensor: torch.Tensor | None = None

    @property
    def sources(self) -> set[Home]:
        """The homes from which it is computed."""
        views = (place for step in self.steps for place in step.places if isinstance(place, HomeView))
        return {view.home for view in views if view.home is not None}


class HomeView(NamedTuple):
    """A view of a tensor to rebuild, after `writes` steps. `home` None: the memory that the node itself overwrites."""

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
    """A node that may run again, by the same function and in the same precision (`cast`).

    `places`: the sources of its inputs. `wants`: True for inputs that required gradients. `versions`: its weights'.
    """

    compute: Callable[[list[torch.Tensor]], torch.Tensor]
    module: nn.Module
    cast: Callable[[], AbstractContextManager[object]]
    places: list[HomeView | SavedTensor]
    wants: list[bool]
    versions: list[int]
    notes: Notes = field(default_factory=Notes)

    def inputs(self, there: Mapping[Home | None, torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs. `there`: the rebuilt tensors, and (None) the memory that the node overwrites."""
        places = self.places
        return [place.get() if isinstance(place, SavedTensor) else place.over(there[place.home]) for place in places]

    def run(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        for weight, version in zip(self.module.parameters(), self.versions, strict=True):
            check_version(weight, version)
        with self.cast(), still_statistics([self.module]), self.notes.open(read=True):
            return self.compute(inputs)

    def save_again(self) -> None:
        """Run the node again with gradients, for the tensors that it saves."""
        homes = {place.home for place in self.places if isinstance(place, HomeView)}
        there: dict[Home | None, torch.Tensor] = {home: _value(home) for home in homes if home is not None}
        inputs = [x.detach().requires_grad_(w) for x, w in zip(self.inputs(there), self.wants, strict=True)]
        del there
        self.run(inputs)


class Rebuilding:
    """A `Compute` that runs nodes in order by `compute`, under a memory policy.

    `offload`: the hooks for tensors that the policy offloads. Other kept tensors go to the hooks in force around it.
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
        self._homes: dict[int, Home] = {}  # of tensors to rebuild that later nodes read

    def __call__(self, k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
        step = self._step(k, inputs)
        versions = [x._version for x in inputs]
        with saving() as saved, step.notes.open() if step else nullcontext():
            made = self._compute(k, inputs)
        writes = [x._version for x in inputs] != versions
        own = self._own_tensors(k, inputs, made, step, writes)
        inside = None
        if step is not None and not writes and self._policy.inside[k] == REBUILD:
            inside = SecondRun(step.save_again, f"node {k}")
        least = min(made.numel(), max(x.numel() for x in inputs))
        weights = {weight.shape for weight in self._modules[k].parameters()}  # by shape: autocast may copy them
        for number, handle in saved.items():
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
        """Return the node as a step if the policy may run it again, else None. Called before the node runs."""
        if REBUILD not in (self._policy.tensors[k + 1], self._policy.inside[k]):
            return None
        places: list[HomeView | SavedTensor] = []
        for x, source in zip(inputs, self._graph.sources[k], strict=True):
            home = self._homes.get(source)
            places.append(SavedTensor(x, self._hooks(source)) if home is None else HomeView.of(x, home))
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
        """Return, for the storage of each input and of the output, its home (None: not rebuilt) and its hooks."""
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
                assert step is not None, "a tensor to rebuild is overwritten by one that is not"
                # Without a reference cycle, memory is freed at once after the last use.
                step.places = [
                    p._replace(home=None) if isinstance(p, HomeView) and p.home is home else p for p in step.places
                ]
                home.steps.append(step)
        return own


class _Asker:
    """A use of a tensor to rebuild, which autograd may call several times."""

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
    """Return a home's tensor, recomputed if necessary, through a chain of any length."""
    order: dict[Home, None] = {}  # homes to compute, each after its sources
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
        own = torch.empty(0)  # replaced by the first step's result
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
