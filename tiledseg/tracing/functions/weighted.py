"""Handlers of convolutions and norms, by weights of some module or computed from them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from tiledseg.geometry.layers.border import MIRRORED
from tiledseg.models.layers.convolution import TorchConvolution
from tiledseg.models.layers.pixelwise import ComputedConvolution
from tiledseg.models.norm import InstanceNorm
from tiledseg.tracing.functions.pixelwise import formula, shared
from tiledseg.tracing.functions.windows import WHY_NOT, mirrored
from tiledseg.tracing.lowering import RefusalError, Step, Value
from tiledseg.tracing.record import Given

Handler = Callable[[Step], list[Value]]


def _convolution(step: Step) -> list[Value]:
    """A convolution by the weights of some module, as one of our own that shares them."""
    return _weighted(step, nn.Conv2d, step.options(3, stride=1, padding=0, dilation=1, groups=1))


def _transposed(step: Step) -> list[Value]:
    options = step.options(3, stride=1, padding=0, output_padding=0, groups=1, dilation=1)
    return _weighted(step, nn.ConvTranspose2d, options)


def of_size(step: Step, module: nn.ConvTranspose2d, value: Value) -> nn.ConvTranspose2d:
    """A transposed convolution that is told the size of its output, which it reaches by padding that."""
    found: set[tuple[int, ...]] = set()
    paddings = [int(padding) for padding in module.padding]  # torch takes no words here
    for made, given in ((step.call.shapes[0], value.shape), (step.other.shapes[0], value.other_shape)):
        spans = (dilation * (kernel - 1) for dilation, kernel in zip(module.dilation, module.kernel_size, strict=True))
        dims = zip(made[2:], given[2:], module.stride, paddings, spans, strict=True)
        found.add(tuple(out - ((n - 1) * stride - 2 * pad + span + 1) for out, n, stride, pad, span in dims))
    if len(found) > 1:
        raise RefusalError("pads its output by numbers that depend on the size; say output_padding")
    if (padding := found.pop()) == tuple(module.output_padding):
        return module
    again = copy.copy(module)
    again.output_padding = padding
    return again


def mirroring(step: Step, module: nn.Conv2d, value: Value) -> tuple[nn.Conv2d, Value]:
    """A convolution that pads in a mode, as one with its weights that does not, and what it then takes."""
    if module.padding_mode not in MIRRORED:
        raise RefusalError(f"pads {WHY_NOT[module.padding_mode]}; let padding_mode be reflect, replicate or zeros")
    again = copy.copy(module)
    again.padding, again.padding_mode = (0, 0), "zeros"
    return again, mirrored(step, value, module._reversed_padding_repeated_twice, module.padding_mode)


def _weighted(step: Step, kind: Any, options: dict[str, Any]) -> list[Value]:
    value = step.full()
    weight, bias = step.argument(1, "weight"), step.argument(2, "bias")
    if isinstance(weight, Value) or isinstance(bias, Value):
        raise RefusalError("takes weights that depend on the input, which differ from tile to tile; learn them")
    computed = [given for given in (weight, bias) if given is not None and given.name is None]
    groups = options["groups"]
    out, inner = weight.tensor.shape[:2]
    channels = (inner * groups, out) if kind is nn.Conv2d else (out, inner * groups)
    module = kind(*channels, tuple(weight.tensor.shape[2:]), bias=bias is not None, device="meta", **options)
    module = _computing(module, weight, bias) if computed else shares(module, weight, bias)
    return [step.made(step.lowering.add_module(step, right(module), value, "conv"), value.layout)]


def _computing(module: nn.Module, weight: Given, bias: Given | None) -> nn.Module:
    """The convolution by weights that are computed."""
    if not isinstance(module, nn.Conv2d):
        raise RefusalError("takes weights that are computed; keep them as parameters of the module")
    weights: list[Given] = []
    formulas = formula(weight, weights), None if bias is None else formula(bias, weights)
    return ComputedConvolution.of(module, *formulas, shared(weights))


def shares(module: nn.Module, weight: Given | None, bias: Given | None) -> nn.Module:
    """The module, with the weights of another one, or none."""
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None:
            _share(module, name, given)
    return module


def _share(module: nn.Module, name: str, given: Given) -> None:
    if isinstance(given.tensor, nn.Parameter):
        setattr(module, name, given.tensor)
    else:
        delattr(module, name)
        module.register_buffer(name, given.tensor)


def right(module: nn.Module) -> nn.Module:
    """The module; in the place of one of torch's whose gradients are not right everywhere, one with its weights.

    torch 2.13's instance norm, on a CPU, reads one image's gradient that comes channels last in the wrong order; of its
    convolutions, see `models.layers.convolution.thinned`.
    """
    found = RIGHT.get(type(module))
    if found is None:
        return module
    again = copy.copy(module)
    again.__class__ = found
    return again


RIGHT: dict[type[nn.Module], type[nn.Module]] = {nn.InstanceNorm2d: InstanceNorm, nn.Conv2d: TorchConvolution}


def _instance_norm(step: Step) -> list[Value]:
    value, weight, bias = step.full(), step.argument(3, "weight"), step.argument(4, "bias")
    if step.argument(1, "running_mean") is not None:
        raise RefusalError("keeps running statistics of instances; leave them away")
    module = InstanceNorm(value.shape[1], step.argument(7, "eps", 1e-5), affine=weight is not None)
    return [step.made(step.lowering.add_module(step, shares(module, weight, bias), value, "norm"), value.layout)]


def _group_norm(step: Step) -> list[Value]:
    value, groups = step.full(), step.argument(1, "num_groups")
    weight, bias = step.argument(2, "weight"), step.argument(3, "bias")
    module = nn.GroupNorm(groups, value.shape[1], step.argument(4, "eps", 1e-5), affine=weight is not None)
    return [step.made(step.lowering.add_module(step, shares(module, weight, bias), value, "norm"), value.layout)]


WEIGHTED: dict[str, Handler] = {
    "conv2d": _convolution,
    "conv_transpose2d": _transposed,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
}
