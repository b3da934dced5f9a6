"""The handler of each function of torch, and of modules that are one layer. A function without a handler is refused by
its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tiledseg.geometry.layers.joins import Add, Concatenate, Multiply
from tiledseg.geometry.layers.pixelwise import Dropout, Layout
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.layers import joins
from tiledseg.spatial.twins import POINTWISE
from tiledseg.tracing.functions.names import ALONG_CHANNELS, ELEMENTWISE, REVERSED, SAME, plain
from tiledseg.tracing.functions.pixelwise import channel_dims, pixelwise, without
from tiledseg.tracing.functions.resizing import RESIZING
from tiledseg.tracing.functions.views import VIEWS
from tiledseg.tracing.functions.weighted import WEIGHTED, called, mirroring, of_size, right
from tiledseg.tracing.functions.windows import WINDOWS
from tiledseg.tracing.lowering import WHOLE, Handler, RefusalError, Step, UnknownError, Value


def handler_of(name: str) -> Handler | None:
    """Return the handler of a function; None for an unknown one."""
    name = plain(name)
    if name in HANDLERS:
        return HANDLERS[name]
    if name in ELEMENTWISE or name in REVERSED:
        return _elementwise
    if name in SAME:
        return _same
    return None


def _elementwise(step: Step) -> list[Value]:
    step.check_same()
    name = plain(step.call.function)
    if name == "where" and len(step.call.arguments) + len(step.call.keywords) == 1:
        raise RefusalError("reads places from the values of a tensor; choose by torch.where(truths, this, that)")
    arguments, keywords = step.given()
    keywords.pop("inplace", None)
    if keywords.pop("out", None) is not None:
        raise RefusalError("writes into a tensor that it is given; leave `out` away")
    if len(arguments) == 2 and not keywords and all(_is_whole(value) for value in arguments):
        joined = _joined(step, name, arguments)
        if joined is not None:
            return joined
    return pixelwise(step, step.as_called(name), _without_inplace(name, arguments), keywords)


# Activations that take `inplace` by its place, and where.
INPLACE = {"relu": 1, "relu6": 1, "selu": 1, "silu": 1, "mish": 1, "hardswish": 1, "hardsigmoid": 1}
INPLACE |= {"leaky_relu": 2, "elu": 2, "celu": 2, "hardtanh": 3, "threshold": 3}


def _without_inplace(name: str, arguments: list[Any]) -> list[Any]:
    return arguments[: INPLACE.get(name, len(arguments))]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Value) and value.layout == WHOLE


def _joined(step: Step, name: str, inputs: Sequence[Value]) -> list[Value] | None:
    """Lower a sum or product of two tensors of one number of channels; return None for another function."""
    if inputs[0].shape != inputs[1].shape or inputs[0] == inputs[1]:
        return None
    if name == "add":
        return step.node("add", Add(), joins.AddModule((0, 0)), inputs)
    return step.node("mul", Multiply(), joins.MultiplyModule((0, 0)), inputs) if name == "mul" else None


def _same(step: Step) -> list[Value]:
    """Lower a change of dtype or memory alone: truths become numbers of the network's dtype."""
    value = step.value(0, "self")
    source = value.node
    while source in step.lowering.truths:
        source = step.lowering.truths[source]
    if source == value.node or plain(step.call.function) in ("contiguous", "clone", "alias", "cpu", "cuda"):
        return step.passed(value)
    return pixelwise(step, "type_as", (value, replace(value, node=source)), {})


def _cat(step: Step) -> list[Value]:
    runs, dim = step.arguments(0, "tensors"), step.argument(1, "dim", 0)
    inputs, others = ([each for each in run if isinstance(each, Value) or each.tensor.numel()] for run in runs)
    if not all(isinstance(value, Value) for value in inputs):
        return _with_constants(step, inputs, others, dim)
    if any(value.node is None for value in inputs):
        raise UnknownError
    if all(value.layout.dims[dim] == () and value.layout == inputs[0].layout for value in inputs):
        return _stacked(step, inputs, inputs[0].layout, dim % len(inputs[0].shape))
    if {number for value in inputs for number in channel_dims(value, dim)} and all(map(_is_whole, inputs)):
        return step.passed(inputs[0]) if len(inputs) == 1 else _concatenated(step, "cat", inputs, WHOLE)
    layout = without(inputs[0].layout, (dim % len(inputs[0].shape),), True)
    return pixelwise(step, "cat", (tuple(inputs),), {"dim": dim}, layout)


def _concatenated(step: Step, what: str, inputs: Sequence[Value], layout: Layout) -> list[Value]:
    crops = (0,) * len(inputs)
    return step.node(what, Concatenate(crops), joins.ConcatenateModule(crops), inputs, layout)


def _with_constants(step: Step, inputs: Sequence[Any], others: Sequence[Any], dim: int) -> list[Value]:
    """Lower a tensor with channels of one number before and after it, whatever their size."""
    places = [place for place, value in enumerate(inputs) if isinstance(value, Value)]
    dim %= len(inputs[places[0]].shape)
    constants = [value.tensor for value in (*inputs, *others) if not isinstance(value, Value)]
    numbers = {number for tensor in constants for number in tensor.unique().tolist()}
    named = any(value.name or value.from_weights for value in inputs if not isinstance(value, Value))
    if len(places) > 1 or not _is_whole(inputs[places[0]]) or dim != 1 or len(numbers) > 1 or named:
        raise RefusalError(
            "joins a tensor that does not depend on the input; compute it from the input, or leave it away"
        )
    ends = inputs[: places[0]], inputs[places[0] + 1 :]
    before, after = (sum(value.tensor.shape[1] for value in end) for end in ends)
    return pixelwise(step, "pad", (inputs[places[0]], (0, 0, 0, 0, before, after)), {"value": numbers.pop()})


def _stack(step: Step) -> list[Value]:
    """Lower a stack: channels of each tensor after those of the one before, with a dim for the tensors."""
    inputs, dim = step.argument(0, "tensors"), step.argument(1, "dim", 0)
    if not all(isinstance(value, Value) and value.layout == inputs[0].layout for value in inputs):
        raise RefusalError("stacks tensors of different layouts, or that do not depend on the input; stack images")
    layout, at = inputs[0].layout, dim % (len(inputs[0].shape) + 1)
    return _stacked(step, inputs, replace(layout, dims=(*layout.dims[:at], (), *layout.dims[at:])), at)


def _stacked(step: Step, inputs: Sequence[Value], layout: Layout, dim: int) -> list[Value]:
    """Join tensors along a dim of size 1 of theirs: `layout` is each one's."""
    if layout.channels or ("C0",) not in layout.dims:
        raise RefusalError("joins tensors whose channels are split, or none; join images")
    dims = [tuple("C1" if atom == "C0" else atom for atom in each) for each in layout.dims]
    dims[dim] = ("C0",)
    single = step.call.shapes[0][layout.dims.index(("C0",))]
    return _concatenated(step, "stack", inputs, replace(layout, dims=tuple(dims), channels=(len(inputs), single)))


def _along_channels(step: Step) -> list[Value]:
    step.check_same()
    name = plain(step.call.function)
    dim = step.argument(2, "dim", 1) if name == "normalize" else step.argument(1, "dim")
    if dim is None:
        raise RefusalError("is given no dim; say dim=1")
    channel_dims(step.value(), dim)
    return called(step, name)


def _layer_norm(step: Step) -> list[Value]:
    normalized = tuple(step.argument(1, "normalized_shape"))
    channel_dims(step.value(), tuple(range(-len(normalized), 0)))
    return called(step, "layer_norm")


def _dropout(step: Step) -> list[Value]:
    value = step.value()
    probability = step.argument(1, "p", 0.5)
    if step.argument(2, "train" if plain(step.call.function) == "feature_dropout" else "training", True):
        raise RefusalError("drops in evaluation too; pass training=self.training")
    if probability == 0:
        return step.passed(value)
    module = ChannelDropout("", probability)
    module.keys = ()
    module.name = step.lowering.add(step, "dropout", Dropout(probability), module, (value,))
    return [step.made(module.name, value.layout)]


def _other_dropout(step: Step) -> list[Value]:
    if step.argument(1, "p", 0.5) == 0:
        return _same(step)
    raise RefusalError("drops other things than channels of an image; use Dropout2d")


def unit(step: Step) -> list[Value]:
    """Lower a module that is one layer, computed by itself."""
    module = step.call.module
    assert module is not None, "a unit is a module's call"
    if module._forward_hooks or module._forward_pre_hooks:
        raise RefusalError("has hooks, which a tile would run too; remove them, or make them modules of their own")
    value = step.value()
    if type(module) not in POINTWISE:
        step.full()
    if isinstance(module, nn.ConvTranspose2d):
        module = of_size(step, module, value)
    elif len(step.call.arguments) + len(step.call.keywords) > 1:
        raise RefusalError("is given more than a tensor; give it what else it needs when it is made")
    if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
        module, value = mirroring(step, module, value)
    return step.by(right(module), value, None, value.layout)


HANDLERS: dict[str, Handler] = {
    **RESIZING,
    **WINDOWS,
    **WEIGHTED,
    **VIEWS,
    "cat": _cat,
    "stack": _stack,
    "layer_norm": _layer_norm,
    **dict.fromkeys(ALONG_CHANNELS, _along_channels),
    **dict.fromkeys(("dropout", "dropout2d", "feature_dropout"), _dropout),
    **dict.fromkeys(("dropout1d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), _other_dropout),
}
