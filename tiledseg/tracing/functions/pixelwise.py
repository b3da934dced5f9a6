"""Layouts, and nodes for calls that compute each pixel from itself.

A tensor of the graph is always (batch, channels, height, width). A layout says which dims it has in the module's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tiledseg.geometry.layers.pixelwise import Cut, Formula, FormulaSlot, Layout, Pixelwise
from tiledseg.models.layers.pixelwise import PixelFunction
from tiledseg.tracing.calls import Given, values_in
from tiledseg.tracing.lowering import Step, Value, is_channels, refuse, shared

PIXELS = ("H", "W")
# Functions of torch that take tensors but no numbers.
TENSORS_ALONE = frozenset(["minimum", "maximum", "atan2", "hypot", "logaddexp", "xlogy", "index_select"])


def sizes_of(layout: Layout, shape: Sequence[int], pixels: tuple[int, int], batch: int) -> dict[str, int]:
    """Return the size of each atom of a layout, for a tensor of this shape. `pixels`: its rows and columns; `batch`:
    the images of the run."""
    sizes = dict(zip(("B", *PIXELS), (images_of(layout, shape, batch), *pixels), strict=True))
    sizes |= dict.fromkeys(PIXELS, 1) if layout.one_pixel else {}
    sizes |= {f"C{index}": size for index, size in enumerate(layout.channels)}
    for dim, size in zip(layout.dims, shape, strict=True):
        unnamed = size // prod(sizes.get(atom, 1) for atom in dim)
        sizes |= {atom: unnamed for atom in dim if atom not in sizes}
    return sizes


def images_of(layout: Layout, shape: Sequence[int], batch: int) -> int:
    """Return the number of images in a tensor of this shape: 1 for positions, which are equal for all images."""
    return shape[layout.dims.index(("B",))] if ("B",) in layout.dims else batch


def with_channels(layout: Layout) -> Layout:
    """Return the layout; if it has no dim of channels, with its first dim of size 1 as the dim of one channel."""
    if layout.one_pixel or any(atom.startswith("C") for dim in layout.dims for atom in dim) or () not in layout.dims:
        return layout
    at = layout.dims.index(())
    return replace(layout, dims=(*layout.dims[:at], ("C0",), *layout.dims[at + 1 :]))


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
    common, after = layout or common_layout(inputs), layout
    if layout is None:  # one channel of an input may have been broadcast to more
        ones = zip(common.dims, step.call.shapes[0], strict=True)
        numbers = {dim[0]: size for dim, size in ones if len(dim) == 1}
        factors = (numbers.get(f"C{index}", size) for index, size in enumerate(common.channels))
        after = replace(common, channels=tuple(factors))
    for value in values_in((given[0], keywords)) if broadcasts else ():
        shape = tuple(value.tensor.shape) if isinstance(value, Given) else ()
        many = len(shape) > len(common.dims)
        refuse(many, f"takes a weight of shape {shape}, which has more dims than the tensor")
        beside = zip(common.dims[len(common.dims) - len(shape) :], shape, strict=True)
        what = f"takes a weight of shape {shape}, one for each pixel of one size of image; use one a channel"
        own = any(size > 1 and not is_channels(dim) for dim, size in beside)
        refuse(own, f"{what}, or map by fixed crops (--window)")
    before, shapes = tuple(value.layout for value in inputs), tuple(tuple(weight.tensor.shape) for weight in weights)
    for part, shape in enumerate(step.call.shapes):
        several = part if len(step.call.shapes) > 1 else None
        pixels = (1, 1) if after.one_pixel else max(step.lowering.pixels[str(value.node)] for value in inputs)[0]
        channels = prod(shape) // (images_of(after, shape, step.lowering.records[0].batch) * prod(pixels))
        layer = Pixelwise(function, filled[0], channels, filled[1], before, after, shapes, several)
        node = step.lowering.add(step, name, layer, PixelFunction(layer, shared(weights)), inputs)
        if not are_floats[part] or all(value.node in truths for value in inputs):
            truths[node] = inputs[0].node or node
        made.append(step.made(node, after, part))
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
    pairs = [list(zip(layout.dims, most.dims, strict=False)) for layout in full]
    alike = all(a == b or (is_channels(b) and (not a or is_channels(a))) for each in pairs for a, b in each)
    pairs = [list(zip(layout.dims, most.dims, strict=False)) for layout in layouts]
    fits = all(is_channels(a) == is_channels(b) or not (a and b) for each in pairs for a, b in each)
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
    gone = {atom for number in dims for atom in layout.dims[number]}
    stay = [(f"C{index}", size) for index, size in enumerate(layout.channels) if f"C{index}" not in gone]
    names = {atom: f"C{index}" for index, (atom, _) in enumerate(stay)}
    one: tuple[str, ...] = () if stay else ("C0",)  # a single channel is left
    pairs = [(number, dim) for number, dim in enumerate(layout.dims) if keep or number not in dims]
    left = tuple(one if k in dims else tuple(names.get(atom, atom) for atom in dim) for k, dim in pairs)
    return replace(layout, dims=left, channels=tuple(size for _, size in stay) if len(stay) > 1 else ())
