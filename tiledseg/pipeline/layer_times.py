"""How long each layer of a network takes, forward and backward: what an automatic balance is chosen by.

Each layer is measured by itself, as a twin with weights of its own: the network may be too large for the device. What
surrounds the layer is imitated where it costs time, and found out by running the twins once: the strides and dtype of
its input (an instance norm leaves channels last, say) and of the gradient that comes back (that of a concatenation is a
part of a larger tensor), and whether its input is a view, which makes an activation that writes over it copy gradients.

Layers that are given the same have one measurement together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from tiledseg.comm.transports.stopwatch import Stopwatch
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.receptive_field import output_size
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.models.blocks import BUILDERS, build_module
from tiledseg.pipeline.chunk import EnterOverwritten, Entrance


class LayerTime(NamedTuple):
    """Seconds of a layer for one micro-batch, as a training step takes them."""

    forward: float
    backward: float


_NOTHING = LayerTime(0.0, 0.0)


@dataclass(frozen=True)
class _Spec:
    """A tensor of shape (1, channels, height, width) as a layer is given it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_view: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, is_view: bool = False) -> _Spec:
        return _Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, is_view)

    def make(self, device: torch.device) -> torch.Tensor:
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return _filled(tensor)


@dataclass(frozen=True)
class _Job:
    """A layer and what it is given: its inputs, and the gradients of its output, of each that takes it one.

    `wanted`: which of the inputs want a gradient. No gradients: none is wanted of the output. `overwrites`: whether it
    writes over its input. `frozen`: its weights want no gradient.
    """

    layer: Layer
    inputs: tuple[_Spec, ...]
    wanted: tuple[bool, ...]
    overwrites: bool
    gradients: tuple[_Spec, ...] = ()
    frozen: bool = False
    cols: Layer | None = None  # the layer along columns, if another


@dataclass(frozen=True)
class _Bench:
    """Where and how layers run."""

    device: torch.device
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None

    def autocast(self) -> AbstractContextManager[None]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def seconds(self, function: Callable[[], object]) -> float:
        """Of one call, with all that it has started on the device."""
        watch = Stopwatch(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with watch.running():
            function()
        return watch.seconds()


def measure_layer_times(
    graph: Graph,
    bands: int,
    size: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    autocast_dtype: torch.dtype | None = None,
    repeats: int = 3,
) -> tuple[LayerTime, ...]:
    """Seconds of every node for a micro-batch of `size` (height, width): the least of `repeats`.

    All are gone through once, then all again: what disturbs the machine for a while spoils one of a layer's
    measurements, not all.
    In training mode, channels last, weights in `dtype`, gradients added to those that are there. What hands its input
    on costs nothing forward, and backward what adding up its gradients costs. The input of the network wants no
    gradient; the loss is not in it. At most one layer's tensors and weights are on the device at a time. No global
    state of random numbers moves.

    Raises GeometryError where `size` is no legal one for the network.
    """
    for side in size:
        output_size(graph, side)
    bench = _Bench(device, dtype, autocast_dtype)
    return _times(graph, _tensors(graph, bands, size, bench), bench, repeats)


def can_be_measured(graph: Graph) -> bool:
    """Return True if every layer has a module by its description alone, which some of traced networks have not."""
    return all(type(layer) in BUILDERS for layer in graph.layers)


def _tensors(graph: Graph, bands: int, size: tuple[int, int], bench: _Bench) -> list[_Spec]:
    at_hand = torch.empty(1, bands, *size, dtype=bench.dtype, device="meta").to(memory_format=torch.channels_last)
    known: dict[_Job, _Spec] = {}
    shapes = tensor_shapes(graph, bands, *size)

    def step(k: int, given: list[_Spec]) -> _Spec:
        wanted = tuple(graph.wants_gradient[source] for source in graph.sources[k])
        node = graph.nodes[k]
        job = _Job(node.layer, tuple(given), wanted, graph.overwrites[k], frozen=node.frozen, cols=node.cols)
        if job not in known:
            inputs, _ = _inputs(job, bench.device)
            with bench.autocast():
                result = _twin(job, bench)(*inputs)
            known[job] = _Spec.of(result, result._is_view())
            assert known[job].shape[1:] == shapes[k + 1], f"{graph.nodes[k].name} does not do what its description says"
            del inputs, result
        return known[job]

    return graph.fold(_Spec.of(at_hand), step)


def _times(graph: Graph, tensors: Sequence[_Spec], bench: _Bench, repeats: int) -> tuple[LayerTime, ...]:
    jobs, measured = _once(graph, tensors, bench)
    least = {job: seconds for job, (seconds, _) in measured.items()}
    for _ in range(repeats - 1):
        for job, seconds in least.items():
            if not _is_free(job):
                least[job] = LayerTime(*map(min, seconds, _measure(job, bench)[0]))
    return tuple(least[job] for job in jobs)


def _once(
    graph: Graph, tensors: Sequence[_Spec], bench: _Bench
) -> tuple[list[_Job], dict[_Job, tuple[LayerTime, list[_Spec]]]]:
    """Each node's job, and all that are different measured once: from the last node to the first, as gradients come.
    What one hands back is what those that made its inputs are given."""
    measured: dict[_Job, tuple[LayerTime, list[_Spec]]] = {}
    jobs: list[_Job] = []
    coming: dict[int, list[_Spec]] = {}  # the gradients of each tensor; of an output one as a loss gives it
    for tensor in graph.results:
        coming[tensor] = [replace(tensors[tensor], is_view=False)]
    for k in reversed(range(len(graph))):
        sources = graph.sources[k]
        wanted = tuple(graph.wants_gradient[source] for source in sources)
        gradients = tuple(coming.pop(k + 1, ())) if graph.wants_gradient[k + 1] else ()
        inputs = tuple(tensors[source] for source in sources)
        node = graph.nodes[k]
        job = _Job(node.layer, inputs, wanted, graph.overwrites[k], gradients, node.frozen, node.cols)
        if job not in measured:
            measured[job] = (_NOTHING, list(gradients)) if _is_free(job) else _measure(job, bench)
        jobs.append(job)
        handed_back = measured[job][1]  # nothing by a layer that has no gradient, such as a comparison
        of_wanted = (source for source, wants in zip(sources, wanted, strict=True) if wants and handed_back)
        for source, gradient in zip(of_wanted, handed_back, strict=True):
            coming.setdefault(source, []).append(gradient)
    return jobs[::-1], measured


def _measure(job: _Job, bench: _Bench) -> tuple[LayerTime, list[_Spec]]:
    """The layer's times in its second run, and the gradients of its inputs, of those that want one."""
    module = _twin(job, bench)
    for parameter in [] if job.frozen else module.parameters():
        parameter.grad = torch.zeros_like(parameter)  # micro-batches add to it, so does each run
    _run(module, job, bench)
    seconds, handed_back = _run(module, job, bench)
    return LayerTime(0.0 if job.layer.hands_on else seconds.forward, seconds.backward), handed_back


def _run(module: nn.Module, job: _Job, bench: _Bench) -> tuple[LayerTime, list[_Spec]]:
    """One run, forward and backward, on tensors of its own, which are let go after it."""
    inputs, entered = _inputs(job, bench.device)
    gradients = [spec.make(bench.device) for spec in job.gradients]
    outputs: list[torch.Tensor] = []
    with bench.autocast():
        forward = bench.seconds(lambda: outputs.append(module(*inputs)))
    if not gradients or not outputs[0].requires_grad:
        return LayerTime(forward, 0.0), []
    backward = bench.seconds(lambda: torch.autograd.backward(outputs * len(gradients), gradients))
    return LayerTime(forward, backward), [_Spec.of(entrance.gradient()) for entrance in entered]


def _twin(job: _Job, bench: _Bench) -> nn.Module:
    """A module of the description on the device, in training mode, with weights that come from no global generator."""
    with torch.device("meta"):
        module = build_module(
            Node("", job.layer, cols=job.cols), [spec.shape[1] for spec in job.inputs], job.overwrites
        )
    module.to(bench.dtype).to_empty(device=bench.device).train().requires_grad_(not job.frozen)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            _filled(tensor) if tensor.is_floating_point() else tensor.zero_()
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _inputs(job: _Job, device: torch.device) -> tuple[list[torch.Tensor], list[Entrance]]:
    """What the layer is given, and where the gradients of those that want one will appear."""
    inputs: list[torch.Tensor] = []
    entered: list[Entrance] = []
    for spec, wanted in zip(job.inputs, job.wanted, strict=True):
        tensor = spec.make(device)
        if wanted:
            entered.append(Entrance(tensor))
            tensor = EnterOverwritten.apply(torch.empty(0, requires_grad=True), tensor, entered[-1])
        inputs.append(tensor.mT.mT if spec.is_view else tensor)  # a view of the same strides, at no cost either way
    return inputs, entered


def _is_free(job: _Job) -> bool:
    """Whether a layer does nothing either way: it has no gradients to add up."""
    return job.layer.hands_on and len(job.gradients) < 2


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with draws of a fixed seed that repeat along all dims but channels and columns: quick, and no zeros.

    They are positive, as a running variance has to be.
    """
    single = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]  # an expanded one's own values
    shape = [1] * tensor.dim()
    for dim in (min(1, tensor.dim() - 1), -1):
        shape[dim] = single.shape[dim]
    single.copy_(torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.01)
    return tensor
