"""Handlers of resizing: by whole factors, to the size of another tensor, and of pixels that become channels.

Means of parts of the whole image, and what is computed of them until they have its size again, are one node."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.pixelwise import Mark
from tiledseg.geometry.pyramid import PooledBranch
from tiledseg.models import pyramid
from tiledseg.models.layers.pooling import MaxPoolModule
from tiledseg.models.layers.upsample import AlignedUpsampleModule, UpsampleModule
from tiledseg.tracing.functions.views import add_border
from tiledseg.tracing.lowering import Handler, RefusalError, Step, Value, writing

Pair = tuple[int, int]


def pooled(step: Step, value: Value) -> list[Value]:
    """Add a node for means of parts of the image, which no graph has: it stands for the input of the branch."""
    (made,) = step.node("means", Mark(), nn.Identity(), (value,))
    assert made.node is not None, "it is new"
    if made.node in step.lowering.pooled:
        raise RefusalError("takes means of parts of such means; take them of the image")
    step.lowering.pooled[made.node] = made.node
    return [made]


def _resized_branch(step: Step, value: Value, mode: str, aligned: bool) -> list[Value]:
    """Add the node of a whole branch: the means that it begins with, what is computed of them, and the resizing."""
    if mode != "bilinear":
        raise RefusalError(f"resizes means of parts of the image by '{mode}'; take bilinear")
    lowering = step.lowering
    assert value.node is not None, "it has been looked at"
    root = next(node for node in lowering.nodes if node.name == lowering.pooled[value.node])
    source, needed, inside = root.inputs[0], {value.node}, list[Node]()
    for node in reversed(lowering.nodes):
        if node.name in needed and node.name != root.name:
            needed.update(node.inputs)
            inputs = tuple(INPUT if name == root.name else name for name in node.inputs)
            inside.insert(0, replace(node, inputs=inputs))
    modules = [writing(lowering.modules[node.name], False) for node in inside] or [nn.Identity()]
    inside = inside or [replace(root, inputs=(INPUT,))]
    factors, bins = _factors(step, lowering.pixels[source]), lowering.pixels[root.name][0]
    inner = Graph(tuple(inside), (inside[-1].name if value.node == root.name else value.node,))
    rows, cols = (PooledBranch(n, bins[0] * bins[1], inner, aligned, f) for n, f in zip(bins, factors, strict=True))
    branch = pyramid.PooledBranchModule(rows, cols, modules)
    return step.node("pyramid", rows, branch, (Value(source, value.layout, (), ()),), cols=cols)


def _factors(step: Step, sizes: tuple[Pair, ...]) -> Pair:
    made = step.call.shapes[0][2:], step.other.shapes[0][2:]
    factors = {
        tuple(after / before for after, before in zip(*run, strict=True)) for run in zip(made, sizes, strict=True)
    }
    if len(factors) > 1 or any(factor != int(factor) for pair in factors for factor in pair):
        raise RefusalError("resizes means of parts of the image to no multiple of its size there; let it be one")
    row, col = factors.pop()
    return int(row), int(col)


def _interpolate(step: Step) -> list[Value]:
    value = step.full()
    mode, align = step.argument(3, "mode", "nearest"), step.argument(4, "align_corners")
    if value.node in step.lowering.pooled and not value.layout.one_pixel:
        return _resized_branch(step, value, mode, bool(align))
    factors = ratios(step, value)
    if value.layout.one_pixel or factors == (1.0, 1.0):
        return [step.made(value.node)]
    sizes = f"{value.shape[2]} x {value.shape[3]} to {step.call.shapes[0][2]} x {step.call.shapes[0][3]} pixels"
    if factors is None:
        raise RefusalError(
            f"resizes {sizes}, by another factor at another size; give a scale_factor, or another node's size"
        )
    if all(ratio >= 1 and ratio == int(ratio) for ratio in factors):
        whole = int(factors[0]), int(factors[1])
        if align and mode == "bicubic":
            raise RefusalError("resizes by bicubic with align_corners=True; take bilinear, or align_corners=False")
        if align and mode == "bilinear":
            module = AlignedUpsampleModule(whole)
            return step.node("interpolate", module.rows, module, (value,), cols=module.cols)
        return step.by(UpsampleModule(scale_factor=whole, mode=mode, align_corners=align), value, "interpolate")
    if all(ratio <= 1 and 1 / ratio == int(1 / ratio) for ratio in factors):
        return _thinned(step, value, (int(1 / factors[0]), int(1 / factors[1])), mode, align)
    raise RefusalError(f"resizes {sizes}; only whole factors fall on the edges of tiles: let the sizes be multiples")


def ratios(step: Step, value: Value) -> tuple[float, float] | None:
    """Return how many times as large it becomes; None where that depends on the size."""
    one, other = (
        (after[2] / before[2], after[3] / before[3])
        for before, after in ((value.shape, step.call.shapes[0]), (value.other_shape, step.other.shapes[0]))
    )
    return one if one == other else None


def _thinned(step: Step, value: Value, strides: Pair, mode: str, align: bool | None) -> list[Value]:
    """Downsample by whole factors: means, or every so manyth pixel."""
    if mode == "area":
        return step.by(nn.AvgPool2d(strides), value, "interpolate")
    if mode == "nearest":
        return step.by(MaxPoolModule(1, strides), value, "interpolate")
    if mode != "bilinear" or align or step.argument(6, "antialias", False):
        raise RefusalError(f"makes it smaller by '{mode}'; use nearest, area, or bilinear with align_corners=False")
    for dim, stride in zip((2, 3), strides, strict=True):  # the one or two pixels about the middle of each window
        before = (stride - 1) // 2
        value = add_border(step, value, dim, -before, -before) if before else value
    row, col = (1 if stride % 2 else 2 for stride in strides)
    return step.by(nn.AvgPool2d((row, col), strides), value, "interpolate")


RESIZING: dict[str, Handler] = {
    "interpolate": _interpolate,
    "pixel_shuffle": lambda step: step.by(nn.PixelShuffle(step.argument(1, "upscale_factor")), step.full(), "shuffle"),
    "pixel_unshuffle": lambda step: step.by(
        nn.PixelUnshuffle(step.argument(1, "downscale_factor")), step.full(), "unshuffle"
    ),
}
