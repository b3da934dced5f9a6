"""Runs nodes by a memory policy: what it says is dropped after the forward pass, and computed once more when the
backward pass asks for it.

Autograd hands over what it keeps (saved-tensor hooks), node by node. What is one of the node's own tensors is known by
its memory, while that is alive: no address outlives what it names. A tensor to rebuild is replaced by a handle; any
view of it comes back with the same strides (`models.rerun.homes`). What a node keeps besides is had from a second run
of it, which stops when it has been seen.

Gradients are the same to the last bit: the same nodes run on the same values, in the same precision, with the
statistics, draws and halos that the first run has noted (`models.rerun.notes`), and running statistics move once.
Nothing is sent in the backward pass on account of it, so that it can deadlock no more than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import passing
from tiledseg.geometry.memory_words import OFFLOAD, REBUILD, MemoryPolicy
from tiledseg.models.rerun.homes import (
    Compute,
    Home,
    Hooks,
    KeptTensor,
    Look,
    NodeRun,
    RebuildStep,
    Seen,
    check_version,
    hooks_around,
    value,
)
from tiledseg.models.rerun.looking import AllSeenError, Looking
from tiledseg.models.rerun.notes import Notes


class RebuildHandle:
    """In autograd's graph in the place of a tensor, which it holds until its node has run."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = tensor._version
        self._place: KeptTensor | Seen | tuple[Inside, int] | None = None
        self._asked = False

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "its node has run"
        return self._tensor

    def keep(self, hooks: Hooks | None) -> None:
        self._place, self._tensor = KeptTensor(self.tensor, hooks, self._version), None

    def rebuild(self, home: Home) -> None:
        self._place, self._tensor = Seen.of(self.tensor, home), None
        home.asks += 1

    def look_inside(self, inside: Inside, number: int) -> None:
        inside.add(number)
        self._place, self._tensor = (inside, number), None

    def get(self) -> torch.Tensor:
        match self._place:
            case KeptTensor() as kept:
                return kept.get()
            case Seen() as seen:
                return self._ask(seen)
            case (Inside() as inside, int(number)):
                return inside.get(number)
        raise AssertionError("its node has not run to the end")

    def _ask(self, seen: Seen) -> torch.Tensor:
        home = seen.home
        check_version(f"a tensor of {list(seen.look.size)}", len(home.steps), seen.writes)
        tensor = value(home)
        if not self._asked:
            self._asked, home.asks = True, home.asks - 1
        home.tensor = tensor if home.asks else None
        return seen.look.seen(tensor)


class Inside:
    """What a node keeps besides its own tensors, by the order in which it keeps it; had from a second run."""

    def __init__(self, step: RebuildStep) -> None:
        self._step = step
        self._wanted: set[int] = set()
        self._found: dict[int, torch.Tensor] = {}

    def add(self, place: int) -> None:
        self._wanted.add(place)

    def get(self, place: int) -> torch.Tensor:
        if place not in self._found:
            self._look(self._wanted | {place})
        self._wanted.discard(place)
        return self._found.pop(place)

    def _look(self, places: set[int]) -> None:
        pack = Looking(places, self._found)
        step = self._step
        there = {place.home: value(place.home) for place in step.places if isinstance(place, Seen)}
        inputs = [x.detach().requires_grad_(w) for x, w in zip(step.inputs(there), step.wants, strict=True)]
        del there
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _nothing):
            try:
                step.run.again(step, inputs)
            except AllSeenError:
                return
        raise AssertionError(f"a second run of node {step.k} has kept {pack.seen} tensors, fewer than the first")


def _nothing(packed: object) -> torch.Tensor:
    raise AssertionError("what a second run keeps is not differentiated")


class Rebuilding:
    """Computes nodes, in their order, as `compute` does, and keeps of them what `policy` says.

    `offload`: what keeps the tensors that it wants moved. Kept tensors go to the hooks that are in force around it, if
    there are any.
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
        self._offload = offload
        self._passing = passing(graph, policy)
        self._homes: dict[int, Home] = {}  # of tensors to rebuild that are still to be taken
        self._run: NodeRun | None = None
        self._around = hooks_around()

    def __call__(self, k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
        step = self._step(k, inputs)
        saved, versions = list[RebuildHandle](), [x._version for x in inputs]

        def pack(tensor: torch.Tensor) -> RebuildHandle:
            saved.append(RebuildHandle(tensor))
            return saved[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, RebuildHandle.get), _noting(step):
            made = self._compute(k, inputs)
        writes = [x._version for x in inputs] != versions
        known = self._known(k, inputs, made, step, writes)
        inside = Inside(step) if step and not writes and self._policy.inside[k] == REBUILD else None
        is_large = _Large(self._modules[k], inputs, made)
        for number, handle in enumerate(saved):
            memory = _memory(handle.tensor)
            home, hooks = known.get(memory, (None, self._around))
            if home is not None:
                handle.rebuild(home)
            elif inside is not None and memory not in known and is_large(handle.tensor):
                handle.look_inside(inside, number)
            else:
                handle.keep(hooks)
        for tensor in self._graph.released[k]:
            self._homes.pop(tensor, None)
        if self._offload is not None:
            self._offload.passed()
        return made

    def _step(self, k: int, inputs: list[torch.Tensor]) -> RebuildStep | None:
        """The node as something that may run once more, if anybody may want that. Made before it runs: it may write
        over its inputs."""
        if REBUILD not in (self._policy.tensors[k + 1], self._policy.inside[k]):
            return None
        if self._run is None:
            self._run = NodeRun(self._compute, self._modules, inputs[0].device.type)
        sources = zip(inputs, self._graph.sources[k], strict=True)
        places: list[Seen | KeptTensor | Look] = [self._place(x, s) for x, s in sources]
        versions = [weight._version for weight in self._run.weights(k)]
        return RebuildStep(self._run, k, places, [x.requires_grad for x in inputs], Notes(), versions)

    def _place(self, x: torch.Tensor, tensor: int) -> Seen | KeptTensor:
        home = self._homes.get(tensor)
        return KeptTensor(x, self._hooks(tensor), x._version) if home is None else Seen.of(x, home)

    def _hooks(self, tensor: int) -> Hooks | None:
        return self._offload if self._policy.tensors[tensor] == OFFLOAD else self._around

    def _known(
        self, k: int, inputs: list[torch.Tensor], made: torch.Tensor, step: RebuildStep | None, writes: bool
    ) -> dict[int, tuple[Home | None, Hooks | None]]:
        """What the node's own tensors are in memory: the home of one to rebuild, and what keeps another."""
        sources = zip(inputs, self._graph.sources[k], strict=True)
        known = {_memory(x): (self._homes.get(s), self._hooks(s)) for x, s in sources}
        rebuilds = step is not None and self._policy.tensors[k + 1] == REBUILD
        if _memory(made) not in known:
            known[_memory(made)] = Home(Look.of(made), self._passing[k + 1]) if rebuilds else None, self._hooks(k + 1)
            writes = True
        home = known[_memory(made)][0]
        if home is not None:
            self._homes[k + 1] = home
            if writes:
                assert step is not None, "a tensor to rebuild is written over by one that is not"
                home.written_by(step)
        return known


def _noting(step: RebuildStep | None) -> AbstractContextManager[None]:
    return nullcontext() if step is None else step.notes.taken()


def _memory(tensor: torch.Tensor) -> int:
    """What tells the memory of a living tensor from that of any other."""
    return tensor.untyped_storage()._cdata


class _Large:
    """Whether what a node keeps is as large as what it takes or gives, and none of its weights, cast or not."""

    def __init__(self, module: nn.Module, inputs: list[torch.Tensor], made: torch.Tensor) -> None:
        self._least = min(made.numel(), max(x.numel() for x in inputs))
        self._weights = module

    def __call__(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() >= self._least and all(tensor.shape != w.shape for w in self._weights.parameters())
