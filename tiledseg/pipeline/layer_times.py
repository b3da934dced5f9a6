"""Seconds of each layer of a network, forward and backward, measured: for an automatic balance.

Each layer runs by itself, as a twin with weights of its own: the network may be too large for the device. Its input has
the strides and the dtype that the layer before makes. Layers with equal inputs share one measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from tiledseg.comm.transports.stopwatch import Stopwatch
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.receptive_field import output_size
from tiledseg.models.blocks import BUILDERS, build_module
from tiledseg.pipeline.chunk import EnterOverwritten, Entrance


class LayerTime(NamedTuple):
    """Seconds of a layer for one micro-batch, as a training step takes them."""

    forward: float
    backward: float


class _Spec(NamedTuple):
    """A tensor of shape (1, channels, height, width) as a layer makes it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> _Spec:
        return _Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self, device: torch.device) -> torch.Tensor:
        return _filled(torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device))


@dataclass(frozen=True)
class _Job:
    """A layer and its inputs, `wanted`: those that want a gradient; `gradients`: how many readers send one back."""

    node: Node
    inputs: tuple[_Spec, ...]
    wanted: tuple[bool, ...]
    overwrites: bool
    gradients: int

    @property
    def is_free(self) -> bool:
        """Return True if the layer does nothing either way: it hands its input on, and has no gradients to add up."""
        return self.node.layer.hands_on and self.gradients < 2


@dataclass(frozen=True)
class _Bench:
    """The device on which twins run, the dtype of their weights, and that of autocast."""

    device: torch.device
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None

    def measure(self, job: _Job) -> tuple[LayerTime, _Spec]:
        """Run a twin twice: seconds of the second run, and its output."""
        if job.is_free:
            return LayerTime(0.0, 0.0), job.inputs[0]
        with torch.device("meta"):
            module = build_module(job.node, [spec.shape[1] for spec in job.inputs], job.overwrites)
        module.to(self.dtype).to_empty(device=self.device).train().requires_grad_(not job.node.frozen)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                _filled(tensor) if tensor.is_floating_point() else tensor.zero_()
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
        for parameter in [] if job.node.frozen else module.parameters():
            parameter.grad = torch.zeros_like(parameter)  # micro-batches add to it, so does each run
        self._run(module, job)
        return self._run(module, job)

    def _run(self, module: nn.Module, job: _Job) -> tuple[LayerTime, _Spec]:
        inputs, outputs = [], list[torch.Tensor]()
        for spec, wanted in zip(job.inputs, job.wanted, strict=True):
            tensor = spec.make(self.device)
            token = torch.empty(0, requires_grad=True)
            inputs.append(EnterOverwritten.apply(token, tensor, Entrance(tensor)) if wanted else tensor)
        autocast = torch.autocast(self.device.type, self.autocast_dtype) if self.autocast_dtype else nullcontext()
        with autocast:
            forward = self._seconds(lambda: outputs.append(module(*inputs)))
        output, backward = _Spec.of(outputs[0]), 0.0
        if job.gradients and outputs[0].requires_grad:
            gradients = [output.make(self.device) for _ in range(job.gradients)]
            backward = self._seconds(lambda: torch.autograd.backward(outputs * job.gradients, gradients))
        return LayerTime(0.0 if job.node.layer.hands_on else forward, backward), output

    def _seconds(self, function: Callable[[], object]) -> float:
        """Seconds of a call, with all that it has started on the device."""
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
    """Return seconds of every node for a micro-batch of `size` (height, width): the least of `repeats`.

    All layers are measured once, then all again, so that a disturbance spoils one measurement of a layer. Weights are
    in `dtype`, and gradients are added to those that are there. A layer that hands its input on costs what adding up
    its gradients costs. One layer's tensors and weights are on the device at a time. No global state of random
    numbers moves.

    Raises GeometryError where `size` is not legal for the network.
    """
    for side in size:
        output_size(graph, side)
    bench = _Bench(device, dtype, autocast_dtype)
    jobs: list[_Job] = []
    outputs: dict[_Job, _Spec] = {}
    least: dict[_Job, LayerTime] = {}

    def step(k: int, inputs: list[_Spec]) -> _Spec:
        node, sources = graph.nodes[k], graph.sources
        gradients = sum((k + 1 in sources[reader]) * wants for reader, wants in enumerate(graph.wants_gradient[1:]))
        gradients += k + 1 in graph.results
        wanted = tuple(graph.wants_gradient[source] for source in sources[k])
        layer = Node("", node.layer, cols=node.cols, frozen=node.frozen)
        wants = graph.wants_gradient[k + 1]
        jobs.append(_Job(layer, tuple(inputs), wanted, graph.overwrites[k], gradients if wants else 0))
        if jobs[-1] not in outputs:
            least[jobs[-1]], outputs[jobs[-1]] = bench.measure(jobs[-1])
        return outputs[jobs[-1]]

    first = torch.empty(1, bands, *size, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    graph.fold(_Spec.of(first), step)
    for _ in range(repeats - 1):
        for job, known in least.items():
            least[job] = LayerTime(*map(min, known, bench.measure(job)[0]))
    return tuple(least[job] for job in jobs)


def can_be_measured(graph: Graph) -> bool:
    """Return True if every layer has a module by its description alone, which some of traced networks have not."""
    return all(type(layer) in BUILDERS for layer in graph.layers)


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with draws of a fixed seed that repeat along all dims but channels and columns: quick, no zeros,
    and positive, as a running variance has to be."""
    single = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]  # an expanded one's own values
    shape = [1] * tensor.dim()
    for dim in (min(1, tensor.dim() - 1), -1):
        shape[dim] = single.shape[dim]
    single.copy_(torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.01)
    return tensor
