"""Handlers of what is taken over all pixels of an image: means, sums and maxima, which ranks tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from tiledseg.geometry.layers.joins import ImageMax, ImageMean
from tiledseg.geometry.layers.pixelwise import Layout
from tiledseg.models.layers.maximum import WholeImageMax
from tiledseg.models.layers.mean import WholeImageMean
from tiledseg.tracing.functions.layouts import PIXELS
from tiledseg.tracing.functions.pixelwise import channel_dims, pixelwise, without
from tiledseg.tracing.functions.pyramids import pooled
from tiledseg.tracing.functions.resizing import ratios as ratios_of
from tiledseg.tracing.lowering import ONE_PIXEL, RefusalError, Step, Value

Handler = Callable[[Step], list[Value]]
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
    arguments = [step.argument(index, "") for index in range(len(step.call.arguments))]
    keywords = {key: step.argument(len(arguments), key) for key in step.call.keywords}
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
