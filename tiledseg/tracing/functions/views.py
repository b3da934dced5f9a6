"""Handlers of functions that compute nothing: they permute or reshape a tensor, or take a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.geometry.layers.resampling import Border
from tiledseg.models.layers.pixelwise import resolve
from tiledseg.models.layers.resampling import BorderModule
from tiledseg.tracing.calls import NAMES, Call, Given, values_in
from tiledseg.tracing.functions.pixelwise import channel_dims, pixelwise, sizes_of, with_channels, without
from tiledseg.tracing.lowering import WHOLE, Handler, RefusalError, Step, Value, is_channels, refuse

Range = tuple[int, int, int]  # start, step, count
Shape = tuple[int, ...]
View = tuple[list[Range], list[int | None]]  # a range of each dim; for each dim of the view its source (None: new)


def _view(step: Step) -> list[Value]:
    """Lower a permutation, a part of a tensor, several parts, or a mixture of these."""
    value = step.value(0, "self")
    views = views_of(step, step.call, value.shape), views_of(step, step.other, value.other_shape)
    made = list[Value]()
    for part, ((ranges, order), (others, again)) in enumerate(zip(*views, strict=True)):
        refuse(order != again, "takes parts by indices that depend on the image's size; give it fixed ones")
        cut = value
        for dim, (one, other) in enumerate(zip(ranges, others, strict=True)):
            cut = _cut(step, cut, dim, one, other)
        dims = tuple(() if dim is None else cut.layout.dims[dim] for dim in order)
        made.append(step.made(cut.node, with_channels(replace(cut.layout, dims=dims)), part))
    return made


def views_of(step: Step, call: Call, shape: Shape) -> list[View]:
    """Return the views that the call gives, by calling it on a meta tensor whose strides identify its dims."""
    strides = [3]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * (2 * size + 3))
    stand_in = torch.empty_strided(shape, strides, device="meta")
    keywords = {key: each for key, each in call.keywords.items() if key not in NAMES["self"]}
    indices = any(isinstance(each, Given) for each in values_in((call.arguments, keywords)))
    refuse(indices, "takes values by a tensor of indices or of truths; take slices")
    result = resolve(step.as_called(call.function))(stand_in, *call.arguments[1:], **keywords)
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    refuse(any(part._base is not stand_in for part in parts), "takes values by a list of indices; take slices")
    views = list[View]()
    for part in parts:
        offset, starts = part.storage_offset(), []
        for stride in strides:
            starts.append(offset // stride)
            offset %= stride
        ranges, order = [(start, 1, 1) for start in starts], list[int | None]()
        for stride, count in reversed(list(zip(part.stride(), part.shape, strict=True))):
            dim = next((dim for dim, whole in enumerate(strides) if whole <= stride), None)
            every = 1 if dim is None else stride // strides[dim]
            seen = dim is not None and dim not in order and (every == 1 or every < shape[dim])
            order.insert(0, dim if seen else None)
            if dim is not None and seen:
                ranges[dim] = starts[dim], every, count
        views.append((ranges, order))
    return views


def _cut(step: Step, value: Value, dim: int, one: Range, again: Range) -> Value:
    """Take a part of one dim: any channels, or pixels cut by equal amounts from each end at both sizes."""
    names, size, other = value.layout.dims[dim], value.shape[dim], value.other_shape[dim]
    (start, every, count), (other_start, _, other_count) = one, again
    if (one, again) == ((0, 1, size), (0, 1, other)):
        return value
    if is_channels(names) and one == again:
        shapes = (_with_size(shape, dim, count) for shape in (value.shape, value.other_shape))
        step, layout = step.giving(*shapes), resized_channels(value.layout, dim, count)
        if every == 1:
            return pixelwise(step, "narrow", (value, dim, start, count), {}, layout)[0]
        cuts = (*[slice(None)] * dim, slice(start, start + count * every, every))
        return pixelwise(step, "Tensor.__getitem__", (value, cuts), {}, layout)[0]
    rest, other_rest = size - start - count, other - other_start - other_count
    crops = every == 1 and (start, rest) == (other_start, other_rest) and (count > 1 or other_count > 1)
    if crops and names in (("H",), ("W",)) and not value.layout.one_pixel:
        node = add_border(step, value, dim, -start, -rest).node
        shapes = (_with_size(*each) for each in ((value.shape, dim, count), (value.other_shape, dim, other_count)))
        return Value(node, value.layout, *shapes)
    stop, other_stop = start + count * every, other_start + other_count * every
    what = f"takes [{start}:{stop}:{every}] of {size} and [{other_start}:{other_stop}] of {other}"
    raise RefusalError(f"{what}: not as much from each end at every size; crop by fixed numbers, or resize")


def resized_channels(layout: Layout, dim: int, count: int) -> Layout:
    """Return the layout with `count` channels along a dim."""
    first, *joined = layout.dims[dim] or ("",)
    if count == 1 or not layout.channels or not first:
        return without(layout, (dim,), True)
    sizes = {f"C{at}": size for at, size in enumerate(layout.channels) if f"C{at}" not in joined} | {first: count}
    names = {atom: f"C{at}" for at, atom in enumerate(sizes)}
    dims = tuple(tuple(names.get(atom, atom) for atom in each if atom not in joined) for each in layout.dims)
    return replace(layout, dims=dims, channels=tuple(sizes.values()) if len(sizes) > 1 else ())


def _with_size(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def add_border(step: Step, value: Value, dim: int, before: int, after: int) -> Value:
    """Add a node that pads or crops one dim of pixels."""
    none, there = Border(0, 0, 0.0), Border(before, after, 0.0)
    return add_borders(step, value, *((there, none) if value.layout.dims[dim] == ("H",) else (none, there)))


def add_borders(step: Step, value: Value, rows: Border, cols: Border) -> Value:
    """Add a node that pads or crops rows and columns."""
    return replace(value, node=step.lowering.add(step, "border", rows, BorderModule(rows, cols), (value,), cols))


def _reshape(step: Step) -> list[Value]:
    """Lower a reshape, flatten, unflatten, squeeze or unsqueeze, by the shapes of its result alone."""
    value, (after, other) = step.value(0, "self"), (step.call.shapes[0], step.other.shapes[0])
    shapes, pixels = (value.shape, value.other_shape), step.lowering.pixels[str(value.node)]
    runs = zip(shapes, pixels, (each.batch for each in step.lowering.records), strict=True)
    sizes = [sizes_of(value.layout, *run) for run in runs]
    layout, again = (_reshaped(value.layout, *each) for each in zip(sizes, (after, other), strict=True))
    if layout is None or layout != again:
        what = f"reshapes {value.shape} to {after}, which takes pixels apart or mixes them with other dims"
        raise RefusalError(f"{what}; keep rows and columns")
    return [_reordered(step, step.made(value.node, layout))]


def _reshaped(layout: Layout, sizes: dict[str, int], shape: Sequence[int]) -> Layout | None:
    """Return the layout after a reshape to `shape`; None where it takes pixels apart, or mixes them with other dims."""
    atoms = [(atom, sizes[atom]) for dim in layout.dims for atom in dim]
    dims: list[list[tuple[str, int]]] = []
    for size in shape:
        one = size == 1 and atoms[:1] and atoms[0][1] == 1 and not atoms[0][0].startswith("C")
        dim: list[tuple[str, int]] = [atoms.pop(0)] if one else []  # a single row or column
        left = size
        while atoms and left > 1:
            atom, own = atoms.pop(0)
            if own > left:
                if not atom.startswith("C") or own % left:
                    return None
                dim.append((atom + "a", left))
                atoms.insert(0, (atom + "b", own // left))
                left = 1
                break
            if left % own:
                return None
            dim.append((atom, own))
            left //= own
        if left != 1:
            return None
        dims.append(dim)
    if any(own > 1 for _, own in atoms):
        return None
    for atom, own in atoms:  # a single channel, wherever there is room
        free = next((dim for dim, size in zip(dims, shape, strict=True) if size == 1 and not dim), [])
        free.append((atom, own))
    before = [name for name in sorted(sizes) if name.startswith("C")]
    parts = {atom: size for dim in dims for atom, size in dim if atom.startswith("C")}
    ordered = sorted(parts, key=lambda atom: (before.index(atom.rstrip("ab")), atom.lstrip("C0123456789")))
    names = {atom: f"C{index}" for index, atom in enumerate(ordered)}  # in the order of the graph's channels
    made = tuple(tuple(names.get(atom, atom) for atom, _ in dim) for dim in dims)
    factors = tuple(parts[atom] for atom in ordered) if len(ordered) > 1 else ()
    if factors and (together := tuple(names.values())) in made:  # all channels in one dim, in their order
        made, factors = tuple(("C0",) if dim == together else dim for dim in made), ()
    return with_channels(replace(layout, dims=made, channels=factors))


def _reordered(step: Step, value: Value) -> Value:
    """Return the value; for an image whose channels have another order, the output of a node that orders them."""
    dims, factors = value.layout.dims, value.layout.channels
    if dims == (("B",), ("C0",), ("H", "C1"), ("W", "C2")) and len(set(factors[1:])) == 1:
        shuffled = step.lowering.add_module(step, nn.PixelShuffle(factors[1]), value, "shuffle")
        return replace(step.made(shuffled), shape=value.shape, other_shape=value.other_shape)
    if not value.layout.channels or len(dims) != 4 or (dims[0], *dims[2:]) != (("B",), ("H",), ("W",)):
        return value
    return pixelwise(step, "contiguous", (value,), {}, replace(WHOLE, one_pixel=value.layout.one_pixel))[0]


def _expand(step: Step) -> list[Value]:
    """Lower an expansion or repetition: of one pixel to the image, of positions to all images, or of channels."""
    value, shape = step.value(0, "self"), step.call.shapes[0]
    if shape == value.shape:
        return step.passed(value)
    if value.layout.one_pixel and len(shape) == 4 and shape[:2] == value.shape[:2]:
        return step.enlarged(value)
    grown = [at for at, (one, other) in enumerate(zip(value.shape, shape, strict=False)) if one != other]
    if grown == [0] and value.layout.dims[0] == ("B",) and len(shape) == len(value.shape):  # positions for all images
        return step.passed(value)
    name = step.call.function
    if name in ("repeat", "tile") and len(grown) == 1 and len(shape) == len(value.shape):
        (at,) = channel_dims(value, grown, "repeats pixels beside the image; resize, or pad")
        return pixelwise(step, step.as_called(name), *step.given(), resized_channels(value.layout, at, shape[at]))
    single = all(value.shape[at] == 1 and is_channels(value.layout.dims[at]) for at in grown)
    if len(shape) != len(value.shape) or not single:
        raise RefusalError(f"repeats {value.shape} to {shape}; repeat one channel, or resize, or join by torch.cat")
    sizes = tuple(shape[at] if at in grown else -1 for at in range(len(shape)))
    return pixelwise(step, "expand", (value, sizes), {})


_VIEWS = """permute transpose swapaxes swapdims movedim moveaxis __getitem__ narrow select unbind chunk split
tensor_split"""
_RESHAPES = "view reshape flatten unflatten squeeze unsqueeze view_as reshape_as"
VIEWS: dict[str, Handler] = {
    **dict.fromkeys(_VIEWS.split(), _view),
    **dict.fromkeys(_RESHAPES.split(), _reshape),
    **dict.fromkeys(("expand", "expand_as", "repeat", "broadcast_to", "tile"), _expand),
}
