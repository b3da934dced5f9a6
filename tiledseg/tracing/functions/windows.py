"""Handlers of borders and of pooling: what looks at a window of pixels and has no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from tiledseg.geometry.layers.border import MIRRORED, Border
from tiledseg.geometry.layers.resampling import MaxIndices, MaxUnpool
from tiledseg.models.layers import pooling
from tiledseg.models.layers.pooling import MaxPool
from tiledseg.tracing.functions.pixelwise import pixelwise
from tiledseg.tracing.functions.resizing import ratios
from tiledseg.tracing.functions.views import add_borders
from tiledseg.tracing.functions.whole_image import image_max, image_mean
from tiledseg.tracing.lowering import ONE_PIXEL, RefusalError, Step, Value

Handler = Callable[[Step], list[Value]]
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
    module = MaxPool(**_without_ceil(options))
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
    return step.lowering.add(step, "indices", layer, pooling.MaxIndices(kernel, stride, padding, dilation), (value,))


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
        step.made(step.lowering.add(step, "unpool", MaxUnpool(kernel), pooling.MaxUnpool(kernel), (value, indices)))
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
