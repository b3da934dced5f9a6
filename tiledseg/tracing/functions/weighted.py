"""Handlers of convolutions, norms and linear maps, by weights of some module or computed from them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.geometry.layers.resampling import MIRRORED
from tiledseg.models.layers.convolution import TorchConvolution
from tiledseg.models.layers.pixelwise import COMPUTED
from tiledseg.models.norm import InstanceNorm
from tiledseg.tracing.calls import Given, given_to, where
from tiledseg.tracing.functions.pixelwise import channel_dims, formula, is_channels, pixelwise, shared, without
from tiledseg.tracing.functions.windows import WHY_NOT, mirrored
from tiledseg.tracing.lowering import Handler, RefusalError, Step, Value

OVER_PIXELS = "multiplies tensors that both depend on the input, or over pixels, of which a tile has a part only"


def called(step: Step, name: str, layout: Layout | None = None) -> list[Value]:
    """Lower a call as it was made, by a node of single pixels."""
    arguments, keywords = step.given()
    return pixelwise(step, step.as_called(name), arguments, keywords, layout, broadcasts=False)


def _linear(step: Step) -> list[Value]:
    value = step.value()
    channel_dims(value, -1)
    return called(step, "linear", without(value.layout, (len(value.shape) - 1,), True))


def _matmul(step: Step) -> list[Value]:
    """Lower channels that come last, times a matrix of weights."""
    value, weight = step.argument(0, "input"), step.argument(1, "other")
    if not isinstance(value, Value) or not isinstance(weight, Given) or weight.tensor.dim() != 2:
        raise RefusalError(f"{OVER_PIXELS}; multiply by a matrix of weights, or use a 1 x 1 convolution")
    channel_dims(step.value(), -1)
    return called(step, "matmul", without(value.layout, (len(value.shape) - 1,), True))


def _einsum(step: Step) -> list[Value]:
    """Lower a product of one tensor and weights: pixels and images stay, all else may be mixed."""
    equation, *operands = step.given()[0]
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], tuple) else operands
    values = [operand for operand in operands if isinstance(operand, Value)]
    if len(values) != 1 or "..." in equation or "->" not in equation:
        raise RefusalError(f"{OVER_PIXELS}; mix the channels of one tensor, by an equation that names all dims")
    words, _, after = equation.replace(" ", "").partition("->")
    words = words.split(",")
    own = words[operands.index(values[0])]
    held = {letter: dim for letter, dim in zip(own, values[0].layout.dims, strict=True) if not is_channels(dim)}
    others = "".join(word for word in words if word is not own)
    if any(letter not in after or letter in others for letter in held) or values[0].layout.channels:
        raise RefusalError(f"{OVER_PIXELS}; keep pixels and images, and mix channels alone")
    new = [letter for letter in after if letter not in held]
    if len(new) != 1:
        raise RefusalError("makes no dim of channels, or several; make one")
    dims = tuple(held.get(letter, ("C0",)) for letter in after)
    return called(step, "einsum", Layout(dims, (), values[0].layout.one_pixel))


def _conv1d(step: Step) -> list[Value]:
    """Lower a convolution along the channels of one pixel, which come last."""
    value = step.value()
    after = step.call.shapes[0]
    if not value.layout.one_pixel or not is_channels(value.layout.dims[-1]) or after != value.shape:
        raise RefusalError("works along rows or columns as if they were one line; use conv2d")
    return called(step, "conv1d", value.layout)


def _among_channels(step: Step) -> list[Value]:
    step.full(0, "self")
    return called(step, step.call.function)


DEPENDING = "takes weights that depend on the input, which differ from tile to tile; learn them"


def _convolution(step: Step) -> list[Value]:
    """Lower a convolution by the weights of some module, as one of our own that shares them."""
    return _weighted(step, nn.Conv2d, step.options(3, stride=1, padding=0, dilation=1, groups=1))


def _transposed(step: Step) -> list[Value]:
    options = step.options(3, stride=1, padding=0, output_padding=0, groups=1, dilation=1)
    return _weighted(step, nn.ConvTranspose2d, options)


def of_size(step: Step, module: nn.ConvTranspose2d, value: Value) -> nn.ConvTranspose2d:
    """Return a transposed convolution that reaches the size of its output, an argument, by padding that."""
    choices: set[tuple[int, ...]] = set()
    paddings = [int(padding) for padding in module.padding]  # torch takes no words here
    for made, before in ((step.call.shapes[0], value.shape), (step.other.shapes[0], value.other_shape)):
        spans = (dilation * (kernel - 1) for dilation, kernel in zip(module.dilation, module.kernel_size, strict=True))
        dims = zip(made[2:], before[2:], module.stride, paddings, spans, strict=True)
        choices.add(tuple(out - ((n - 1) * stride - 2 * pad + span + 1) for out, n, stride, pad, span in dims))
    if len(choices) > 1:
        raise RefusalError("pads its output by numbers that depend on the size; say output_padding")
    if (padding := choices.pop()) == tuple(module.output_padding):
        return module
    again = copy.copy(module)
    again.output_padding = padding
    return again


def mirroring(step: Step, module: nn.Conv2d, value: Value) -> tuple[nn.Conv2d, Value]:
    """Return a convolution that pads in a mode as one that does not, and its padded input."""
    if module.padding_mode not in MIRRORED:
        raise RefusalError(f"pads {WHY_NOT[module.padding_mode]}; let padding_mode be reflect, replicate or zeros")
    again = copy.copy(module)
    again.padding, again.padding_mode = (0, 0), "zeros"
    return again, mirrored(step, value, module._reversed_padding_repeated_twice, module.padding_mode)


def _weighted(step: Step, kind: Any, options: dict[str, Any]) -> list[Value]:
    value, weight, bias = step.full(), step.argument(1, "weight"), step.argument(2, "bias")
    if isinstance(weight, Value):
        raise RefusalError(DEPENDING)
    out, inner = weight.tensor.shape[:2]
    channels = (inner * options["groups"], out) if kind is nn.Conv2d else (out, inner * options["groups"])
    module = kind(*channels, tuple(weight.tensor.shape[2:]), device="meta", **options)
    return step.by(right(_with(module, weight=weight, bias=bias)), value, "conv", value.layout)


def _with(module: nn.Module, **tensors: Given | None) -> Any:
    """Return the module by other modules' tensors, which it shares if they are weights as they are."""
    if any(isinstance(each, Value) for each in tensors.values()):
        raise RefusalError(DEPENDING)
    if all(each is None or isinstance(each.tensor, nn.Parameter) for each in tensors.values()):
        for name, each in tensors.items():
            module.register_parameter(name, None if each is None else each.tensor)  # type: ignore[arg-type]
        return module
    weights: list[Given] = []
    formulas = {name: formula(each, weights, False) for name, each in tensors.items() if each is not None}
    return COMPUTED[type(module)].of(module, formulas, shared(weights))


def right(module: nn.Module) -> nn.Module:
    """Return the module; for one of torch's whose gradients are not right everywhere, one of ours with its weights.

    torch 2.13's instance norm, on a CPU, reads one image's gradient that comes channels last in the wrong order; of its
    convolutions, see `models.layers.convolution.thinned`.
    """
    if type(module) not in RIGHT:
        return module
    again = copy.copy(module)
    again.__class__ = RIGHT[type(module)]
    return again


RIGHT: dict[type[nn.Module], type[nn.Module]] = {nn.InstanceNorm2d: InstanceNorm, nn.Conv2d: TorchConvolution}


def _batch_norm(step: Step) -> list[Value]:
    value = step.value()
    tensors = step.options(1, running_mean=None, running_var=None, weight=None, bias=None)
    mean, momentum = tensors["running_mean"], step.argument(6, "momentum", 0.1)
    if value.layout.channels or value.layout.dims[1:2] != (("C0",),):
        raise RefusalError("norms another dim than that of channels; give it (batch, channels, height, width)")
    if mean is not None and step.argument(5, "training", False):
        raise RefusalError("moves running statistics in evaluation too; pass training=self.training")
    trains = step.trained is None or given_to(step.trained, 5, "training", False)
    if step.trained is not None and momentum != given_to(step.trained, 6, "momentum", 0.1):
        step.lowering.untrained = f"{where(step.call)} is given another momentum"
    if mean is not None and step.lowering.trained and mean.owner and mean.owner[0] in step.lowering.trained.counted:
        counter = mean.owner[0], "num_batches_tracked"
        tensors["num_batches_tracked"] = Given(getattr(*counter), *counter[1:], owner=counter)
    options = {"eps": step.argument(7, "eps", 1e-5), "momentum": momentum, "track_running_stats": mean is not None}
    module = _with(nn.BatchNorm2d(value.shape[1], affine=False, device="meta", **options), **tensors)
    module.still = step.lowering.still or not trains
    return step.by(module, value, "norm", value.layout)


def _instance_norm(step: Step) -> list[Value]:
    value, weight, bias = step.full(), step.argument(3, "weight"), step.argument(4, "bias")
    if step.argument(1, "running_mean") is not None:
        raise RefusalError("keeps running statistics of instances; leave them away")
    module = InstanceNorm(value.shape[1], step.argument(7, "eps", 1e-5), device="meta")
    return step.by(right(_with(module, weight=weight, bias=bias)), value, "norm", value.layout)


def _group_norm(step: Step) -> list[Value]:
    value, groups = step.full(), step.argument(1, "num_groups")
    weight, bias = step.argument(2, "weight"), step.argument(3, "bias")
    module = nn.GroupNorm(groups, value.shape[1], step.argument(4, "eps", 1e-5), device="meta")
    return step.by(right(_with(module, weight=weight, bias=bias)), value, "norm", value.layout)


WEIGHTED: dict[str, Handler] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "__matmul__"), _matmul),
    "einsum": _einsum,
    "conv1d": _conv1d,
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle", "local_response_norm"), _among_channels),
    "batch_norm": _batch_norm,
    "conv2d": _convolution,
    "conv_transpose2d": _transposed,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
}
