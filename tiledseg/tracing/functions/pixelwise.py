"""Layouts, nodes for calls that compute each pixel from itself, and calls that permute, reshape or cut a tensor.

A tensor of the graph is always (batch, channels, height, width). A layout says which dims it has in the module's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from tiledseg.geometry.layers.pixelwise import Cut, Formula, FormulaSlot, Layout, Pixelwise
from tiledseg.geometry.layers.resampling import Border
from tiledseg.models.layers.pixelwise import PixelFunction, resolve
from tiledseg.models.layers.resampling import BorderModule
from tiledseg.tracing.calls import NAMES, Call, Given, values_in
from tiledseg.tracing.lowering import WHOLE, Handler, RefusalError, Step, Value, is_channels, refuse, shared

PIXELS = ("H", "W")
CHANNELS = tuple(f"C{index}" for index in range(8))
Sized = list[list[tuple[str, int]]]  # the atoms of each dim, with their sizes
# Functions of torch that take tensors but no numbers.
TENSORS_ALONE = frozenset(["minimum", "maximum", "atan2", "hypot", "logaddexp", "xlogy", "index_select"])


def sizes_of(layout: Layout, shape: Sequence[int], pixels: tuple[int, int], batch: int) -> dict[str, int]:
    """Return the size of each atom of a layout, for a tensor of this shape. `pixels`: its rows and columns; `batch`:
    the images of the run, of which positions, which are equal for all images, have one."""
    sizes = {"B": batch, **dict(zip((*PIXELS, *CHANNELS), (*pixels, *layout.channels), strict=False))}
    sizes |= {dim[0]: size for dim, size in zip(layout.dims, shape, strict=True) if len(dim) == 1}
    for dim, size in zip(layout.dims, shape, strict=True):
        unnamed = size // prod(sizes.get(atom, 1) for atom in dim)
        sizes |= {atom: unnamed for atom in dim if atom not in sizes}
    return sizes


def sized(layout: Layout) -> Sized:
    """Return the dims of a layout. Only channels that are split have sizes."""
    sizes = dict(zip(CHANNELS, layout.channels, strict=False))
    return [[(atom, sizes.get(atom, 0)) for atom in dim] for dim in layout.dims]


def laid_out(dims: Sized, one_pixel: bool = False, fills: bool = False) -> Layout:
    """Return the layout of these dims, in which channels are numbered in the order of their names. Those of size 1 are
    left out, or all but one. `fills`: a single channel without a dim gets a free one, also if all pixels are the
    same."""
    sizes = dict(sorted(each for dim in dims for each in dim if each[0].startswith("C")))
    split = [name for name, size in sizes.items() if size != 1] or list(sizes)[:1]
    names = {name: f"C{index}" for index, name in enumerate(split)}
    made = [tuple(names.get(atom, atom) for atom, _ in dim if atom in names or atom not in sizes) for dim in dims]
    if len(split) > 1 and (together := tuple(names.values())) in made:  # all channels in one dim, in their order
        made, split = [("C0",) if dim == together else dim for dim in made], split[:1]
    if not split and () in made and (fills or not one_pixel):
        made[made.index(())] = ("C0",)
    return Layout(tuple(made), tuple(sizes[name] for name in split) if len(split) > 1 else (), one_pixel)


def pixelwise(
    step: Step, function: str, arguments: Sequence[Any], keywords: Any, layout: Any = None, broadcasts: bool = True
) -> list[Value]:
    """Lower a call that computes each pixel from itself. `layout`: of its result, by default of the inputs.
    `broadcasts`: True if torch broadcasts its weights to the tensor's dims."""
    inputs, weights, made = list[Value](), list[Given](), list[Value]()
    name, truths = function.removeprefix("Tensor."), step.lowering.truths
    are_floats = (True,) if name == "type_as" else step.call.floats
    given = tuple(arguments), tuple(sorted(keywords.items()))
    filled = _slots(given, inputs, weights, name not in TENSORS_ALONE)
    if layout is None:  # one channel of an input may have been broadcast to more
        layout = common_layout(inputs)
        sizes = sizes_of(layout, step.call.shapes[0], (1, 1), 1)
        layout = replace(layout, channels=tuple(sizes[name] for name in CHANNELS[: len(layout.channels)]))
    for value in values_in((given[0], keywords)) if broadcasts else ():
        shape = tuple(value.tensor.shape) if isinstance(value, Given) else ()
        beside = zip(reversed(layout.dims), reversed(shape), strict=False)
        many = len(shape) > len(layout.dims) or any(size > 1 and not is_channels(dim) for dim, size in beside)
        what = f"takes a weight of shape {shape}, one for each pixel of one size of image; use one a channel"
        refuse(many, f"{what}, or map by fixed crops (--window)")
    before, shapes = tuple(value.layout for value in inputs), tuple(tuple(weight.tensor.shape) for weight in weights)
    for part, shape in enumerate(step.call.shapes):
        several = part if len(step.call.shapes) > 1 else None
        pixels = (1, 1) if layout.one_pixel else max(step.lowering.pixels[str(value.node)] for value in inputs)[0]
        images = sizes_of(layout, shape, pixels, step.lowering.records[0].batch)["B"]
        channels = prod(shape) // (images * prod(pixels))
        layer = Pixelwise(function, filled[0], channels, filled[1], before, layout, shapes, several)
        node = step.lowering.add(step, name, PixelFunction(layer, shared(weights)), inputs)
        if not are_floats[part] or all(value.node in truths for value in inputs):
            truths[node] = inputs[0].node or node
        made.append(step.made(node, layout, part))
    return made


def _slots(value: Any, inputs: list[Value], weights: list[Given], plainly: bool = True) -> Any:
    """Return arguments with a slot or a formula for each tensor. `plainly`: constants of one value become numbers."""
    if isinstance(value, Value):
        if value not in inputs:
            inputs.append(value)
        return FormulaSlot(inputs.index(value))
    if isinstance(value, Given):
        return formula(value, weights, plainly)
    if isinstance(value, tuple | list):
        return tuple(_slots(each, inputs, weights, plainly) for each in value)
    return Cut(value.start, value.stop, value.step) if isinstance(value, slice) else value


def formula(value: Given, weights: list[Given], plainly: bool = True) -> Any:
    """Return the formula of a computed weight, a number, or a slot; append the weights that it takes to `weights`."""
    if value.name is None and value.recipe is not None and value.from_weights:
        function, arguments, keywords, part = value.recipe
        overwrites = function.endswith("_") and not function.endswith("__")
        refuse(overwrites, f"takes a weight that {function} has written over; compute it without")
        slots = _slots((arguments, tuple(sorted(keywords.items()))), [], weights)
        return Formula(function, slots[0], slots[1], part)
    if value.name is None and value.tensor.numel() == 1 and plainly:
        return value.tensor.item()
    place = next((at for at, weight in enumerate(weights) if weight.tensor is value.tensor), len(weights))
    if place == len(weights):
        weights.append(value)
    return FormulaSlot(place, True)


def common_layout(inputs: Sequence[Value]) -> Layout:
    """Return the layout of the inputs' common result: the one with most dims, of an input with pixels if any has."""
    layouts = [value.layout for value in inputs]
    full = [layout for layout in layouts if not layout.one_pixel] or layouts
    most = max(full, key=lambda layout: sum(map(bool, layout.dims)))
    # Dims must be equal, or both of channels, of which one may have size 1; a value of one pixel has no pixel dims.
    pairs = [(layout in full, *pair) for layout in layouts for pair in zip(layout.dims, most.dims, strict=False)]
    alike = all(a == b or (is_channels(b) and (not a or is_channels(a))) for is_full, a, b in pairs if is_full)
    fits = all(is_channels(a) == is_channels(b) or not (a and b) for _, a, b in pairs)
    other = not alike or not fits or len({len(layout.dims) for layout in layouts}) > 1
    refuse(other, "joins tensors that lie in different layouts; bring them to one before")
    return most


def channel_dims(value: Value, dims: int | Sequence[int], of_pixels: str | None = None) -> tuple[int, ...]:
    """Return sorted dims counted from the front. Refuses dims of pixels (`of_pixels`: the reason) or of images."""
    count = len(value.layout.dims)
    numbers = tuple(sorted(number % count for number in ([dims] if isinstance(dims, int) else dims)))
    inside = all(is_channels(value.layout.dims[number]) for number in numbers)
    over_pixels = any(atom in PIXELS for number in numbers for atom in value.layout.dims[number])
    refuse(of_pixels and over_pixels, str(of_pixels))
    refuse(not inside, "works along pixels or images, of which a tile has a part only; work along channels")
    return numbers


def without(layout: Layout, dims: Sequence[int], keep: bool) -> Layout:
    """Return the layout after the channels of `dims` are reduced to one. `keep`: such a dim stays, of size 1."""
    left = [[(atom, 1) for atom, _ in dim[:1]] if at in dims else dim for at, dim in enumerate(sized(layout))]
    return laid_out([dim for at, dim in enumerate(left) if keep or at not in dims], layout.one_pixel)


def resized_channels(layout: Layout, dim: int, count: int) -> Layout:
    """Return the layout with `count` channels along a dim."""
    dims = sized(layout)
    dims[dim] = [(atom, count) for atom, _ in dims[dim][:1]]
    return laid_out(dims, layout.one_pixel)


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
        dims = sized(cut.layout)
        layout = laid_out([[] if dim is None else dims[dim] for dim in order], cut.layout.one_pixel)
        made.append(step.made(cut.node, layout, part))
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
    parts = (value.shape, count), (value.other_shape, other_count)
    step = step.giving(*((*shape[:dim], left, *shape[dim + 1 :]) for shape, left in parts))
    if is_channels(names) and one == again:
        layout = resized_channels(value.layout, dim, count)
        if every == 1:
            return pixelwise(step, "narrow", (value, dim, start, count), {}, layout)[0]
        cuts = (*[slice(None)] * dim, slice(start, start + count * every, every))
        return pixelwise(step, "Tensor.__getitem__", (value, cuts), {}, layout)[0]
    rest, other_rest = size - start - count, other - other_start - other_count
    crops = every == 1 and (start, rest) == (other_start, other_rest) and (count > 1 or other_count > 1)
    if crops and names in (("H",), ("W",)) and not value.layout.one_pixel:
        none, ends = Border(0, 0, 0.0), Border(-start, -rest, 0.0)
        return with_borders(step, value, *((ends, none) if names == ("H",) else (none, ends)))
    stop, other_stop = start + count * every, other_start + other_count * every
    what = f"takes [{start}:{stop}:{every}] of {size} and [{other_start}:{other_stop}] of {other}"
    raise RefusalError(f"{what}: not as much from each end at every size; crop by fixed numbers, or resize")


def with_borders(step: Step, value: Value, rows: Border, cols: Border) -> Value:
    """Add a node that pads or crops rows and columns, and return its output."""
    return step.node("border", BorderModule(rows, cols), (value,), value.layout)[0]


def _reshape(step: Step) -> list[Value]:
    """Lower a reshape, flatten, unflatten, squeeze or unsqueeze, by the shapes of its result alone."""
    value, (after, other) = step.value(0, "self"), (step.call.shapes[0], step.other.shapes[0])
    shapes, pixels = (value.shape, value.other_shape), step.lowering.pixels[str(value.node)]
    runs = zip(shapes, pixels, (each.batch for each in step.lowering.records), strict=True)
    sizes = [sizes_of(value.layout, *run) for run in runs]
    layout, again = (_reshaped(value.layout, *each) for each in zip(sizes, (after, other), strict=True))
    if layout is None or layout != again:
        raise RefusalError(f"reshapes {value.shape} to {after}, and takes pixels apart; keep rows and columns")
    return [_reordered(step, step.made(value.node, layout))]


def _reshaped(layout: Layout, sizes: dict[str, int], shape: Sequence[int]) -> Layout | None:
    """Return the layout after a reshape to `shape`; None where it takes pixels apart, or mixes them with other dims."""
    names = [atom for dim in layout.dims for atom in dim]
    atoms = [(atom, sizes[atom]) for atom in names if sizes[atom] > 1 or not atom.startswith("C")]
    dims: Sized = []
    for left in shape:
        one = left == 1 and atoms[:1] and atoms[0][1] == 1  # a single row or column
        dim = [atoms.pop(0)] if one else []
        while atoms and left > 1:
            atom, own = atoms.pop(0)
            if own > left and own % left == 0 and atom.startswith("C"):
                atoms.insert(0, (atom + "b", own // left))
                atom, own = atom + "a", left
            if left % own:
                return None
            dim.append((atom, own))
            left //= own
        if left != 1:
            return None
        dims.append(dim)
    return None if any(own > 1 for _, own in atoms) else laid_out(dims, layout.one_pixel, fills=True)


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
    value, shape, name = step.value(0, "self"), step.call.shapes[0], step.call.function
    grown = [at for at, (one, other) in enumerate(zip(value.shape, shape, strict=False)) if one != other]
    alike, of_images = len(shape) == len(value.shape), grown == [0] and value.layout.dims[0] == ("B",)
    if alike and (not grown or of_images):  # positions for all images
        return step.passed(value)
    if value.layout.one_pixel and len(shape) == 4 and shape[:2] == value.shape[:2]:
        return step.enlarged(value)
    if name in ("repeat", "tile") and len(grown) == 1 and alike:
        (at,) = channel_dims(value, grown, "repeats pixels beside the image; resize, or pad")
        return pixelwise(step, step.as_called(name), *step.given(), resized_channels(value.layout, at, shape[at]))
    single = all(value.shape[at] == 1 and is_channels(value.layout.dims[at]) for at in grown)
    other = not (alike and single)
    refuse(other, f"repeats {value.shape} to {shape}; repeat one channel, or resize, or join by torch.cat")
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
