"""Seconds of each layer of a network, forward and backward, measured: for an automatic balance.

Each layer runs by itself, as a twin with weights of its own: the network may be too large for the device. Its input has
the strides and the dtype that the layer before makes. Layers with equal inputs share one measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn

from tiledseg.comm.transports.collectives import Communicator
from tiledseg.comm.transports.point_to_point import Message, PointToPoint
from tiledseg.comm.transports.stopwatch import Stopwatch
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.shapes import output_size
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.models.blocks import BUILDERS, build_module
from tiledseg.pipeline.chunk import EnterOverwritten, Entrance


class LayerTime(NamedTuple):
    """Seconds of a layer for one micro-batch, as a training step takes them."""

    forward: float
    backward: float


class TensorSpec(NamedTuple):
    """A tensor of shape (1, channels, height, width) as a layer makes it; `wanted`: its gradient is."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    wanted: bool

    @staticmethod
    def of(tensor: torch.Tensor, wanted: bool) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, wanted)

    def make(self, device: torch.device) -> torch.Tensor:
        return _filled(torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device))


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
    in `dtype`. One layer's tensors and weights are on the device at a time. No global state of random numbers moves.

    Raises GeometryError where `size` is not legal for the network.
    """
    for side in size:
        output_size(graph, side)
    jobs: list[tuple[Node, tuple[TensorSpec, ...]]] = []
    made: dict[tuple[Node, tuple[TensorSpec, ...]], tuple[LayerTime, TensorSpec]] = {}

    def step(k: int, inputs: list[TensorSpec]) -> TensorSpec:
        node = graph.nodes[k]
        jobs.append((Node("", node.layer, cols=node.cols, frozen=node.frozen), tuple(inputs)))
        if jobs[-1] not in made:
            made[jobs[-1]] = measure_layer(*jobs[-1], graph.overwrites[k], device, dtype, autocast_dtype)
        return made[jobs[-1]][1]

    first = torch.empty(1, bands, *size, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    graph.fold(TensorSpec.of(first, graph.wants_gradient[0]), step)
    least = {job: time for job, (time, _) in made.items()}
    for _ in range(repeats - 1):
        for job, before in least.items():
            overwrites = graph.overwrites[jobs.index(job)]
            again = measure_layer(*job, overwrites, device, dtype, autocast_dtype)[0]
            least[job] = LayerTime(*map(min, before, again))
    return tuple(least[job] for job in jobs)


def measure_layer(
    node: Node,
    inputs: Sequence[TensorSpec],
    overwrites: bool,
    device: torch.device,
    dtype: torch.dtype,
    autocast_dtype: torch.dtype | None,
) -> tuple[LayerTime, TensorSpec]:
    """Run a twin of a layer twice; return seconds of the second run, and its output."""
    wanted = node.layer.gradient != "none" and (any(spec.wanted for spec in inputs) or not node.frozen)
    if node.layer.hands_on:
        return LayerTime(0.0, 0.0), inputs[0]
    with torch.device("meta"):
        module = build_module(node, [spec.shape[1] for spec in inputs], overwrites)
    module.to(dtype).to_empty(device=device).train().requires_grad_(not node.frozen)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            _filled(tensor) if tensor.is_floating_point() else tensor.zero_()
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    _run(module, inputs, wanted, device, autocast_dtype)  # kernels are chosen, and gradients of weights are made
    return _run(module, inputs, wanted, device, autocast_dtype)


def _run(
    module: nn.Module,
    inputs: Sequence[TensorSpec],
    wanted: bool,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
) -> tuple[LayerTime, TensorSpec]:
    """Run a layer once, forward and backward."""
    taken, outputs = [], list[torch.Tensor]()
    for spec in inputs:
        tensor = spec.make(device)
        token = torch.empty(0, requires_grad=True)
        taken.append(EnterOverwritten.apply(token, tensor, Entrance(tensor)) if spec.wanted else tensor)
    with torch.autocast(device.type, autocast_dtype) if autocast_dtype else nullcontext():
        forward = _seconds(lambda: outputs.append(module(*taken)), device)
    output, backward = TensorSpec.of(outputs[0], wanted), 0.0
    if outputs[0].requires_grad:
        gradient = output.make(device)
        backward = _seconds(lambda: torch.autograd.backward(outputs, [gradient]), device)
    return LayerTime(forward, backward), output


def can_be_measured(graph: Graph) -> bool:
    """Return True if every layer has a module by its description alone, which some of traced networks have not."""
    return all(type(layer) in BUILDERS for layer in graph.layers)


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return seconds of a call, with all that it has started on the device."""
    watch = Stopwatch(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with watch.running():
        function()
    return watch.seconds()


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with draws of a fixed seed that repeat along all dims but channels and columns: quick, no zeros,
    and positive, as a running variance has to be."""
    single = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]  # an expanded one's own values
    shape = [1] * tensor.dim()
    for dim in (min(1, tensor.dim() - 1), -1):
        shape[dim] = single.shape[dim]
    single.copy_(torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.01)
    return tensor


_SMALL, _LARGE = 1 << 12, 1 << 23  # bytes
_REPEATS = 5


class MeasuredLink(NamedTuple):
    """Seconds of a message: `latency`, and `per_byte` on top."""

    latency: float
    per_byte: float

    def seconds(self, size: int) -> float:
        return self.latency + size * self.per_byte


def slowest_link(communicator: Communicator, shape: MeshShape, device: torch.device) -> MeasuredLink:
    """Return the slowest link between two stages that follow each other, of all pipelines; the same on all ranks.
    Collective.

    Stages 0 and 1, 2 and 3, ... talk at the same time, then 1 and 2, 3 and 4, ...: as in a run, all pairs share what
    the machine has. Each message goes forth and back, so no two ranks wait for one another.
    """
    position = shape.position(communicator.rank)
    messages = communicator.point_to_point()
    found = [MeasuredLink(0.0, 0.0)]
    for first in (0, 1):
        if position is None:
            break
        stage = position.stage
        other = stage + 1 if stage % 2 == first else stage - 1
        if 0 <= other < shape.stages:
            peer = shape.rank_at(position._replace(stage=other))
            found.append(measure_link(messages, peer, stage < other, device))
    slowest = MeasuredLink(*map(max, zip(*found, strict=True)))
    return MeasuredLink(*map(max, zip(*communicator.gather_objects(slowest), strict=True)))


def measure_link(messages: PointToPoint, peer: int, begins: bool, device: torch.device) -> MeasuredLink:
    """Measure a link by the quickest of some small and some large messages.

    Called by both ends, of which one `begins`.
    """
    small, large = (_message_seconds(messages, peer, begins, size, device) for size in (_SMALL, _LARGE))
    return MeasuredLink(small, max(0.0, large - small) / (_LARGE - _SMALL))


def _message_seconds(messages: PointToPoint, peer: int, begins: bool, size: int, device: torch.device) -> float:
    """Return seconds of one way, half of forth and back.

    The first of all also opens the connection, and does not count.
    """
    out = torch.zeros(size, dtype=torch.uint8, device=device)
    back = torch.empty_like(out)
    watch, taken = Stopwatch(device), []
    for _ in range(1 + _REPEATS):
        watch.reset()
        with watch.running():
            for sends in (begins, not begins):
                message = Message(peer, out if sends else back)
                messages.start([message] if sends else [], [] if sends else [message]).wait()
        taken.append(watch.seconds())
    return min(taken[1:]) / 2
