"""Handlers of resizing: by whole factors, to the size of another tensor, and of pixels that become channels."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tiledseg.models.layers.aligned import AlignedUpsample
from tiledseg.models.layers.pooling import MaxPool
from tiledseg.models.layers.upsample import Upsample
from tiledseg.tracing.functions.pyramids import resized_branch
from tiledseg.tracing.functions.views import add_border
from tiledseg.tracing.lowering import RefusalError, Step, Value

Handler = Callable[[Step], list[Value]]
Pair = tuple[int, int]


def _interpolate(step: Step) -> list[Value]:
    value = step.full()
    found = ratios(step, value)
    mode, align = step.argument(3, "mode", "nearest"), step.argument(4, "align_corners")
    if value.node in step.lowering.pooled and not value.layout.one_pixel:
        return [step.made(resized_branch(step, value, mode, bool(align)))]
    if value.layout.one_pixel:
        return [step.made(value.node)]
    if found == (1.0, 1.0):
        return [step.made(value.node)]
    sizes = f"{value.shape[2]} x {value.shape[3]} to {step.call.shapes[0][2]} x {step.call.shapes[0][3]} pixels"
    if found is None:
        raise RefusalError(
            f"resizes {sizes}, by another factor at another size; give a scale_factor, or another node's size"
        )
    if all(ratio >= 1 and ratio == int(ratio) for ratio in found):
        if align and mode == "bicubic":
            raise RefusalError("resizes by bicubic with align_corners=True; take bilinear, or align_corners=False")
        if mode == "bilinear" and align:
            return [step.made(aligned(step, value, (int(found[0]), int(found[1]))))]
        module = Upsample(scale_factor=(int(found[0]), int(found[1])), mode=mode, align_corners=align)
        return [step.made(step.lowering.add_module(step, module, value, "interpolate"))]
    if all(ratio <= 1 and 1 / ratio == int(1 / ratio) for ratio in found):
        return [step.made(_thinned(step, value, (int(1 / found[0]), int(1 / found[1])), mode, align))]
    raise RefusalError(f"resizes {sizes}; only whole factors fall on the edges of tiles: let the sizes be multiples")


def ratios(step: Step, value: Value) -> tuple[float, float] | None:
    """How many times as large it becomes; None where that depends on the size."""
    found = [
        tuple(after / before for before, after in zip(one[2:], other[2:], strict=True))
        for one, other in ((value.shape, step.call.shapes[0]), (value.other_shape, step.other.shapes[0]))
    ]
    return (found[0][0], found[0][1]) if found[0] == found[1] else None


def aligned(step: Step, value: Value, factors: Pair) -> str:
    module = AlignedUpsample(factors)
    rows, cols = module.description, module.column_description
    return step.lowering.add(step, "interpolate", rows, module, (value,), cols=None if rows == cols else cols)


def _thinned(step: Step, value: Value, strides: Pair, mode: str, align: bool | None) -> str:
    """Downsampling by whole factors: means, or every so manyth pixel."""
    if mode == "area":
        return step.lowering.add_module(step, nn.AvgPool2d(strides), value, "interpolate")
    if mode == "nearest":
        return step.lowering.add_module(step, MaxPool(1, strides), value, "interpolate")
    if mode != "bilinear" or align or step.argument(6, "antialias", False):
        raise RefusalError(f"makes it smaller by '{mode}'; use nearest, area, or bilinear with align_corners=False")
    for dim, stride in zip((2, 3), strides, strict=True):  # the one or two pixels about the middle of each window
        before = (stride - 1) // 2
        value = add_border(step, value, dim, -before, -((stride - 1) // 2)) if before else value
    row, col = (1 if stride % 2 else 2 for stride in strides)
    return step.lowering.add_module(step, nn.AvgPool2d((row, col), strides), value, "interpolate")


def _pixel_shuffle(step: Step) -> list[Value]:
    module = nn.PixelShuffle(step.argument(1, "upscale_factor"))
    return [step.made(step.lowering.add_module(step, module, step.full(), "shuffle"))]


def _pixel_unshuffle(step: Step) -> list[Value]:
    module = nn.PixelUnshuffle(step.argument(1, "downscale_factor"))
    return [step.made(step.lowering.add_module(step, module, step.full(), "unshuffle"))]


RESIZING: dict[str, Handler] = {
    "interpolate": _interpolate,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
}
