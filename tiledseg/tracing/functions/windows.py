"""Handlers of borders, of pooling over windows, and of what is taken over all pixels of an image: means, sums and
maxima, which ranks tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tiledseg.geometry.layers.border import MIRRORED, Border
from tiledseg.geometry.layers.joins import ImageMax, ImageMean
from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.geometry.layers.resampling import MaxIndices, MaxUnpool
from tiledseg.models.layers import pooling
from tiledseg.models.layers.pooling import MaxPoolModule
from tiledseg.models.layers.whole_image import WholeImageMax, WholeImageMean
from tiledseg.tracing.functions.pixelwise import PIXELS, channel_dims, pixelwise, without
from tiledseg.tracing.functions.resizing import pooled, ratios
from tiledseg.tracing.functions.resizing import ratios as ratios_of
from tiledseg.tracing.functions.views import add_borders
from tiledseg.tracing.lowering import ONE_PIXEL, Handler, RefusalError, Step, Value

LEAST = 1e-30  # a sum of squares


def _adaptive_average(step: Step) -> list[Value]:
    value = step.full()
    ratios = ratios_of(step, value)
    after = step.call.shapes[0][2:]
    if ratios == (1.0, 1.0):
        return [step.made(value.node, value.layout)]
    if after == (1, 1):
        return [step.made(image_mean(step, value), ONE_PIXEL)]
    if ratios is not None and all(1 / ratio == int(1 / ratio) for ratio in ratios):
        strides = int(1 / ratios[0]), int(1 / ratios[1])
        return [step.made(step.lowering.add_module(step, nn.AvgPool2d(strides), value, "pool"))]
    if after == step.other.shapes[0][2:]:
        return [step.made(pooled(step, value))]
    raise RefusalError(
        f"makes {after[0]} x {after[1]} means of the image, numbers that depend on its size; take its single mean, or "
        "a pooling of fixed windows"
    )


def _adaptive_max(step: Step) -> list[Value]:
    value = step.full()
    if ratios_of(step, value) == (1.0, 1.0):
        return [step.made(value.node, value.layout)]
    if step.call.shapes[0][2:] == (1, 1):
        return image_max(step, value, ONE_PIXEL, even=False)
    after = step.call.shapes[0][2:]
    raise RefusalError(
        f"makes {after[0]} x {after[1]} maxima of the whole image, whatever its size; take its single maximum, or a "
        "pooling of fixed windows"
    )


def image_max(step: Step, value: Value, layout: Layout, even: bool) -> list[Value]:
    """The places of maxima, where they are asked for too, nobody knows: what is computed from them is refused."""
    node = value.node
    if not value.layout.one_pixel:
        node = step.lowering.add(step, "maximum", ImageMax(even), WholeImageMax(even), (value,))
    return [step.made(node, layout), *(step.made(None, part=part) for part in range(1, len(step.call.shapes)))]


def image_mean(step: Step, value: Value, total: bool = False) -> str | None:
    if value.layout.one_pixel:
        return value.node
    return step.lowering.add(step, "sum" if total else "mean", ImageMean(total), WholeImageMean(total), (value,))


def _reduce(step: Step) -> list[Value]:
    """Over channels by single pixels; a mean over all pixels is the image's."""
    value = step.value()
    name = step.call.function
    dims = step.argument(1 if name != "norm" else 2, "dim")
    keep = bool(step.argument(2 if name != "norm" else 3, "keepdim", False))
    numbers = _numbers(value, dims)
    names = tuple(sorted(atom for number in numbers for atom in value.layout.dims[number]))
    if names == PIXELS and value.node in step.lowering.truths:
        raise RefusalError(f"takes the {name} of truths or whole numbers; convert them before, as by .to(x.dtype)")
    if names == PIXELS and not value.layout.one_pixel:
        left = tuple(
            () if at in numbers else dim for at, dim in enumerate(value.layout.dims) if keep or at not in numbers
        )
        if name in ("amax", "max"):
            return image_max(step, value, replace(value.layout, dims=left, one_pixel=True), even=name == "amax")
        return _summed(step, value, name, replace(value.layout, dims=left, one_pixel=True))
    if value.layout.one_pixel and set(names) <= set(PIXELS):
        left = tuple(dim for at, dim in enumerate(value.layout.dims) if keep or at not in numbers)
        return [step.made(value.node, replace(value.layout, dims=left))]
    channel_dims(value, numbers)
    step.check_same()
    arguments, keywords = step.given()
    return pixelwise(step, step.as_called(name), arguments, keywords, without(value.layout, numbers, keep))


def _summed(step: Step, value: Value, name: str, layout: Layout) -> list[Value]:
    """A mean or a sum over the image, or the root of the sum of squares."""
    euclid = name == "norm" and step.argument(1, "p", "fro") in ("fro", 2, 2.0)
    if name not in ("mean", "sum") and not euclid:
        raise RefusalError(
            f"takes the {name} over the whole image, of which ranks tell each other means, sums and maxima alone; take "
            "one of these"
        )
    if not euclid:
        return [step.made(image_mean(step, value, total=name == "sum"), layout)]
    one = step.giving(value.shape, value.other_shape)
    (squares,) = pixelwise(one, "square", (value,), {}, value.layout)
    total = replace(value, node=image_mean(step, squares, total=True), layout=ONE_PIXEL)
    (least,) = pixelwise(one, "clamp_min", (total, LEAST), {}, ONE_PIXEL)  # without a gradient where all are zeros
    (over,) = pixelwise(one, "rsqrt", (least,), {}, ONE_PIXEL)
    (root,) = pixelwise(one, "mul", (total, over), {}, ONE_PIXEL)
    return [step.made(root.node, layout)]


def _numbers(value: Value, dims: Any) -> tuple[int, ...]:
    count = len(value.layout.dims)
    if dims is None:
        raise RefusalError("reduces all dims, images too; say which")
    return tuple(sorted(dim % count for dim in (dims if isinstance(dims, tuple) else (dims,))))


WHOLE_IMAGE: dict[str, Handler] = {
    "adaptive_avg_pool2d": _adaptive_average,
    **dict.fromkeys(("adaptive_max_pool2d", "adaptive_max_pool2d_with_indices"), _adaptive_max),
    **dict.fromkeys(
        ("mean", *["sum", "prod", "amax", "amin", "max", "min", "logsumexp", "norm", "argmax", "argmin", "var", "std"]),
        _reduce,
    ),
}


Pair = tuple[int, int]


def _pad(step: Step) -> list[Value]:
    value = step.full()
    (pads, others), mode = step.arguments(1, "pad"), step.argument(2, "mode", "constant")
    fill = step.argument(3, "value") or 0.0
    if not any(pads) and not any(others):
        return [step.made(value.node, value.layout)]
    if tuple(pads) != tuple(others):
        raise RefusalError(f"pads by {pads} at one size and {others} at another; pad by fixed numbers")
    if mode in MIRRORED and len(pads) <= 4 and min(pads) >= 0 and not value.layout.one_pixel:
        return [step.made(mirrored(step, value, tuple(pads), mode).node)]
    if mode != "constant" and max(pads) > 0:
        raise RefusalError(f"pads {WHY_NOT.get(mode, f'by mode {mode}')}; pad by reflect, replicate, or with zeros")
    if not any((*pads[:4], *pads[6:])) and mode == "constant" and not value.layout.one_pixel:
        return pixelwise(step, "pad", (value, tuple(pads)), {"value": float(fill)})
    if any(pads[4:]) or value.layout.one_pixel:
        raise RefusalError("pads other dims than rows and columns; pad these alone")
    left, right, top, bottom = (*pads, 0, 0)[:4]
    rows, cols = Border(top, bottom, float(fill)), Border(left, right, float(fill))
    return [step.made(add_borders(step, value, rows, cols).node)]


WHY_NOT = {"circular": "with the image's other end, which no tile has"}


def mirrored(step: Step, value: Value, pads: Sequence[int], mode: str) -> Value:
    """Padded by (left, right, top, bottom) with what lies beside the image's ends."""
    left, right, top, bottom = (*pads, 0, 0)[:4]
    return add_borders(step, value, Border(top, bottom, 0.0, mode), Border(left, right, 0.0, mode))


def _sees_all(step: Step, value: Value) -> bool:
    """Whether a pooling's only window is the whole image, whatever its size."""
    shapes = value.shape[2:], value.other_shape[2:]
    kernels = (pair(kernel) for kernel in step.arguments(1, "kernel_size"))
    paddings = (pair(padding) for padding in step.arguments(3, "padding", 0))
    return tuple(kernels) == shapes and shapes[0] != shapes[1] and not any(map(any, paddings))


def _max_pool(step: Step) -> list[Value]:
    value = step.full()
    if _sees_all(step, value):
        return image_max(step, value, ONE_PIXEL, even=False)
    options = step.options(1, kernel_size=None, stride=None, padding=0, dilation=1, ceil_mode=False)
    options["stride"] = options["stride"] or options["kernel_size"]
    module = MaxPoolModule(**_without_ceil(options))
    pooled = step.made(step.lowering.add_module(step, module, value, "pool"))
    if len(step.call.shapes) == 1:
        return [pooled]
    return [pooled, step.made(_indices(step, value, module), part=1)]


def _without_ceil(options: dict[str, Any]) -> dict[str, Any]:
    """Windows that touch end where the image does, at sizes that are multiples of them: there is nothing to ceil."""
    touches = pair(options["kernel_size"]) == pair(options["stride"]) and not any(pair(options["padding"]))
    return {**options, "ceil_mode": options["ceil_mode"] and not touches}


def pair(value: int | Sequence[int]) -> Pair:
    pair = (value,) * 2 if isinstance(value, int) else tuple(value) * (2 // len(value))
    return pair[0], pair[1]


def _indices(step: Step, value: Value, module: nn.MaxPool2d) -> str:
    sizes = [pair(getattr(module, name)) for name in ("kernel_size", "stride", "padding", "dilation")]
    if any(row != col for row, col in sizes):
        raise RefusalError("gives indices of windows that are no squares; use squares")
    kernel, stride, padding, dilation = (row for row, _ in sizes)
    layer = MaxIndices(kernel, stride, padding, dilation)
    return step.lowering.add(
        step, "indices", layer, pooling.MaxIndicesModule(kernel, stride, padding, dilation), (value,)
    )


def _max_unpool(step: Step) -> list[Value]:
    value, indices = step.full(), step.full(1, "indices")
    kernel = step.argument(2, "kernel_size")
    kernel = kernel[0] if isinstance(kernel, tuple) else kernel
    if ratios(step, value) != (float(kernel), float(kernel)):
        raise RefusalError("unpools windows that overlap, or to a size that is no multiple; use windows that touch")
    made = next((node for node in step.lowering.nodes if node.name == indices.node), None)
    if made is None or made.layer != MaxIndices(kernel, kernel, 0, 1):
        raise RefusalError("unpools by indices of other windows than its own; pool and unpool by the same kernel")
    return [
        step.made(
            step.lowering.add(step, "unpool", MaxUnpool(kernel), pooling.MaxUnpoolModule(kernel), (value, indices))
        )
    ]


def _average_pool(step: Step) -> list[Value]:
    value = step.full()
    if _sees_all(step, value) and step.argument(6, "divisor_override") is None:
        return [step.made(image_mean(step, value), ONE_PIXEL)]
    known = {"kernel_size": None, "stride": None, "padding": 0, "ceil_mode": False}
    options = step.options(1, **known, count_include_pad=True, divisor_override=None)
    options["stride"] = options["stride"] or options["kernel_size"]
    return [step.made(step.lowering.add_module(step, nn.AvgPool2d(**_without_ceil(options)), value, "pool"))]


WINDOWS: dict[str, Handler] = {
    "pad": _pad,
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices"), _max_pool),
    "max_unpool2d": _max_unpool,
    "avg_pool2d": _average_pool,
}
