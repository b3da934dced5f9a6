"""Handlers of resizing: by whole factors, to the size of another tensor, and of pixels that become channels.

Means of parts of the whole image, and what is computed of them until they have its size again, are one node."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.pixelwise import Mark
from tiledseg.geometry.pyramid import PooledBranch
from tiledseg.models.layers.pooling import MaxPoolModule
from tiledseg.models.layers.resampling import AlignedUpsampleModule, UpsampleModule
from tiledseg.models.network import PooledBranchModule
from tiledseg.tracing.functions.views import add_border
from tiledseg.tracing.lowering import Handler, Step, Value, refuse, writing

Pair = tuple[int, int]


def pooled(step: Step, value: Value) -> list[Value]:
    """Add a node for means of parts of the image, which no graph has: it stands for the input of the branch."""
    refuse(value.node in step.lowering.pooled, "takes means of parts of such means; take them of the image")
    (made,) = step.node("means", Mark(), nn.Identity(), (value,))
    step.lowering.pooled[str(made.node)] = str(made.node)
    return [made]


def _resized_branch(step: Step, value: Value, mode: str, aligned: bool) -> list[Value]:
    """Add the node of a whole branch: the means that it begins with, what is computed of them, and the resizing."""
    refuse(mode != "bilinear", f"resizes means of parts of the image by '{mode}'; take bilinear")
    lowering, last = step.lowering, str(value.node)
    root = next(node for node in lowering.nodes if node.name == lowering.pooled[last])
    source, needed, inside = root.inputs[0], {last}, list[Node]()
    for node in reversed(lowering.nodes):
        if node.name in needed and node.name != root.name:
            needed.update(node.inputs)
            inputs = tuple(INPUT if name == root.name else name for name in node.inputs)
            inside.insert(0, replace(node, inputs=inputs))
    modules = [writing(lowering.modules[node.name], False) for node in inside] or [nn.Identity()]
    inside = inside or [replace(root, inputs=(INPUT,))]
    made, bins = (step.call.shapes[0][2:], step.other.shapes[0][2:]), lowering.pixels[root.name][0]
    runs = [zip(*sizes, strict=True) for sizes in zip(made, lowering.pixels[source], strict=True)]
    factors = {tuple(after / before for after, before in run) for run in runs}
    uneven = len(factors) > 1 or any(factor != int(factor) for pair in factors for factor in pair)
    refuse(uneven, "resizes means of parts of the image to no multiple of its size there; let it be one")
    inner = Graph(tuple(inside), (inside[-1].name if last == root.name else last,))
    pairs = zip(bins, factors.pop(), strict=True)
    rows, cols = (PooledBranch(n, bins[0] * bins[1], inner, aligned, int(factor)) for n, factor in pairs)
    branch = PooledBranchModule(rows, cols, modules)
    return step.node("pyramid", rows, branch, (Value(source, value.layout, (), ()),), cols=cols)


def _interpolate(step: Step) -> list[Value]:
    value, factors = step.full(), ratios(step, step.full())
    mode, align = step.argument(3, "mode", "nearest"), step.argument(4, "align_corners")
    if value.node in step.lowering.pooled and not value.layout.one_pixel:
        return _resized_branch(step, value, mode, bool(align))
    if value.layout.one_pixel or factors == (1.0, 1.0):
        return [step.made(value.node)]
    sizes = f"{value.shape[2]} x {value.shape[3]} to {step.call.shapes[0][2]} x {step.call.shapes[0][3]} pixels"
    why = f"resizes {sizes}, by another factor at another size; give a scale_factor, or another node's size"
    refuse(factors is None, why)
    row, col = factors or (0.0, 0.0)
    if min(row, col) >= 1 and (row, col) == (int(row), int(col)):
        whole = int(row), int(col)
        bicubic = align and mode == "bicubic"
        refuse(bicubic, "resizes by bicubic with align_corners=True; take bilinear, or align_corners=False")
        if align and mode == "bilinear":
            module = AlignedUpsampleModule(whole)
            return step.node("interpolate", module.rows, module, (value,), cols=module.cols)
        return step.by(UpsampleModule(scale_factor=whole, mode=mode, align_corners=align), value, "interpolate")
    thin = max(row, col) <= 1 and (1 / row, 1 / col) == (int(1 / row), int(1 / col))
    refuse(not thin, f"resizes {sizes}; only whole factors fall on the edges of tiles: let the sizes be multiples")
    return _thinned(step, value, (int(1 / row), int(1 / col)), mode, align)


def ratios(step: Step, value: Value) -> tuple[float, float] | None:
    """Return how many times as large it becomes; None where that depends on the size."""
    runs = (value.shape, step.call.shapes[0]), (value.other_shape, step.other.shapes[0])
    one, other = ((after[2] / before[2], after[3] / before[3]) for before, after in runs)
    return one if one == other else None


def _thinned(step: Step, value: Value, strides: Pair, mode: str, align: bool | None) -> list[Value]:
    """Downsample by whole factors: means, or every so manyth pixel."""
    if mode == "area":
        return step.by(nn.AvgPool2d(strides), value, "interpolate")
    if mode == "nearest":
        return step.by(MaxPoolModule(1, strides), value, "interpolate")
    other = mode != "bilinear" or align or step.argument(6, "antialias", False)
    refuse(other, f"makes it smaller by '{mode}'; use nearest, area, or bilinear with align_corners=False")
    for dim, stride in zip((2, 3), strides, strict=True):  # the one or two pixels about the middle of each window
        before = (stride - 1) // 2
        value = add_border(step, value, dim, -before, -before) if before else value
    row, col = (1 if stride % 2 else 2 for stride in strides)
    return step.by(nn.AvgPool2d((row, col), strides), value, "interpolate")


def _shuffle(step: Step) -> list[Value]:
    inverse = step.call.function == "pixel_unshuffle"
    kind, name = (nn.PixelUnshuffle, "downscale_factor") if inverse else (nn.PixelShuffle, "upscale_factor")
    return step.by(kind(step.argument(1, name)), step.full(), "unshuffle" if inverse else "shuffle")


RESIZING: dict[str, Handler] = {"interpolate": _interpolate, "pixel_shuffle": _shuffle, "pixel_unshuffle": _shuffle}
