"""What each function of torch is among a graph's layers: one handler a function, and the names of those that work on
single pixels. A function that has no handler is refused by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tiledseg.geometry.layers.activations import Dropout
from tiledseg.geometry.layers.joins import Add, Concatenate, Multiply
from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.models.dropout import ChannelDropout
from tiledseg.models.layers import joins
from tiledseg.spatial.convert import POINTWISE
from tiledseg.tracing.functions.names import ALONG_CHANNELS, ELEMENTWISE, PARTS, REVERSED, SAME, plain
from tiledseg.tracing.functions.pixelwise import channel_dims, pixelwise, without
from tiledseg.tracing.functions.resizing import RESIZING
from tiledseg.tracing.functions.views import VIEWS, narrowed
from tiledseg.tracing.functions.weighted import MIXING, WEIGHTED, called, mirroring, of_size, right
from tiledseg.tracing.functions.windows import WHOLE_IMAGE, WINDOWS
from tiledseg.tracing.lowering import (
    WHOLE,
    Handler,
    RefusalError,
    Step,
    UnknownError,
    Value,
)


def handler_of(name: str) -> Handler | None:
    """The handler of a function; None where nobody has told what it is."""
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
    """A sum or product of two tensors of one number of channels."""
    if inputs[0].shape != inputs[1].shape or inputs[0] == inputs[1]:
        return None
    if name == "add":
        return [step.made(step.lowering.add(step, "add", Add(), joins.AddModule((0, 0)), inputs))]
    if name == "mul":
        return [step.made(step.lowering.add(step, "mul", Multiply(), joins.MultiplyModule((0, 0)), inputs))]
    return None


def _same(step: Step) -> list[Value]:
    """Truths become numbers of the dtype that the network has, whatever the author's was."""
    value = step.value(0, "self")
    source = value.node
    while source in step.lowering.truths:
        source = step.lowering.truths[source]
    if source == value.node or plain(step.call.function) in ("contiguous", "clone", "alias", "cpu", "cuda"):
        return [step.made(value.node, value.layout)]
    return pixelwise(step, "type_as", (value, replace(value, node=source)), {})


def _cat(step: Step) -> list[Value]:
    given, dim = step.arguments(0, "tensors"), step.argument(1, "dim", 0)
    inputs, others = ([each for each in part if isinstance(each, Value) or each.tensor.numel()] for part in given)
    if not all(isinstance(value, Value) for value in inputs):
        return _with_constants(step, inputs, others, dim)
    if any(value.node is None for value in inputs):
        raise UnknownError
    if all(value.layout.dims[dim] == () and value.layout == inputs[0].layout for value in inputs):
        return _stacked(step, inputs, inputs[0].layout, dim % len(inputs[0].shape))
    if {number for value in inputs for number in channel_dims(value, dim)} and all(map(_is_whole, inputs)):
        if len(inputs) == 1:
            return [step.made(inputs[0].node)]
        crops = (0,) * len(inputs)
        node = step.lowering.add(step, "cat", Concatenate(crops), joins.ConcatenateModule(crops), inputs)
        return [step.made(node)]
    return pixelwise(
        step, "cat", (tuple(inputs),), {"dim": dim}, without(inputs[0].layout, (dim % len(inputs[0].shape),), True)
    )


def _with_constants(step: Step, inputs: Sequence[Any], others: Sequence[Any], dim: int) -> list[Value]:
    """A tensor with channels of one number before and after it, of whatever size."""
    places = [place for place, value in enumerate(inputs) if isinstance(value, Value)]
    dim %= len(inputs[places[0]].shape)
    constants = [value.tensor for value in (*inputs, *others) if not isinstance(value, Value)]
    numbers = {number for tensor in constants for number in tensor.unique().tolist()}
    named = any(value.name or value.from_weights for value in inputs if not isinstance(value, Value))
    if len(places) > 1 or not _is_whole(inputs[places[0]]) or dim != 1 or len(numbers) > 1 or named:
        raise RefusalError(
            "joins a tensor that does not depend on the input; compute it from the input, or leave it away"
        )
    before, after = (
        sum(value.tensor.shape[1] for value in part) for part in (inputs[: places[0]], inputs[places[0] + 1 :])
    )
    value = numbers.pop()
    return pixelwise(step, "pad", (inputs[places[0]], (0, 0, 0, 0, before, after)), {"value": value})


def _stack(step: Step) -> list[Value]:
    """Channels of each tensor after those of the one before, with a dim of their own for the tensors."""
    inputs, dim = step.argument(0, "tensors"), step.argument(1, "dim", 0)
    if not all(isinstance(value, Value) and value.layout == inputs[0].layout for value in inputs):
        raise RefusalError("stacks tensors of different layouts, or that do not depend on the input; stack images")
    layout, at = inputs[0].layout, dim % (len(inputs[0].shape) + 1)
    return _stacked(step, inputs, replace(layout, dims=(*layout.dims[:at], (), *layout.dims[at:])), at)


def _stacked(step: Step, inputs: Sequence[Value], layout: Layout, dim: int) -> list[Value]:
    """Tensors one after the other along a dim of size 1 of theirs: `layout` is each one's."""
    if layout.channels or ("C0",) not in layout.dims:
        raise RefusalError("joins tensors whose channels are split, or none; join images")
    crops = (0,) * len(inputs)
    node = step.lowering.add(step, "stack", Concatenate(crops), joins.ConcatenateModule(crops), inputs)
    dims = [tuple("C1" if atom == "C0" else atom for atom in each) for each in layout.dims]
    dims[dim] = ("C0",)
    single = step.call.shapes[0][layout.dims.index(("C0",))]
    return [step.made(node, replace(layout, dims=tuple(dims), channels=(len(inputs), single)))]


def _along_channels(step: Step) -> list[Value]:
    step.check_same()
    value = step.value()
    name = plain(step.call.function)
    dim = step.argument(2 if name == "normalize" else 1, "dim", 1 if name == "normalize" else None)
    if dim is None:
        raise RefusalError("is given no dim; say dim=1")
    channel_dims(value, dim)
    return called(step, name)


def _parts(step: Step) -> list[Value]:
    step.check_same()
    value = step.value(0, "tensor")
    (dim,) = channel_dims(value, step.argument(2, "dim", 0))
    start, made = 0, list[Value]()
    for part, shape in enumerate(step.call.shapes):
        single = step.giving(step.call.shapes[part], step.other.shapes[part])
        made += narrowed(single, value, dim, start, start + shape[dim])
        start += shape[dim]
    return made


def _layer_norm(step: Step) -> list[Value]:
    value = step.value()
    normalized = step.argument(1, "normalized_shape")
    channel_dims(value, tuple(range(-len(tuple(normalized)), 0)))
    return called(step, "layer_norm")


def _dropout(step: Step) -> list[Value]:
    value = step.value()
    probability = step.argument(1, "p", 0.5)
    if step.argument(2, "train" if plain(step.call.function) == "feature_dropout" else "training", True):
        raise RefusalError("drops in evaluation too; pass training=self.training")
    if probability == 0:
        return [step.made(value.node, value.layout)]
    module = ChannelDropout("", probability)
    module.keys = ()
    module.name = step.lowering.add(step, "dropout", Dropout(probability), module, (value,))
    return [step.made(module.name, value.layout)]


def _other_dropout(step: Step) -> list[Value]:
    if step.argument(1, "p", 0.5) == 0:
        return _same(step)
    raise RefusalError("drops other things than channels of an image; use Dropout2d")


def unit(step: Step) -> list[Value]:
    """A module that is one layer, and computed by itself."""
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
    return [step.made(step.lowering.add_module(step, right(module), value), value.layout)]


HANDLERS: dict[str, Handler] = {
    **RESIZING,
    **WHOLE_IMAGE,
    **WINDOWS,
    **WEIGHTED,
    **VIEWS,
    **MIXING,
    "cat": _cat,
    "stack": _stack,
    "layer_norm": _layer_norm,
    **dict.fromkeys(PARTS, _parts),
    **dict.fromkeys(ALONG_CHANNELS, _along_channels),
    **dict.fromkeys(("dropout", "dropout2d", "feature_dropout"), _dropout),
    **dict.fromkeys(("dropout1d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"), _other_dropout),
}
