"""Handlers of functions that mix a pixel's channels by weights: linear maps in all their words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.tracing.calls import Given
from tiledseg.tracing.functions.layouts import is_channels
from tiledseg.tracing.functions.pixelwise import channel_dims, pixelwise, without
from tiledseg.tracing.lowering import RefusalError, Step, Value

Handler = Callable[[Step], list[Value]]
OVER_PIXELS = "multiplies tensors that both depend on the input, or over pixels, of which a tile has a part only"


def called(step: Step, name: str, layout: Layout | None = None) -> list[Value]:
    """The call as it was made, by a node of single pixels."""
    arguments = [step.argument(index, "") for index in range(len(step.call.arguments))]
    keywords = {key: step.argument(len(arguments), key) for key in step.call.keywords}
    return pixelwise(step, step.as_called(name), arguments, keywords, layout, broadcasts=False)


def _linear(step: Step) -> list[Value]:
    value = step.value()
    channel_dims(value, -1)
    return called(step, "linear", without(value.layout, (len(value.shape) - 1,), True))


def _matmul(step: Step) -> list[Value]:
    """Channels that come last, by a matrix of weights."""
    value, weight = step.argument(0, "input"), step.argument(1, "other")
    if not isinstance(value, Value) or not isinstance(weight, Given) or weight.tensor.dim() != 2:
        raise RefusalError(f"{OVER_PIXELS}; multiply by a matrix of weights, or use a 1 x 1 convolution")
    channel_dims(step.value(), -1)
    return called(step, "matmul", without(value.layout, (len(value.shape) - 1,), True))


def _einsum(step: Step) -> list[Value]:
    """One tensor and weights: pixels and images stay, all else may be mixed."""
    equation, *operands = step.argument(0, "equation"), *_flat(step)
    values = [operand for operand in operands if isinstance(operand, Value)]
    if len(values) != 1 or "..." in equation or "->" not in equation:
        raise RefusalError(f"{OVER_PIXELS}; mix the channels of one tensor, by an equation that names all dims")
    words, _, after = equation.replace(" ", "").partition("->")
    words = words.split(",")
    seen = words[operands.index(values[0])]
    held = {letter: dim for letter, dim in zip(seen, values[0].layout.dims, strict=True) if not is_channels(dim)}
    others = "".join(word for word in words if word is not seen)
    if any(letter not in after or letter in others for letter in held) or values[0].layout.channels:
        raise RefusalError(f"{OVER_PIXELS}; keep pixels and images, and mix channels alone")
    new = [letter for letter in after if letter not in held]
    if len(new) != 1:
        raise RefusalError("makes no dim of channels, or several; make one")
    dims = tuple(held.get(letter, ("C0",)) for letter in after)
    return called(step, "einsum", Layout(dims, (), values[0].layout.one_pixel))


def _flat(step: Step) -> list[Any]:
    given = [step.argument(index, "") for index in range(1, len(step.call.arguments))]
    return list(given[0]) if len(given) == 1 and isinstance(given[0], tuple) else given


def _conv1d(step: Step) -> list[Value]:
    """Along the channels of one pixel, which come last."""
    value = step.value()
    after = step.call.shapes[0]
    if not value.layout.one_pixel or not is_channels(value.layout.dims[-1]) or after != value.shape:
        raise RefusalError("works along rows or columns as if they were one line; use conv2d")
    return called(step, "conv1d", value.layout)


def _among_channels(step: Step) -> list[Value]:
    step.full(0, "self")
    return called(step, step.call.function)


MIXING: dict[str, Handler] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "__matmul__"), _matmul),
    "einsum": _einsum,
    "conv1d": _conv1d,
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle", "local_response_norm"), _among_channels),
}
