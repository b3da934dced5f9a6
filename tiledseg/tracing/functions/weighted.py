"""Handlers of convolutions, norms and linear maps, with weights of any module or computed from weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn

from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.models.layers.convolution import TorchConvolution
from tiledseg.models.layers.pixelwise import COMPUTED
from tiledseg.models.layers.pooling import AveragePoolModule
from tiledseg.models.norm import BatchNorm, GroupNorm, InstanceNorm
from tiledseg.tracing.calls import Given, given_to
from tiledseg.tracing.functions.attention import OVER_PIXELS, of_channels
from tiledseg.tracing.functions.pixelwise import channel_dims, formula, pixelwise, resized_channels
from tiledseg.tracing.functions.times import is_of_times, of_one_time, over_times
from tiledseg.tracing.lowering import Handler, Step, Value, is_channels, refuse, shared

UNLEARNT = "takes weights that depend on the input, which differ from tile to tile; learn them"


def called(step: Step, name: str, layout: Layout | None = None) -> list[Value]:
    """Lower a call, with all its arguments, by a node of single pixels."""
    return pixelwise(step, step.as_called(name), *step.given(), layout, broadcasts=False)


def _linear(step: Step) -> list[Value]:
    """Lower a product of channels with a matrix of weights, or with a matrix of each pixel."""
    name, dim, inputs = "matmul", -1, [step.argument(0, "input"), step.argument(1, "other")]
    if step.call.function == "linear":
        name, value = "linear", step.value()
    elif all(isinstance(each, Value) for each in inputs):
        return of_channels(step, *inputs)
    else:
        dim = -2 if isinstance(inputs[0], Given) else -1
        value, weight = inputs if dim == -1 else inputs[::-1]
        refuse(weight.tensor.dim() != 2, "multiplies by weights that are no matrix; give one of two dims")
    (dim,) = channel_dims(value, dim, OVER_PIXELS)
    return called(step, name, resized_channels(value.layout, dim, step.call.shapes[0][dim]))


def _line(step: Step) -> list[Value]:
    """Lower a conv1d along the channels of a value of one pixel."""
    value = step.value()
    along = value.layout.one_pixel and is_channels(value.layout.dims[-1]) and step.call.shapes[0] == value.shape
    refuse(not along, "works along rows or columns as if they were one line; use conv2d")
    return called(step, "conv1d", value.layout)


def _convolution(kind: type[nn.Module], step: Step) -> list[Value]:
    """Lower a convolution, by a new module that shares the weights of the call."""
    forward = kind is nn.Conv2d
    more = {"dilation": 1, "groups": 1} if forward else {"output_padding": 0, "groups": 1, "dilation": 1}
    options = step.options(3, stride=1, padding=0, **more)
    value, weight, bias = step.value(), step.argument(1, "weight"), step.argument(2, "bias")
    refuse(isinstance(weight, Value) or isinstance(bias, Value), UNLEARNT)
    if weight.tensor.dim() == 5:
        module, layout, value = over_times(step, kind, value, weight.tensor.shape, options)
        return step.by(_with_weights(module, weight=weight, bias=bias), value, "conv", layout)
    out, inner = weight.tensor.shape[:2]
    channels = (inner * options["groups"], out) if forward else (out, inner * options["groups"])
    made = kind(*channels, tuple(weight.tensor.shape[2:]), device="meta", **options)
    return of_one_time(step, corrected(_with_weights(made, weight=weight, bias=bias)), value, "conv")


def _with_weights(module: nn.Module, **tensors: Given | None) -> Any:
    """Give the module the call's weights: parameters are shared, computed weights become formulas of parameters."""
    refuse(any(isinstance(each, Value) for each in tensors.values()), UNLEARNT)
    if all(each is None or isinstance(each.tensor, nn.Parameter) for each in tensors.values()):
        for name, each in tensors.items():
            module.register_parameter(name, None if each is None else each.tensor)  # type: ignore[arg-type]
        return module
    weights: list[Given] = []
    formulas = {name: formula(each, weights, False) for name, each in tensors.items() if each is not None}
    return COMPUTED[type(module)].of(module, formulas, shared(weights))


def corrected(module: nn.Module) -> nn.Module:
    """Return our class of a module, with its weights, where torch's has wrong numbers somewhere; else the module.

    On a CPU torch 2.13's instance norm reads one image's gradient that comes channels last in the wrong order, and its
    group and batch norm lose digits where tensors lie channels last (decision 0007). Convolutions have
    `models.layers.convolution.thinned`, average pooling `models.layers.pooling.average_pool`.
    """
    if type(module) not in CORRECTED:
        return module
    again: Any = copy.copy(module)
    again.__class__, again.in_place_of = CORRECTED[type(module)], (module,)
    return again


CORRECTED: dict[type[nn.Module], type[nn.Module]] = {
    **{nn.InstanceNorm2d: InstanceNorm, nn.GroupNorm: GroupNorm, nn.BatchNorm2d: BatchNorm},
    nn.Conv2d: TorchConvolution,
    nn.AvgPool2d: AveragePoolModule,
}


def _batch_norm(step: Step) -> list[Value]:
    value = step.value()
    tensors = step.options(1, running_mean=None, running_var=None, weight=None, bias=None)
    mean, momentum = tensors["running_mean"], step.argument(6, "momentum", 0.1)
    over = is_of_times(value)
    other = not over and (value.layout.channels or value.layout.dims[1:2] != (("C0",),))
    refuse(other, "norms another dim than that of channels; give it (batch, channels, height, width)")
    moves = mean is not None and step.argument(5, "training", False)
    refuse(moves, "moves running statistics in evaluation too; pass training=self.training")
    trains = step.trained is None or given_to(step.trained, 5, "training", False)
    if mean is not None and step.lowering.trained and mean.owner and mean.owner[0] in step.lowering.trained.counted:
        counter = mean.owner[0], "num_batches_tracked"
        tensors["num_batches_tracked"] = Given(getattr(*counter), *counter[1:], owner=counter)
    options = {"eps": step.argument(7, "eps", 1e-5), "momentum": momentum, "track_running_stats": mean is not None}
    module = _with_weights(BatchNorm(value.shape[1], affine=False, device="meta", **options), **tensors)
    module.still = step.lowering.still or not trains
    return of_one_time(step, module, value, "norm") if over else step.by(module, value, "norm", value.layout)


def _group_norm(step: Step) -> list[Value]:
    """Lower a norm of groups of channels, or of each channel by itself."""
    value, of_groups = step.value(), step.call.function == "group_norm"
    first, eps = (2, step.argument(4, "eps", 1e-5)) if of_groups else (3, step.argument(7, "eps", 1e-5))
    weight, bias = step.argument(first, "weight"), step.argument(first + 1, "bias")
    if of_groups:
        module: nn.Module = GroupNorm(step.argument(1, "num_groups"), value.shape[1], eps, device="meta")
    else:
        refuse(step.argument(1, "running_mean") is not None, "keeps running statistics of instances; leave them out")
        module = InstanceNorm(value.shape[1], eps, device="meta")
    return of_one_time(step, corrected(_with_weights(module, weight=weight, bias=bias)), value, "norm")


WEIGHTED: dict[str, Handler] = {
    **dict.fromkeys(("linear", "matmul", "__matmul__", "bmm"), _linear),
    "conv1d": _line,
    "batch_norm": _batch_norm,
    **dict.fromkeys(("conv2d", "conv3d"), partial(_convolution, nn.Conv2d)),
    **dict.fromkeys(("conv_transpose2d", "conv_transpose3d"), partial(_convolution, nn.ConvTranspose2d)),
    **dict.fromkeys(("group_norm", "instance_norm"), _group_norm),
}
