"""Handlers of borders, pooling, resizing, and of means, sums and maxima over the image, which ranks exchange.

A branch of adaptive pooling, from means of parts of the image to the resizing to the image's size, is one node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.geometry.layers.resampling import MIRRORED, Border
from tiledseg.geometry.shapes import PooledBranch
from tiledseg.models.layers import pooling
from tiledseg.models.layers.joins import WholeImageMax, WholeImageMean
from tiledseg.models.layers.pooling import pair
from tiledseg.models.layers.resampling import AlignedUpsampleModule, UpsampleModule
from tiledseg.models.network import PooledBranchModule
from tiledseg.tracing.functions.pixelwise import (
    PIXELS,
    channel_dims,
    pixelwise,
    resized_channels,
    with_borders,
    without,
)
from tiledseg.tracing.lowering import Handler, Step, Value, assembled, in_place_if, is_channels, refuse

Pair = tuple[int, int]
ROWS_AND_COLS = ("H",), ("W",)
LEAST = 1e-30  # least sum of squares: below, its root has no gradient
WHY_NOT = {"circular": "with the image's other end, which no tile has"}


def _adaptive(step: Step) -> list[Value]:
    """Lower adaptive pooling: means or maxima of parts of the image, as many parts at every size."""
    value, after, of_maxima = step.planes(), step.call.shapes[0][-2:], "max" in step.call.function
    if ratios(step, value) == (1.0, 1.0):
        return step.passed(value)
    if after == (1, 1):
        return _image_max(step, value) if of_maxima else [step.do("mean", value, (-2, -1), keepdim=True)]
    what = f"makes {after[0]} x {after[1]}"
    refuse(of_maxima, f"{what} maxima of the whole image; take a single one, or pool by fixed windows")
    refuse(after != step.other.shapes[0][-2:], f"{what} means of the image, as many as its size says; take one mean")
    refuse(step.full().node in step.lowering.pooled, "takes means of means of parts; take them of the image")
    (made,) = step.node("means", nn.Identity(), (value,))  # the input of the branch
    step.lowering.pooled[str(made.node)] = str(made.node)
    return [made]


def _image_max(step: Step, value: Value, layout: Layout | None = None, even: bool = False) -> list[Value]:
    """Add a node for maxima. Their indices have no node, so a call that takes them is refused."""
    layout = layout or replace(value.layout, dims=(*value.layout.dims[:-2], (), ()), one_pixel=True)
    made = step.only().node("maximum", WholeImageMax(even), (value,), layout)
    return [*made, *(step.made(None, part=part) for part in range(1, len(step.call.shapes)))]


def _reduce(step: Step) -> list[Value]:
    """Lower a reduction: over channels of each pixel, or a mean, sum or maximum of all pixels of the image."""
    value, name = step.value(), step.call.function
    first, last = 2 if name in ("norm", "kthvalue") else 1, 3 if name in ("var", "std") else -1  # after `unbiased`
    dims, keep = step.argument(first, "dim"), bool(step.argument(max(last, first + 1), "keepdim", False))
    refuse(dims is None, "reduces all dims, images too; give dim=")
    numbers = sorted({dim % len(value.layout.dims) for dim in (dims if isinstance(dims, tuple) else (dims,))})
    names = tuple(sorted(atom for number in numbers for atom in value.layout.dims[number]))
    left = [() if at in numbers else dim for at, dim in enumerate(value.layout.dims) if keep or at not in numbers]
    if not names and name in ("mean", "sum", "prod", "amax", "amin", "max", "min"):  # of one value
        return step.passed(value, replace(value.layout, dims=tuple(left)))
    if names == PIXELS and not value.layout.one_pixel:
        is_truth = value.node in step.lowering.truths
        refuse(is_truth, f"takes the {name} of booleans or whole numbers; convert them before, as by .to(x.dtype)")
        layout = replace(value.layout, dims=tuple(left), one_pixel=True)
        if name in ("amax", "max"):
            return _image_max(step, value, layout, even=name == "amax")
        if name in ("mean", "sum"):
            return step.node(name, WholeImageMean(name == "sum"), (value,), layout)
        other = name != "norm" or step.argument(1, "p", "fro") not in ("fro", 2, 2.0)
        refuse(other, f"takes the {name} over the whole image, of which ranks share means, sums and maxima; take these")
        total = step.do("sum", step.do("square", value), dims, keepdim=keep)
        over = step.do("rsqrt", step.do("clamp_min", total, LEAST))  # no gradient where all values are zero
        return [step.do("mul", total, over)]
    apart = value.layout.dims[-2:] == ROWS_AND_COLS and set(PIXELS) < set(names) and "B" not in names
    if apart and name in ("mean", "sum", "amax"):  # over pixels, then over channels and times
        value = step.do(name, value, (-2, -1), keepdim=True)
        return pixelwise(step, step.as_called(name), (value, dims, keep), {}, without(value.layout, numbers, keep))
    after = without(value.layout, channel_dims(value, numbers), keep)
    return pixelwise(step, step.as_called(name), *step.given(), after)


def _pad(step: Step) -> list[Value]:
    """Lower a padding or cropping of channels, or of rows and columns."""
    (pads, others), mode = step.arguments(1, "pad"), step.argument(2, "mode", "constant")
    value, fill = step.value(), float(step.argument(3, "value") or 0.0)
    if not any(pads) and not any(others):
        return step.passed(value)
    refuse(tuple(pads) != tuple(others), f"pads by {pads} at one size, {others} at another; pad by fixed numbers")
    count, layout = len(value.layout.dims), value.layout
    ends = {count - 1 - at // 2: pads[at : at + 2] for at in range(0, len(pads), 2) if any(pads[at : at + 2])}
    if mode == "constant" and all(is_channels(layout.dims[dim]) for dim in ends):
        for dim in ends:
            layout = resized_channels(layout, dim, step.call.shapes[0][dim])
        return pixelwise(step, "pad", (value, tuple(pads)), {"value": fill}, layout)
    named: dict[Any, Any] = {layout.dims[dim]: pair for dim, pair in ends.items()}
    refuse(not named.keys() <= {*ROWS_AND_COLS}, "pads other dims than rows and columns; pad these alone")
    mirrors = mode in MIRRORED and min(pads) >= 0
    why = f"pads {WHY_NOT.get(mode, f'by mode {mode}')}; pad by reflect, replicate, or with zeros"
    refuse(mode != "constant" and not mirrors and max(pads) > 0, why)
    pairs, kind = (named.get(dim, (0, 0)) for dim in ROWS_AND_COLS), mode if mirrors else "constant"
    return [with_borders(step, value, *(Border(before, after, fill, kind) for before, after in pairs))]


def _sees_all(step: Step, value: Value) -> bool:
    """Return True if a pooling's window is the whole image at both sizes."""
    shapes = [value.shape[-2:], value.other_shape[-2:]]
    kernels = [pair(kernel) for kernel in step.arguments(1, "kernel_size")]
    paddings = (pair(padding) for padding in step.arguments(3, "padding", 0))
    return kernels == shapes and shapes[0] != shapes[1] and not any(map(any, paddings))


def _pool_options(step: Step, **defaults: Any) -> dict[str, Any]:
    """Return a pooling's options. Windows that touch need no ceil_mode: sizes are multiples of them."""
    options = step.options(1, kernel_size=None, stride=None, padding=0, **defaults)
    options["stride"] = options["stride"] or options["kernel_size"]
    touches = pair(options["kernel_size"]) == pair(options["stride"]) and not any(pair(options["padding"]))
    return {**options, "ceil_mode": options["ceil_mode"] and not touches}


def _max_pool(step: Step) -> list[Value]:
    value = step.planes()
    if _sees_all(step, value):
        return _image_max(step, value)
    options = _pool_options(step, dilation=1, ceil_mode=False)
    made = step.only().by(pooling.MaxPoolModule(**options), value, "pool", value.layout)
    if len(step.call.shapes) == 1:
        return made
    sizes = [pair(options[name]) for name in ("kernel_size", "stride", "padding", "dilation")]
    refuse(any(row != col for row, col in sizes), "gives indices of windows that are no squares; use squares")
    rows = [row for row, _ in sizes]
    return [*made, *step.only(1).node("indices", pooling.MaxIndicesModule(*rows), (value,))]


def _max_unpool(step: Step) -> list[Value]:
    value, indices = step.full(), step.full(1, "indices")
    kernel = pair(step.argument(2, "kernel_size"))[0]
    refuse(ratios(step, value) != (kernel, kernel), "unpools windows that overlap; unpool windows that touch")
    own = getattr(step.lowering.modules.get(str(indices.node)), "sizes", None) == (kernel, kernel, 0, 1)
    refuse(not own, "unpools by indices of other windows than its own; pool and unpool by the same kernel")
    return step.node("unpool", pooling.MaxUnpoolModule(kernel), (value, indices))


def _average_pool(step: Step) -> list[Value]:
    value = step.planes()
    if _sees_all(step, value) and step.argument(6, "divisor_override") is None:
        return [step.do("mean", value, (-2, -1), keepdim=True)]
    options = _pool_options(step, ceil_mode=False, count_include_pad=True, divisor_override=None)
    return step.by(pooling.AveragePoolModule(**options), value, "pool", value.layout)


def _resized_branch(step: Step, value: Value, mode: str, aligned: bool) -> list[Value]:
    """Replace a branch of adaptive pooling by one node: its means, the nodes that follow, and the resizing."""
    refuse(mode != "bilinear", f"resizes means of parts of the image by '{mode}'; take bilinear")
    lowering, last = step.lowering, str(value.node)
    root = next(node for node in lowering.nodes if node.name == lowering.pooled[last])
    source = root.inputs[0]
    inner, modules = assembled(lowering, [last], source if last == root.name else root.name)
    image, bins = Value(source, value.layout, *lowering.pixels[source]), lowering.pixels[root.name][0]
    factors = ratios(step, image) or (0.5, 0.5)
    what = "resizes means of parts of the image to a size that is no multiple of the image's there"
    refuse(any(factor != int(factor) for factor in factors), f"{what}; give a multiple")
    pairs = zip(bins, map(int, factors), strict=True)
    rows, cols = (PooledBranch(number, bins[0] * bins[1], inner, aligned, factor) for number, factor in pairs)
    branch = PooledBranchModule(rows, cols, [in_place_if(module, False) for module in modules])
    return step.node("pyramid", branch, (image,))


def _interpolate(step: Step) -> list[Value]:
    value, factors = step.planes(), ratios(step, step.planes())
    mode, align = step.argument(3, "mode", "nearest"), step.argument(4, "align_corners")
    if value.node in step.lowering.pooled and not value.layout.one_pixel:
        return _resized_branch(step, value, mode, bool(align))
    if value.layout.one_pixel:
        return step.enlarged(value)
    if factors == (1.0, 1.0):
        return step.passed(value)
    sizes = "{} x {} to {} x {} pixels".format(*value.shape[-2:], *step.call.shapes[0][-2:])
    refuse(factors is None, f"resizes {sizes}, by another factor at another size; give a scale_factor")
    row, col = factors or (0.0, 0.0)
    if min(row, col) >= 1 and (row, col) == (int(row), int(col)):
        whole = int(row), int(col)
        refuse(align and mode == "bicubic", "resizes by bicubic with align_corners=True; take bilinear, or False")
        if align and mode == "bilinear":
            return step.node("interpolate", AlignedUpsampleModule(whole), (value,), value.layout)
        module = UpsampleModule(scale_factor=whole, mode=mode, align_corners=align)
        return step.by(module, value, "interpolate", value.layout)
    thin = max(row, col) <= 1 and (1 / row, 1 / col) == (int(1 / row), int(1 / col))
    refuse(not thin, f"resizes {sizes}; only whole factors fall on the edges of tiles: let the sizes be multiples")
    return _thinned(step, value, (int(1 / row), int(1 / col)), mode, align)


def ratios(step: Step, value: Value) -> tuple[float, float] | None:
    """Return the factors by which the call enlarges rows and columns; None if they differ between the runs."""
    runs = (value.shape, step.call.shapes[0]), (value.other_shape, step.other.shapes[0])
    one, other = ((after[-2] / before[-2], after[-1] / before[-1]) for before, after in runs)
    return one if one == other else None


def _thinned(step: Step, value: Value, strides: Pair, mode: str, align: bool | None) -> list[Value]:
    """Lower a resizing to 1 / `strides` of rows and columns."""
    if mode == "area":
        return [step.do("avg_pool2d", value, strides)]
    if mode == "nearest":
        return [step.do("max_pool2d", value, 1, strides)]
    other = mode != "bilinear" or align or step.argument(6, "antialias", False)
    refuse(other, f"shrinks the image by '{mode}'; use nearest, area, or bilinear with align_corners=False")
    above, left = ((stride - 1) // 2 for stride in strides)  # of the one or two pixels in the middle of a window
    value = step.do("pad", value, (-left, -left, -above, -above))
    return [step.do("avg_pool2d", value, tuple(2 - stride % 2 for stride in strides), strides)]


def _shuffle(step: Step) -> list[Value]:
    inverse = step.call.function == "pixel_unshuffle"
    kind, name = (nn.PixelUnshuffle, "downscale_factor") if inverse else (nn.PixelShuffle, "upscale_factor")
    return step.by(kind(step.argument(1, name)), step.full(), "unshuffle" if inverse else "shuffle")


_ADAPTIVE = "adaptive_avg_pool2d adaptive_max_pool2d adaptive_max_pool2d_with_indices"
_REDUCTIONS = "mean sum prod amax amin max min logsumexp norm argmax argmin var std median kthvalue"
WINDOWS: dict[str, Handler] = {
    **dict.fromkeys(_ADAPTIVE.split(), _adaptive),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    "pad": _pad,
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices"), _max_pool),
    "max_unpool2d": _max_unpool,
    "avg_pool2d": _average_pool,
    "interpolate": _interpolate,
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _shuffle),
}
