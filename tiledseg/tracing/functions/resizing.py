"""Handlers of resizing: by whole factors, to the size of another tensor, of pixels that become channels, and of means
of parts of the whole image, which are one node with what is computed of them until they have its size again."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tiledseg.geometry.graph import INPUT, Graph
from tiledseg.geometry.layers.activations import Mark
from tiledseg.geometry.pyramid import PooledBranch
from tiledseg.models import pyramid
from tiledseg.models.layers.aligned import AlignedUpsampleModule
from tiledseg.models.layers.pooling import MaxPoolModule
from tiledseg.models.layers.upsample import UpsampleModule
from tiledseg.tracing.functions.views import add_border
from tiledseg.tracing.lowering import Handler, RefusalError, Step, Value, writing


def pooled(step: Step, value: Value) -> str:
    """A node for the means, which no graph has: it stands for the input of the branch."""
    name = step.lowering.add(step, "means", Mark(), nn.Identity(), (value,))
    if name in step.lowering.pooled:
        raise RefusalError("takes means of parts of such means; take them of the image")
    step.lowering.pooled[name] = name
    return name


def resized_branch(step: Step, value: Value, mode: str, aligned: bool) -> str:
    """The node of a whole branch: the means that it begins with, what is computed of them, and the resizing."""
    if mode != "bilinear":
        raise RefusalError(f"resizes means of parts of the image by '{mode}'; take bilinear")
    lowering = step.lowering
    assert value.node is not None, "it is known"
    nodes = {node.name: node for node in lowering.nodes}
    root = nodes[lowering.pooled[value.node]]
    source = root.inputs[0]
    factors = _factors(step, lowering.pixels_of(replace(value, node=source)))
    needed = {value.node}
    for node in reversed(lowering.nodes):
        if node.name in needed and node.name != root.name:
            needed.update(node.inputs)
    inside = [replace(node, inputs=tuple(_renamed(root.name, node.inputs))) for node in lowering.nodes]
    inside = [node for node in inside if node.name in needed and node.name != root.name]
    modules = [lowering.modules[node.name] for node in inside]
    if not inside:
        inside, modules = [replace(root, inputs=(INPUT,))], [nn.Identity()]
    bins = lowering.pixels[root.name][0]
    inner = Graph(tuple(inside), (inside[-1].name if value.node == root.name else value.node,))
    rows, cols = (PooledBranch(n, bins[0] * bins[1], inner, aligned, f) for n, f in zip(bins, factors, strict=True))
    branch = pyramid.PooledBranchModule(rows, cols, [writing(module, False) for module in modules])
    taken = Value(source, value.layout, (), ())
    return lowering.add(step, "pyramid", rows, branch, (taken,), cols=None if rows == cols else cols)


def _factors(step: Step, sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    made = step.call.shapes[0][2:], step.other.shapes[0][2:]
    found = {
        tuple(after / before for after, before in zip(*pair, strict=True)) for pair in zip(made, sizes, strict=True)
    }
    if len(found) > 1 or any(factor != int(factor) for pair in found for factor in pair):
        raise RefusalError("resizes means of parts of the image to no multiple of its size there; let it be one")
    row, col = found.pop()
    return int(row), int(col)


def _renamed(root: str, names: tuple[str, ...]) -> list[str]:
    return [INPUT if name == root else name for name in names]


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
        module = UpsampleModule(scale_factor=(int(found[0]), int(found[1])), mode=mode, align_corners=align)
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
    module = AlignedUpsampleModule(factors)
    rows, cols = module.rows, module.cols
    return step.lowering.add(step, "interpolate", rows, module, (value,), cols=None if rows == cols else cols)


def _thinned(step: Step, value: Value, strides: Pair, mode: str, align: bool | None) -> str:
    """Downsampling by whole factors: means, or every so manyth pixel."""
    if mode == "area":
        return step.lowering.add_module(step, nn.AvgPool2d(strides), value, "interpolate")
    if mode == "nearest":
        return step.lowering.add_module(step, MaxPoolModule(1, strides), value, "interpolate")
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
