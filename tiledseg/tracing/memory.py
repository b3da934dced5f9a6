"""Measures the memory that autograd keeps for a traced module's functions: each runs once, on a few pixels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.layer import Measured
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.models.layers.pixelwise import tensors_of
from tiledseg.models.norm import BatchNorm, GroupNorm, InstanceNorm
from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.tracing.state import in_mode
from tiledseg.units import SINGLE_BYTES

SIDE = 16
OWN_NORMS = BatchNorm, GroupNorm, InstanceNorm  # they say it themselves: a few rows at a time, whatever the size
SIZES = (SIDE, 2 * SIDE), (2 * SIDE, 2 * SIDE)  # of two runs: what does not grow with the pixels is subtracted


def with_measured_memory(graph: Graph, bands: int, modules: Sequence[nn.Module]) -> Graph:
    """Return the graph with the measured memory of its functions of single pixels. The modules stay as they are."""
    channels = tensor_channels(graph, bands)
    measured: dict[tuple[Any, ...], Measured | None] = {}
    weights = (weight for module in modules for weight in module.parameters() if weight.is_floating_point())
    like, nodes = next(weights, torch.zeros(())), []
    for k, (node, module) in enumerate(zip(graph.nodes, modules, strict=True)):
        inputs = tuple(channels[source] for source in graph.sources[k])
        flat = tuple(source > 0 and graph.layers[source - 1].is_flat for source in graph.sources[k])
        if not graph.overwrites[k] and not isinstance(module, OWN_NORMS) and _is_pointwise(node):
            key = node.layer, inputs, flat, repr(module)
            if key not in measured:
                measured[key] = _measured(module, inputs, flat, like)
            node = replace(node, measured=measured[key])
        nodes.append(node)
    return Graph(tuple(nodes), graph.outputs)


def _is_pointwise(node: Node) -> bool:
    """Return True if as many pixels come out as go in, each of the one at its place."""
    one, layers = Interval(SIDE, SIDE + 1), (node.layer, node.cols or node.layer)
    try:
        same = all(layer.output_size(*(SIDE,) * layer.arity) == SIDE for layer in layers)
    except GeometryError:
        return False
    read = [layer.required_input(one, index) for layer in layers for index in range(layer.arity)] if same else []
    return same and not node.layer.hands_on and read == [one] * len(read)


def _measured(module: nn.Module, channels: Sequence[int], flat: Sequence[bool], like: torch.Tensor) -> Measured | None:
    """Measure a module in bytes of float32 a pixel; return None where it does not run so."""
    buffers = [(tensor, tensor.clone()) for tensor in tensors_of(module) if not isinstance(tensor, nn.Parameter)]
    runs = list[Measured]()
    with torch.random.fork_rng(devices=[like.device] if like.is_cuda else []), in_mode(module, True):
        for size in SIZES:
            with suppress(Exception):  # whatever torch refuses, such as a norm on a single pixel
                runs.append(_run(module, [_drawn(*each, size, like) for each in zip(channels, flat, strict=True)]))
        for buffer, before in buffers:
            buffer.data.copy_(before)
    if len(runs) < len(SIZES):
        return None
    few, many = runs
    scale = SINGLE_BYTES / like.element_size() / (SIZES[1][0] * SIZES[1][1] - SIZES[0][0] * SIZES[0][1])
    gradients = zip(few.gradients, many.gradients, strict=True)
    besides, transient = (many.besides - few.besides) * scale, (many.transient - few.transient) * scale
    each = tuple(None if a is None or b is None else (b - a) * scale for a, b in gradients)
    return replace(few, besides=besides, gradients=each, transient=transient)


def _drawn(channels: int, flat: bool, size: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    x_BCHW = torch.rand(1, channels, *((1, 1) if flat else size), dtype=like.dtype, device=like.device)
    x_BCHW = x_BCHW.expand(-1, -1, *size) if flat else x_BCHW.contiguous(memory_format=torch.channels_last)
    return x_BCHW.detach().requires_grad_()


def _run(module: nn.Module, inputs: list[torch.Tensor]) -> Measured:
    """Run a module forward and backward; return the bytes of this run, not those of a pixel."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    weights, own = tensors_of(module), [_key(x) for x in inputs]
    with AllocationMeter([*inputs, *weights]) as meter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = module(*inputs)
        out = _key(output)
        view_of = own.index(out) if out in own else None
        flat = view_of is None and output.untyped_storage().nbytes() < output.numel() * output.element_size()
        besides = kept.keys() - {out, *own, *map(_key, weights)}
        start: list[int] = []
        end = _End.apply(start, output)
        del output
        before = meter.peak = meter.bytes
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        made = torch.autograd.grad(end, [*inputs, *trained], allow_unused=True)[: len(inputs)]
    first, whole = start
    bytes_of = {_key(g): g.untyped_storage().nbytes() for g in made if g is not None and _key(g) != first}
    transient = meter.peak - before - whole - sum(bytes_of.values())
    gradients = [None if g is None or _key(g) == first else float(bytes_of.pop(_key(g), 0)) for g in made]
    inside, keeps = tuple(index for index, key in enumerate(own) if key in kept), view_of is None and out in kept
    more = sum(kept[key] for key in besides)
    return Measured(inside, keeps, more, view_of, flat, tuple(gradients), transient)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _End(torch.autograd.Function):
    """A scalar whose backward pass gives ones, and notes in `start` the storage that they lie in and its bytes."""

    @staticmethod
    def forward(ctx: Any, start: list[int], output_BCHW: torch.Tensor) -> torch.Tensor:
        ctx.start, ctx.like = start, output_BCHW.to(device="meta", memory_format=torch.channels_last)
        return output_BCHW.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        made = torch.ones_like(ctx.like, device=gradient.device)
        ctx.start += [_key(made), made.untyped_storage().nbytes()]
        return None, made
