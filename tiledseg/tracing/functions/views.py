"""Handlers of functions that compute nothing: they name the dims of a tensor anew, or take a part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from tiledseg.geometry.layers.border import Border
from tiledseg.models.layers.border import BorderModule as BorderModule
from tiledseg.models.layers.pooling import MaxPoolModule
from tiledseg.tracing.functions.pixelwise import (
    is_channels,
    permuted,
    pixelwise,
    reshaped,
    sizes_of,
    with_channels,
    without,
)
from tiledseg.tracing.lowering import WHOLE, Handler, RefusalError, Step, Value


def _permute(step: Step) -> list[Value]:
    value = step.value(0, "self")
    order = _rest(step, 1, "dims")
    return [step.made(value.node, permuted(value.layout, order))]


def _transpose(step: Step) -> list[Value]:
    value = step.value(0, "self")
    count = len(value.layout.dims)
    one, other = (step.argument(index, f"dim{index - 1}") % count for index in (1, 2))
    order = list(range(count))
    order[one], order[other] = other, one
    return [step.made(value.node, permuted(value.layout, order))]


def _movedim(step: Step) -> list[Value]:
    value = step.value(0, "self")
    count = len(value.layout.dims)
    sources, targets = (_many(step.argument(at, name)) for at, name in ((1, "source"), (2, "destination")))
    moved = {target % count: source % count for source, target in zip(sources, targets, strict=True)}
    left = [at for at in range(count) if at not in moved.values()]
    order = [moved[at] if at in moved else left.pop(0) for at in range(count)]
    return [step.made(value.node, permuted(value.layout, order))]


def _reshape(step: Step) -> list[Value]:
    """Also flatten, unflatten, squeeze and unsqueeze: what they give says it all."""
    value = step.value(0, "self")
    one, other = step.lowering.pixels_of(value)
    found = [
        reshaped(value.layout, sizes_of(value.layout, before, pixels), after)
        for before, pixels, after in (
            (value.shape, one, step.call.shapes[0]),
            (value.other_shape, other, step.other.shapes[0]),
        )
    ]
    if found[0] is None or found[0] != found[1]:
        raise RefusalError(
            f"makes {value.shape} to {step.call.shapes[0]}, which takes pixels apart or mixes them with other dims; "
            "keep rows and columns"
        )
    return [settled(step, step.made(value.node, found[0]))]


def settled(step: Step, value: Value) -> Value:
    """A value that its author sees as an image, but with its channels in another order, as a tensor in that order."""
    dims, factors = value.layout.dims, value.layout.channels
    if dims == (("B",), ("C0",), ("H", "C1"), ("W", "C2")) and len(set(factors[1:])) == 1:
        shuffled = step.lowering.add_module(step, nn.PixelShuffle(factors[1]), value, "shuffle")
        return replace(step.made(shuffled), shape=value.shape, other_shape=value.other_shape)
    if not value.layout.channels or len(dims) != 4 or (dims[0], *dims[2:]) != (("B",), ("H",), ("W",)):
        return value
    return pixelwise(step, "contiguous", (value,), {}, replace(WHOLE, one_pixel=value.layout.one_pixel))[0]


def _expand(step: Step) -> list[Value]:
    """One pixel as many: the tensor at hand is as large as the image already."""
    value = step.value(0, "self")
    shape = step.call.shapes[0]
    if shape == value.shape:
        return [step.made(value.node, value.layout)]
    if value.layout.one_pixel and len(shape) == 4 and shape[:2] == value.shape[:2]:
        return [step.made(value.node, WHOLE)]
    grown = [at for at, (one, other) in enumerate(zip(value.shape, shape, strict=False)) if one != other]
    single = all(value.shape[at] == 1 and is_channels(value.layout.dims[at]) for at in grown)
    if len(shape) == len(value.shape) and single:
        return pixelwise(
            step, "expand", (value, tuple(-1 if at not in grown else shape[at] for at in range(len(shape)))), {}
        )
    raise RefusalError(f"repeats {value.shape} to {shape}; repeat one channel, or resize, or join by torch.cat")


def _getitem(step: Step) -> list[Value]:
    """Parts of channels and of pixels. The latter are a crop: as many from each end, whatever the size."""
    value = step.value(0, "self")
    one, other = (_indices(index, len(value.shape)) for index in step.arguments(1, "index"))
    if len(one) != len(other):
        raise RefusalError("takes parts by indices that depend on the image's size; give it fixed ones")
    dim = 0
    for index, again in zip(one, other, strict=True):
        if index is None:
            value, dim = _with_new_dim(value, dim), dim + 1
        elif index == slice(None):
            dim += 1
        else:
            value, dim = _part(step, value, dim, index, again)
    return [replace(value, shape=step.call.shapes[0], other_shape=step.other.shapes[0])]


def _indices(index: Any, count: int) -> list[Any]:
    given = list(index) if isinstance(index, tuple) else [index]
    if any(not (each is None or each is Ellipsis or isinstance(each, slice | int)) for each in given):
        raise RefusalError("takes values by a tensor of indices or of truths; take slices")
    taken = sum(each is not None and each is not Ellipsis for each in given)
    at = next((place for place, each in enumerate(given) if each is Ellipsis), len(given))
    return [*given[:at], *[slice(None)] * (count - taken), *given[at + 1 :]]


def _with_new_dim(value: Value, dim: int) -> Value:
    layout = with_channels(replace(value.layout, dims=(*value.layout.dims[:dim], (), *value.layout.dims[dim:])))
    shapes = [(*shape[:dim], 1, *shape[dim:]) for shape in (value.shape, value.other_shape)]
    return replace(value, layout=layout, shape=shapes[0], other_shape=shapes[1])


def _part(step: Step, value: Value, dim: int, index: Any, again: Any) -> tuple[Value, int]:
    names, size, other = value.layout.dims[dim], value.shape[dim], value.other_shape[dim]
    if isinstance(index, int):
        if is_channels(names) and index == again:
            return _selected(step, value, dim, index % size), dim
        if names in (("H",), ("W",), ()) and size == other == 1:
            return _dropped(value, dim), dim
        raise RefusalError("takes one row, column or image; take slices of channels")
    start, stop, step_by = index.indices(size)
    other_start, other_stop, _ = again.indices(other)
    if is_channels(names) and step_by == 1 and (start, stop) == (other_start, other_stop):
        return _narrowed(step, value, dim, start, stop), dim + 1
    if names in (("H",), ("W",)) and not value.layout.one_pixel:
        if step_by == 1 and start == other_start and size - stop == other - other_stop:
            return _cropped(step, value, dim, start, size - stop), dim + 1
        if step_by > 1 and start == other_start and stop == size and other_stop == other:
            return _thinned(step, value, dim, start, step_by), dim + 1
    if (start, stop, step_by) == (0, size, 1) and (other_start, other_stop) == (0, other):
        return value, dim + 1
    raise RefusalError(
        f"takes [{start}:{stop}:{step_by}] of {size} and [{other_start}:{other_stop}] of {other}: not as much from "
        "each end at every size; crop by fixed numbers"
    )


def _shapes_with(value: Value, dim: int, less: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    one, other = ((*shape[:dim], shape[dim] - less, *shape[dim + 1 :]) for shape in (value.shape, value.other_shape))
    return one, other


def _dropped(value: Value, dim: int) -> Value:
    """Without a dim of size 1."""
    layout = replace(value.layout, dims=(*value.layout.dims[:dim], *value.layout.dims[dim + 1 :]))
    shapes = [(*shape[:dim], *shape[dim + 1 :]) for shape in (value.shape, value.other_shape)]
    return replace(value, layout=layout, shape=shapes[0], other_shape=shapes[1])


def _selected(step: Step, value: Value, dim: int, index: int) -> Value:
    return _dropped(_narrowed(step, value, dim, index, index + 1), dim)


def _narrowed(step: Step, value: Value, dim: int, start: int, stop: int) -> Value:
    if (start, stop) == (0, value.shape[dim]):
        return value
    one, other = _shapes_with(value, dim, value.shape[dim] - (stop - start))
    return narrowed(step.giving(one, other), value, dim, start, stop)[0]


def narrowed(step: Step, value: Value, dim: int, start: int, stop: int) -> list[Value]:
    """Some of the channels, of a step that gives these."""
    arguments = (value, dim, start, stop - start)
    return pixelwise(step, "narrow", arguments, {}, without(value.layout, (dim,), True))


def _cropped(step: Step, value: Value, dim: int, before: int, after: int) -> Value:
    if not before and not after:
        return value
    one, other = _shapes_with(value, dim, before + after)
    return replace(add_border(step, value, dim, -before, -after), shape=one, other_shape=other)


def add_border(step: Step, value: Value, dim: int, before: int, after: int, fill: float = 0.0) -> Value:
    """A node that pads or crops one dim of pixels."""
    none = Border(0, 0, fill)
    there = Border(before, after, fill)
    return add_borders(step, value, *((there, none) if value.layout.dims[dim] == ("H",) else (none, there)))


def add_borders(step: Step, value: Value, rows: Border, cols: Border) -> Value:
    """A node that pads or crops rows and columns."""
    node = step.lowering.add(step, "border", rows, BorderModule(rows, cols), (value,), cols=cols)
    return replace(value, node=node)


def _thinned(step: Step, value: Value, dim: int, start: int, stride: int) -> Value:
    """Every `stride`-th row or column: pooling over windows of one."""
    value = _cropped(step, value, dim, start, 0)
    strides = (stride, 1) if value.layout.dims[dim] == ("H",) else (1, stride)
    node = step.lowering.add_module(step, MaxPoolModule(1, strides), value, "every")
    one, other = (
        (*shape[:dim], -(-shape[dim] // stride), *shape[dim + 1 :]) for shape in (value.shape, value.other_shape)
    )
    return replace(value, node=node, shape=one, other_shape=other)


def _rest(step: Step, start: int, name: str) -> tuple[int, ...]:
    """Numbers given one by one, or as one sequence."""
    given = step.call.arguments[start:] or (step.call.keywords[name],)
    return tuple(given[0]) if isinstance(given[0], tuple) else tuple(given)


def _many(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


VIEWS: dict[str, Handler] = {
    "permute": _permute,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "movedim": _movedim,
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"), _reshape
    ),
    **dict.fromkeys(("expand", "expand_as", "repeat", "broadcast_to", "tile"), _expand),
    "__getitem__": _getitem,
}
