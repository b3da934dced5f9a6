"""Handlers of functions that look at more than one pixel: windows, resizing, borders, and the whole image."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tiledseg.geometry.border import MIRRORED, Border
from tiledseg.geometry.joins import ImageMean
from tiledseg.geometry.resampling import MaxIndices, MaxUnpool
from tiledseg.models import pooling
from tiledseg.models.aligned import AlignedUpsample
from tiledseg.models.mean import WholeImageMean
from tiledseg.models.norm import InstanceNorm
from tiledseg.models.pixelwise import ComputedConvolution
from tiledseg.models.upsample import Upsample
from tiledseg.tracing.layouts import PIXELS
from tiledseg.tracing.lowering import (
    ONE_PIXEL,
    RefusalError,
    Step,
    Value,
    channel_dims,
    formula,
    pixelwise,
    shared,
    without,
)
from tiledseg.tracing.record import Given
from tiledseg.tracing.views import add_border, add_borders

Handler = Callable[[Step], list[Value]]
Pair = tuple[int, int]


def _interpolate(step: Step) -> list[Value]:
    value = step.full()
    ratios = _ratios(step, value)
    mode, align = step.argument(3, "mode", "nearest"), step.argument(4, "align_corners")
    if value.layout.one_pixel:
        return [step.made(value.node)]
    if ratios == (1.0, 1.0):
        return [step.made(value.node)]
    sizes = f"{value.shape[2]} x {value.shape[3]} to {step.call.shapes[0][2]} x {step.call.shapes[0][3]} pixels"
    if ratios is None:
        raise RefusalError(
            f"resizes {sizes}, by another factor at another size; give a scale_factor, or another node's size"
        )
    if all(ratio >= 1 and ratio == int(ratio) for ratio in ratios):
        if mode == "bilinear" and align:
            return [step.made(_aligned(step, value, (int(ratios[0]), int(ratios[1]))))]
        return [step.made(step.lowering.add_module(step, _upsampling(step, ratios, mode, align), value, "interpolate"))]
    if all(ratio <= 1 and 1 / ratio == int(1 / ratio) for ratio in ratios):
        return [step.made(_thinned(step, value, (int(1 / ratios[0]), int(1 / ratios[1])), mode, align))]
    raise RefusalError(f"resizes {sizes}; only whole factors fall on the edges of tiles: let the sizes be multiples")


def _ratios(step: Step, value: Value) -> tuple[float, float] | None:
    """How many times as large it becomes; None where that depends on the size."""
    found = [
        tuple(after / before for before, after in zip(one[2:], other[2:], strict=True))
        for one, other in ((value.shape, step.call.shapes[0]), (value.other_shape, step.other.shapes[0]))
    ]
    return (found[0][0], found[0][1]) if found[0] == found[1] else None


def _aligned(step: Step, value: Value, factors: Pair) -> str:
    module = AlignedUpsample(factors)
    rows, cols = module.description, module.column_description
    return step.lowering.add(step, "interpolate", rows, module, (value,), cols=None if rows == cols else cols)


def _upsampling(step: Step, ratios: tuple[float, float], mode: str, align: bool | None) -> nn.Module:
    factors = int(ratios[0]), int(ratios[1])
    if factors[0] == factors[1] and mode in ("nearest", "bilinear"):
        return Upsample(scale_factor=factors[0], mode=mode, align_corners=align)
    return nn.Upsample(scale_factor=tuple(map(float, factors)), mode=mode, align_corners=align)


def _thinned(step: Step, value: Value, strides: Pair, mode: str, align: bool | None) -> str:
    """Downsampling by whole factors: means, or every so manyth pixel."""
    if mode == "area":
        return step.lowering.add_module(step, nn.AvgPool2d(strides), value, "interpolate")
    if mode == "nearest":
        return step.lowering.add_module(step, nn.MaxPool2d(1, strides), value, "interpolate")
    if mode != "bilinear" or align or step.argument(6, "antialias", False):
        raise RefusalError(f"makes it smaller by '{mode}'; use nearest, area, or bilinear with align_corners=False")
    for dim, stride in zip((2, 3), strides, strict=True):  # the one or two pixels about the middle of each window
        before = (stride - 1) // 2
        value = add_border(step, value, dim, -before, -((stride - 1) // 2)) if before else value
    row, col = (1 if stride % 2 else 2 for stride in strides)
    return step.lowering.add_module(step, nn.AvgPool2d((row, col), strides), value, "interpolate")


def _adaptive_average(step: Step) -> list[Value]:
    value = step.full()
    ratios = _ratios(step, value)
    after = step.call.shapes[0][2:]
    if ratios == (1.0, 1.0):
        return [step.made(value.node, value.layout)]
    if after == (1, 1):
        return [step.made(_mean(step, value), ONE_PIXEL)]
    if ratios is not None and all(1 / ratio == int(1 / ratio) for ratio in ratios):
        strides = int(1 / ratios[0]), int(1 / ratios[1])
        return [step.made(step.lowering.add_module(step, nn.AvgPool2d(strides), value, "pool"))]
    raise RefusalError(
        f"makes {after[0]} x {after[1]} means of the whole image, whatever its size; take its single mean, or a "
        "pooling of fixed windows"
    )


def _adaptive_max(step: Step) -> list[Value]:
    value = step.full()
    if _ratios(step, value) == (1.0, 1.0):
        return [step.made(value.node, value.layout)]
    raise RefusalError("takes maxima over the whole image, which no rank knows alone; take its mean, or fixed windows")


def _mean(step: Step, value: Value) -> str | None:
    if value.layout.one_pixel:
        return value.node
    return step.lowering.add(step, "mean", ImageMean(), WholeImageMean(), (value,))


def _reduce(step: Step) -> list[Value]:
    """Over channels by single pixels; a mean over all pixels is the image's."""
    value = step.value()
    name = step.call.function
    dims = step.argument(1 if name != "norm" else 2, "dim")
    keep = bool(step.argument(2 if name != "norm" else 3, "keepdim", False))
    numbers = _numbers(value, dims)
    names = tuple(sorted(atom for number in numbers for atom in value.layout.dims[number]))
    if names == PIXELS and not value.layout.one_pixel:
        if name != "mean":
            raise RefusalError(f"takes the {name} over the whole image; only its mean is summed over ranks")
        left = tuple(
            () if at in numbers else dim for at, dim in enumerate(value.layout.dims) if keep or at not in numbers
        )
        return [step.made(_mean(step, value), replace(value.layout, dims=left, one_pixel=True))]
    if value.layout.one_pixel and set(names) <= set(PIXELS):
        left = tuple(dim for at, dim in enumerate(value.layout.dims) if keep or at not in numbers)
        return [step.made(value.node, replace(value.layout, dims=left))]
    channel_dims(value, numbers)
    step.check_same()
    arguments = [step.argument(index, "") for index in range(len(step.call.arguments))]
    keywords = {key: step.argument(len(arguments), key) for key in step.call.keywords}
    return pixelwise(step, step.as_called(name), arguments, keywords, without(value.layout, numbers, keep))


def _numbers(value: Value, dims: Any) -> tuple[int, ...]:
    count = len(value.layout.dims)
    if dims is None:
        raise RefusalError("reduces all dims; say which")
    return tuple(sorted(dim % count for dim in (dims if isinstance(dims, tuple) else (dims,))))


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
    for dim, (before, after) in zip((3, 2), zip(pads[::2], pads[1::2], strict=True), strict=False):
        value = add_border(step, value, dim, before, after, float(fill)) if before or after else value
    return [step.made(value.node)]


WHY_NOT = {"circular": "with the image's other end, which no tile has"}


def mirrored(step: Step, value: Value, pads: Sequence[int], mode: str) -> Value:
    """Padded by (left, right, top, bottom) with what lies beside the image's ends."""
    left, right, top, bottom = (*pads, 0, 0)[:4]
    return add_borders(step, value, Border(top, bottom, 0.0, mode), Border(left, right, 0.0, mode))


def mirroring(step: Step, module: nn.Conv2d, value: Value) -> tuple[nn.Conv2d, Value]:
    """A convolution that pads in a mode, as one with its weights that does not, and what it then takes."""
    if module.padding_mode not in MIRRORED:
        raise RefusalError(f"pads {WHY_NOT[module.padding_mode]}; let padding_mode be reflect, replicate or zeros")
    again = copy.copy(module)
    again.padding, again.padding_mode = (0, 0), "zeros"
    return again, mirrored(step, value, module._reversed_padding_repeated_twice, module.padding_mode)


def _max_pool(step: Step) -> list[Value]:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    defaults: tuple[Any, ...] = (None, None, 0, 1, False)
    options = {
        name: step.argument(at + 1, name, default)
        for at, (name, default) in enumerate(zip(names, defaults, strict=True))
    }
    options["stride"] = options["stride"] or options["kernel_size"]
    value = step.full()
    module = nn.MaxPool2d(**_without_ceil(options))
    pooled = step.made(step.lowering.add_module(step, module, value, "pool"))
    if len(step.call.shapes) == 1:
        return [pooled]
    return [pooled, step.made(_indices(step, value, module), part=1)]


def _without_ceil(options: dict[str, Any]) -> dict[str, Any]:
    """Windows that touch end where the image does, at sizes that are multiples of them: there is nothing to ceil."""
    touches = _pair(options["kernel_size"]) == _pair(options["stride"]) and not any(_pair(options["padding"]))
    return {**options, "ceil_mode": options["ceil_mode"] and not touches}


def _pair(value: int | Sequence[int]) -> Pair:
    pair = (value,) * 2 if isinstance(value, int) else tuple(value) * (2 // len(value))
    return pair[0], pair[1]


def _indices(step: Step, value: Value, module: nn.MaxPool2d) -> str:
    sizes = [getattr(module, name) for name in ("kernel_size", "stride", "padding", "dilation")]
    single = {size if isinstance(size, int) else size[0] for size in sizes[:1]}
    if any(not isinstance(size, int) and size[0] != size[1] for size in sizes) or not single:
        raise RefusalError("gives indices of windows that are no squares; use squares")
    kernel, stride, padding, dilation = (size if isinstance(size, int) else size[0] for size in sizes)
    layer = MaxIndices(kernel, stride, padding, dilation)
    return step.lowering.add(step, "indices", layer, pooling.MaxIndices(kernel, stride, padding, dilation), (value,))


def _max_unpool(step: Step) -> list[Value]:
    value, indices = step.full(), step.full(1, "indices")
    kernel = step.argument(2, "kernel_size")
    kernel = kernel[0] if isinstance(kernel, tuple) else kernel
    if _ratios(step, value) != (float(kernel), float(kernel)):
        raise RefusalError("unpools windows that overlap, or to a size that is no multiple; use windows that touch")
    made = next((node for node in step.lowering.nodes if node.name == indices.node), None)
    if made is None or made.layer != MaxIndices(kernel, kernel, 0, 1):
        raise RefusalError("unpools by indices of other windows than its own; pool and unpool by the same kernel")
    return [
        step.made(step.lowering.add(step, "unpool", MaxUnpool(kernel), pooling.MaxUnpool(kernel), (value, indices)))
    ]


def _average_pool(step: Step) -> list[Value]:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    defaults: tuple[Any, ...] = (None, None, 0, False, True, None)
    options = {
        name: step.argument(at + 1, name, default)
        for at, (name, default) in enumerate(zip(names, defaults, strict=True))
    }
    options["stride"] = options["stride"] or options["kernel_size"]
    return [step.made(step.lowering.add_module(step, nn.AvgPool2d(**_without_ceil(options)), step.full(), "pool"))]


def _convolution(step: Step) -> list[Value]:
    """A convolution by the weights of some module, as one of our own that shares them."""
    return _weighted(step, nn.Conv2d, ("stride", "padding", "dilation", "groups"), (1, 0, 1, 1))


def _transposed(step: Step) -> list[Value]:
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    return _weighted(step, nn.ConvTranspose2d, names, (1, 0, 0, 1, 1))


def _weighted(step: Step, kind: Any, names: tuple[str, ...], defaults: tuple[Any, ...]) -> list[Value]:
    value = step.full()
    weight, bias = step.argument(1, "weight"), step.argument(2, "bias")
    if isinstance(weight, Value) or isinstance(bias, Value):
        raise RefusalError("takes weights that depend on the input, which differ from tile to tile; learn them")
    computed = [given for given in (weight, bias) if given is not None and given.name is None]
    options = {
        name: step.argument(at + 3, name, default)
        for at, (name, default) in enumerate(zip(names, defaults, strict=True))
    }
    groups = options["groups"]
    out, inner = weight.tensor.shape[:2]
    channels = (inner * groups, out) if kind is nn.Conv2d else (out, inner * groups)
    module = kind(*channels, tuple(weight.tensor.shape[2:]), bias=bias is not None, device="meta", **options)
    if computed:
        return [
            step.made(step.lowering.add_module(step, _computing(module, weight, bias), value, "conv"), value.layout)
        ]
    _share(module, "weight", weight)
    if bias is not None:
        _share(module, "bias", bias)
    return [step.made(step.lowering.add_module(step, module, value, "conv"), value.layout)]


def _computing(module: nn.Module, weight: Given, bias: Given | None) -> nn.Module:
    """The convolution by weights that are computed."""
    if not isinstance(module, nn.Conv2d):
        raise RefusalError("takes weights that are computed; keep them as parameters of the module")
    weights: list[Given] = []
    formulas = formula(weight, weights), None if bias is None else formula(bias, weights)
    return ComputedConvolution.of(module, *formulas, shared(weights))


def _share(module: nn.Module, name: str, given: Given) -> None:
    if isinstance(given.tensor, nn.Parameter):
        setattr(module, name, given.tensor)
    else:
        delattr(module, name)
        module.register_buffer(name, given.tensor)


def _pixel_shuffle(step: Step) -> list[Value]:
    module = nn.PixelShuffle(step.argument(1, "upscale_factor"))
    return [step.made(step.lowering.add_module(step, module, step.full(), "shuffle"))]


def right(module: nn.Module) -> nn.Module:
    """The module; of torch's instance norm one with its weights whose gradients are right.

    torch 2.13's, on a CPU, are not for one image whose gradient comes channels last: they read it in the wrong order.
    """
    if type(module) is not nn.InstanceNorm2d:
        return module
    again = copy.copy(module)
    again.__class__ = InstanceNorm
    return again


def _instance_norm(step: Step) -> list[Value]:
    value, weight, bias = step.full(), step.argument(3, "weight"), step.argument(4, "bias")
    if step.argument(1, "running_mean") is not None:
        raise RefusalError("keeps running statistics of instances; leave them away")
    module = InstanceNorm(value.shape[1], step.argument(7, "eps", 1e-5), affine=weight is not None)
    if weight is not None:
        _share(module, "weight", weight)
        _share(module, "bias", bias)
    return [step.made(step.lowering.add_module(step, module, value, "norm"), value.layout)]


def _group_norm(step: Step) -> list[Value]:
    value, groups = step.full(), step.argument(1, "num_groups")
    weight, bias = step.argument(2, "weight"), step.argument(3, "bias")
    module = nn.GroupNorm(groups, value.shape[1], step.argument(4, "eps", 1e-5), affine=weight is not None)
    if weight is not None:
        _share(module, "weight", weight)
        _share(module, "bias", bias)
    return [step.made(step.lowering.add_module(step, module, value, "norm"), value.layout)]


SPACES: dict[str, Handler] = {
    "interpolate": _interpolate,
    "adaptive_avg_pool2d": _adaptive_average,
    "adaptive_max_pool2d": _adaptive_max,
    "pad": _pad,
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices"), _max_pool),
    "max_unpool2d": _max_unpool,
    "avg_pool2d": _average_pool,
    "conv2d": _convolution,
    "conv_transpose2d": _transposed,
    "pixel_shuffle": _pixel_shuffle,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    **dict.fromkeys(
        ("mean", *["sum", "prod", "amax", "amin", "max", "min", "logsumexp", "norm", "argmax", "argmin", "var", "std"]),
        _reduce,
    ),
}
