"""What autograd keeps of a traced module's functions, measured: the plan of memory asks it of the graph.

Nobody can say it of any function of torch that an author may call, so each that works pixel by pixel is run once,
forward and backward, on a few pixels, and every storage followed from birth to death.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tiledseg.errors import GeometryError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layers.layer import Layer, Measured
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.models.layers.pixelwise import tensors_of
from tiledseg.models.norm import BatchNorm, GroupNorm, InstanceNorm
from tiledseg.tracing.allocations import AllocationMeter
from tiledseg.units.widths import SINGLE_BYTES

SIDE = 16
OWN_NORMS = BatchNorm, GroupNorm, InstanceNorm  # they say it themselves: a few rows at a time, whatever the size
SIZES = (SIDE, 2 * SIDE), (2 * SIDE, 2 * SIDE)  # what does not grow with the pixels is told apart


def with_measured_memory(graph: Graph, bands: int, modules: Sequence[nn.Module]) -> Graph:
    """The graph, whose nodes of functions that work pixel by pixel say what autograd keeps of them.

    The modules are as before, their buffers too; torch's generator draws as if nothing had run.
    """
    channels = tensor_channels(graph, bands)
    known: dict[tuple[Any, ...], Measured | None] = {}
    weights = (weight for module in modules for weight in module.parameters() if weight.is_floating_point())
    like, nodes = next(weights, torch.zeros(())), []
    for k, (node, module) in enumerate(zip(graph.nodes, modules, strict=True)):
        given = tuple(channels[source] for source in graph.sources[k])
        flat = tuple(source > 0 and graph.layers[source - 1].is_flat for source in graph.sources[k])
        if not graph.overwrites[k] and not isinstance(module, OWN_NORMS) and _is_pointwise(node):
            key = node.layer, given, flat, repr(module)
            if key not in known:
                known[key] = _measured(module, given, flat, like)
            node = replace(node, measured=known[key])
        nodes.append(node)
    return Graph(tuple(nodes), graph.outputs)


def _is_pointwise(node: Node) -> bool:
    """Whether as many pixels come out as go in, each of those at its place, or of all."""
    return not node.layer.hands_on and all(_keeps_places(layer) for layer in (node.layer, node.cols or node.layer))


def _keeps_places(layer: Layer) -> bool:
    one = Interval(SIDE, SIDE + 1)
    try:
        same = layer.output_size(*(SIDE,) * layer.arity) == SIDE
    except GeometryError:
        return False
    return same and all(layer.required_input(one, index) == one for index in range(layer.arity))


def _measured(module: nn.Module, channels: Sequence[int], flat: Sequence[bool], like: torch.Tensor) -> Measured | None:
    """None where the module does not run so: its layer then speaks for it."""
    buffers = [(tensor, tensor.clone()) for tensor in tensors_of(module) if not isinstance(tensor, nn.Parameter)]
    mode = module.training
    try:
        with torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
            module.train()
            few, many = (_MeasuredRun(module, channels, flat, size, like).found() for size in SIZES)
    except Exception:  # whatever torch refuses, such as a norm on a single pixel
        return None
    finally:
        module.train(mode)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return _by_pixel(few, many)


def _by_pixel(few: Measured, many: Measured) -> Measured:
    """What grows with the pixels, for each of them."""
    more = SIZES[1][0] * SIZES[1][1] - SIZES[0][0] * SIZES[0][1]
    pairs = zip(few.gradients, many.gradients, strict=True)
    gradients = tuple(None if one is None or other is None else (other - one) / more for one, other in pairs)
    return replace(
        few,
        besides=(many.besides - few.besides) / more,
        gradients=gradients,
        transient=(many.transient - few.transient) / more,
    )


class _MeasuredRun:
    """A module forward and backward on tensors of one size, all in bytes of float32."""

    def __init__(
        self,
        module: nn.Module,
        channels: Sequence[int],
        flat: Sequence[bool],
        size: tuple[int, int],
        like: torch.Tensor,
    ) -> None:
        self._module = module
        self._weights = [weight for weight in module.parameters() if weight.requires_grad]
        self._scale = SINGLE_BYTES / like.element_size()
        self._inputs = [
            _drawn(count, size, one, like).requires_grad_() for count, one in zip(channels, flat, strict=True)
        ]

    def found(self) -> Measured:
        kept, output = self._kept()
        own = [tensor.untyped_storage()._cdata for tensor in self._inputs]
        stored = output.untyped_storage()
        view_of = own.index(stored._cdata) if stored._cdata in own else None
        besides = sum(nbytes for key, nbytes in kept.items() if key not in own and key != stored._cdata)
        gradients, transient = self._gradients()
        return Measured(
            kept_inputs=tuple(index for index, key in enumerate(own) if key in kept),
            keeps_output=view_of is None and stored._cdata in kept,
            besides=besides * self._scale,
            view_of=view_of,
            flat=view_of is None and stored.nbytes() < output.numel() * output.element_size(),
            gradients=gradients,
            transient=transient * self._scale,
        )

    def _kept(self) -> tuple[dict[int, int], torch.Tensor]:
        """The storages that autograd keeps, with their bytes, and the output; weights left out."""
        weights = {tensor.untyped_storage()._cdata for tensor in tensors_of(self._module)}
        seen: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._module(*self._inputs)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in seen}
        return {key: nbytes for key, nbytes in storages.items() if key not in weights}, output

    def _gradients(self) -> tuple[tuple[float | None, ...], float]:
        """Bytes of each input's gradient, and what is allocated on top of them and of the output's."""
        meter = AllocationMeter([*self._inputs, *tensors_of(self._module)])
        with meter:
            output = self._module(*self._inputs)
            start: list[int] = []
            end = _End.apply(start, output)
            del output
            before, meter.peak = meter.bytes, meter.bytes
            found = torch.autograd.grad(end, [*self._inputs, *self._weights], allow_unused=True)
        made = found[: len(self._inputs)]
        bytes_of = {g.untyped_storage()._cdata: g.untyped_storage().nbytes() for g in made if g is not None}
        first, whole = start
        new = sum(nbytes for key, nbytes in bytes_of.items() if key != first)
        told: list[float | None] = []
        for gradient in made:
            key = None if gradient is None else gradient.untyped_storage()._cdata
            told.append(None if key is None or key == first else bytes_of.pop(key, 0) * self._scale)
        return tuple(told), meter.peak - before - whole - new


def _drawn(channels: int, size: tuple[int, int], flat: bool, like: torch.Tensor) -> torch.Tensor:
    if flat:
        return torch.rand(1, channels, 1, 1, dtype=like.dtype, device=like.device).expand(-1, -1, *size).detach()
    x_BCHW = torch.rand(1, channels, *size, dtype=like.dtype, device=like.device)
    return x_BCHW.contiguous(memory_format=torch.channels_last)


class _End(torch.autograd.Function):
    """A scalar; backward gives ones, and tells `start` the storage that they lie in and its bytes."""

    @staticmethod
    def forward(ctx: Any, start: list[int], output_BCHW: torch.Tensor) -> torch.Tensor:
        ctx.start, ctx.like = start, (output_BCHW.shape, output_BCHW.dtype, output_BCHW.device)
        return output_BCHW.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        shape, dtype, device = ctx.like
        made = torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last).fill_(1)
        ctx.start += [made.untyped_storage()._cdata, made.untyped_storage().nbytes()]
        return None, made
