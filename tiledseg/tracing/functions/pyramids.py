"""Means of parts of the whole image, and what is computed of them until it has the size of an image again: one node."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tiledseg.geometry.graph import INPUT, Graph
from tiledseg.geometry.layers.activations import Mark
from tiledseg.geometry.pyramid import PooledBranch
from tiledseg.models import pyramid
from tiledseg.tracing.lowering import RefusalError, Step, Value, writing


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
