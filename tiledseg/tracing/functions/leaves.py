"""The handler of a module whose footprint is declared, and the numerical check of the declaration."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf, lcm
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tiledseg.comm.mesh import serial_axes
from tiledseg.errors import first_line
from tiledseg.geometry.box import Interval
from tiledseg.geometry.halo import round_up
from tiledseg.geometry.layers.declared import DeclaredLeaf, Returned, WholeLeaf
from tiledseg.memory.allocations import kept_for
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.models.layers.block import BlockPlace, DimPlace
from tiledseg.models.layers.pixelwise import DeclaredModule, ReturnedModule
from tiledseg.tracing.calls import Record, differing, values_in, where
from tiledseg.tracing.declared import Declaration, WholeImage, depths_of
from tiledseg.tracing.lowering import Step, Value, refuse
from tiledseg.tracing.runs import ModuleRuns, OtherSizeError, Size
from tiledseg.tracing.state import drawn_from

LONG_SIDES = 128, 2048  # pixels of a long image, at least and at most
LONG_WORK = 1 << 26  # multiply-adds of a long image
LARGE = 1000.0  # pixels are 0 to 10,000
# Batches and sizes, and dtypes, at which the calls inside a module are compared.
FAR = ((8, (70_000, 24)), (1, (24, 70_000)), (5, (2_100, 2_100)))
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
EXACT = 1e-9  # tolerance in float64, of the largest value
MASKED = 1e-12  # of the largest gradient: a smaller one leaks through the mask of attention
IMAGE = ["B", "C0", "H", "W"]


def declared_leaf(step: Step, found: Declaration) -> list[Value]:
    """Lower a call of a declared module: a node, and a second one that returns the outputs of shifted windows."""
    leaf, value = step.call.module, step.value()
    assert leaf is not None, "a module's call"
    layout, pixels = value.layout, step.lowering.pixels[str(value.node)]
    other = layout.one_pixel or sorted(atom for dim in layout.dims for atom in dim) != IMAGE
    refuse(other, "is declared, and given a part of an image's dims; give it all channels of all pixels")
    keywords = {key: step.argument(len(step.call.arguments), key) for key in step.call.keywords}
    more = len(step.call.arguments) > 1 and found.arguments is None
    more = more or bool(values_in(dict(step.call.keywords)))
    refuse(more, "is declared, and given more than a tensor and numbers; say `arguments` in its declaration")
    stated, out = found.of(leaf), step.call.shapes[0][layout.dims.index(("C0",))]
    weights = sum(parameter.numel() for parameter in leaf.parameters())
    kind: Any = WholeLeaf if isinstance(stated, WholeImage) else DeclaredLeaf
    dims: Any = [kind(out, weights=weights, **stated.along(dim)) for dim in (0, 1)]
    module = DeclaredModule(leaf, (dims[0], dims[1]), layout, found.of, found.arguments, keywords, depths_of(leaf))
    sizes = [[layer.output_size(side) for layer, side in zip(dims, sides, strict=True)] for sides in pixels]
    module.channels = channels = value.shape[layout.dims.index(("C0",))]
    for training in (True, False):  # a fault in training alone leaves a network that maps
        fault, costs = _checked(module, channels, training)
        if fault is None:
            fault, own_gradients = _calls_that_vary(module, training)
            step.lowering.own_gradients += [f"in '{step.call.owner}', {each}" for each in own_gradients]
        what = f"is declared as {stated}, but {fault}"
        if fault and training:
            step.lowering.untrained = step.lowering.untrained or f"{where(step.call)} {what}"
    refuse(fault, f"{what}; declare what it sees (tiledseg.declare)")
    module.rows, module.cols = (replace(layer, work=costs[0], kept=costs[1]) for layer in dims)
    node = step.lowering.add(step, "declared", module, (value,))
    for depth in module.depths:
        depth.node = node
    step.lowering.pixels[node] = tuple((height, width) for height, width in sizes)
    if any(layer.moved for layer in dims):
        back, inputs = ReturnedModule(*(Returned(layer.moved) for layer in dims)), (replace(value, node=node),)
        node = step.lowering.add(step, "returned", back, inputs)
    return [step.made(node if part == 0 else None, layout, part) for part in range(len(step.call.shapes))]


def _checked(module: DeclaredModule, channels: int, training: bool) -> tuple[str | None, tuple[int, int]]:
    """Compare a module with its declaration on noise, in float64, with weights moved a little. Return what is wrong;
    and of an output pixel the multiply-adds, and the values that autograd keeps besides the input."""
    rows, cols = (round_up(layer.reach, layer.size) + layer.size for layer in (module.rows, module.cols))
    whole = isinstance(module.rows, WholeLeaf)
    rows, cols = (round_up(8, unit) if whole else unit for unit in (rows, cols))
    mode, costs, side = "in training " if training else "", (1, 0), (4 * rows, 3 * cols)
    # Outputs beside the edges of windows, for values of size 1 and large ones; long images are added below.
    beside = [(rows, 0), (rows - 1, cols), (0, side[1] - 1), (side[0] - 1, cols - 1)]
    looks = [(side, 1.0, beside), (side, LARGE, beside)]
    with drawn_from(0), torch.enable_grad():
        try:
            twin = copy.deepcopy(module).cpu().double().train(training)
            for each in twin.parameters():  # a norm with zero weights hides what is before it
                each.data.add_(0.1 * torch.randn_like(each))
            held = [each for part in twin.modules() for each in (*part.buffers(recurse=False), *vars(part).values())]
            for constant in held:  # buffers and tensors that are no weights: zeros may close a gate
                if isinstance(constant, torch.Tensor) and constant.is_floating_point():
                    constant.add_(0.1 * torch.randn((), dtype=torch.float64))
            for number, (side, scale, places) in enumerate(looks):
                x_BCHW = scale * torch.randn(2, channels, *side, dtype=torch.float64)
                x_BCHW, other_BCHW = x_BCHW[:1].clone().requires_grad_(), x_BCHW
                set_dropout_key(twin, DropoutKey(0, 0, number))
                before = torch.random.get_rng_state()
                y_BCHW, kept, work = kept_for(partial(twin, x_BCHW), (x_BCHW, *twin.parameters(), *twin.buffers()))
                pixels = y_BCHW[0, 0].numel()
                costs = max(1, work // pixels), -(-kept // x_BCHW.element_size() // pixels)
                given = [layer.output_size(n) for layer, n in zip((module.rows, module.cols), side, strict=True)]
                if given != list(y_BCHW.shape[2:]):
                    made = f"{y_BCHW.shape[2]} x {y_BCHW.shape[3]}"
                    return f"{mode}gives {made} pixels of {side[0]} x {side[1]}, not {given[0]} x {given[1]}", costs
                if not torch.equal(before, torch.random.get_rng_state()):
                    return f"{mode}drops at random; set the rate of its dropout to 0", costs
                fault = None if whole else _seen_beyond(twin, x_BCHW, y_BCHW, places)
                fault = fault or _parts_that_differ(twin, [rows, cols], x_BCHW, y_BCHW, other_BCHW)
                if fault:
                    return mode + fault, costs
                if number == 0 and not whole:
                    # A high and a wide image, as long as the work of a pixel allows, and their middles.
                    work = costs[0] + 64 * channels
                    high = round_up(max(LONG_SIDES[0], min(LONG_SIDES[1], LONG_WORK // (work * 3 * cols))), rows)
                    wide = round_up(max(LONG_SIDES[0], min(LONG_SIDES[1], LONG_WORK // (work * 3 * rows))), cols)
                    longest = (high, 3 * cols), (3 * rows, wide)
                    looks += [(size, 1.0, [(size[0] // 2, size[1] // 2)]) for size in longest]
        except Exception as error:  # whatever the module raises
            said = f"{type(error).__name__}: {first_line(error)}"
            return f"{mode}it does not run on {side[0]} x {side[1]}: {said}", costs
    return None, costs


def _calls_that_vary(module: DeclaredModule, training: bool) -> tuple[str | None, list[str]]:
    """Return how a declared module's calls vary with an image's size, values or batch, its dtype or earlier calls; and
    its backward passes besides torch's. Numbers alone cannot show either."""
    units = [lcm(layer.size, layer.stride) for layer in (module.rows, module.cols)]
    far = [max(layer.reach, layer.size) for layer in (module.rows, module.cols)]

    def run(batch: int, least: Size, fake: bool = False, module: DeclaredModule = module, **how: Any) -> Record:
        rows, cols = (round_up(n, unit) for n, unit in zip(least, units, strict=True))
        source = ModuleRuns(module, module.channels)
        return source.run(batch, (rows, cols), training, fake, opened=True, widest=inf, **how)

    def with_integers(run: Record) -> list[Any]:
        given = [(call, tree_leaves((call.arguments, dict(call.keywords)))) for call in run.calls]
        return [(call.function, call.at, *(leaf for leaf in each if isinstance(leaf, int))) for call, each in given]

    one, other = run(2, (4 * far[0], 6 * far[1]), gradients=1), run(3, (10 * far[0], 8 * far[1]))
    faults = [*one.faults, *(f"moves its buffer '{name}'" for name in one.moved)]
    fault = next(iter(faults), None) or differing(one, other)
    fault = fault or differing(one, run(2, one.size, gradients=1, first=training), "at its next call")
    for batch, least in () if fault else FAR:  # runs without values: thresholds lie below these sizes
        with suppress(OtherSizeError):  # whatever the module raises, or torch for tensors without values
            fault = fault or differing(one, run(batch, least, fake=True), None, other)
    for dtype in () if fault else DTYPES:
        with suppress(OtherSizeError):
            again = run(2, one.size, True, copy.deepcopy(module).to(dtype))
            fault = fault or (f"does something else in {dtype}" if with_integers(again) != with_integers(one) else None)
    return fault and ("in training " if training else "") + fault, one.own_gradients


def _seen_beyond(
    twin: DeclaredModule, x_BCHW: torch.Tensor, y_BCHW: torch.Tensor, places: Sequence[Size]
) -> str | None:
    """Return in words an input beyond the declared footprint with a gradient from the output at one of `places`."""
    dims = twin.rows, twin.cols
    weights_C = torch.randn(y_BCHW.shape[1], dtype=torch.float64)
    for place in places:
        row, col = (at // layer.stride for layer, at in zip(dims, place, strict=True))
        (gradient_BCHW,) = torch.autograd.grad(y_BCHW[0, :, row, col] @ weights_C, x_BCHW, retain_graph=True)
        far_HW = gradient_BCHW[0].abs().amax(0)
        least = MASKED * float(far_HW.max())
        each = zip(dims, (row, col), far_HW.shape, strict=True)
        seen = [layer.within(layer.required_input(Interval(at, at + 1)), side) for layer, at, side in each]
        far_HW[seen[0].slice, seen[1].slice] = 0
        if float(far_HW.max()) > least:
            i, j = divmod(int(far_HW.argmax()), far_HW.shape[1])
            allowed = f"rows {seen[0].start} to {seen[0].stop - 1} and columns {seen[1].start} to {seen[1].stop - 1}"
            return f"its output at row {row}, column {col} depends on row {i}, column {j}, beyond {allowed}"
    return None


@torch.no_grad()
def _parts_that_differ(
    twin: DeclaredModule, units: list[int], x_BCHW: torch.Tensor, y_BCHW: torch.Tensor, both_BCHW: torch.Tensor
) -> str | None:
    """Return in words a difference from the image's outputs: beside another image, of 3 x 3 ranks."""
    if not float((twin(both_BCHW)[:1] - y_BCHW).abs().max()) <= EXACT * float(y_BCHW.abs().max()):
        return "an image gives other values beside another one in a batch"
    if isinstance(twin.rows, WholeLeaf):
        return None
    dims, pairs = zip((twin.rows, twin.cols), x_BCHW.shape[2:], units, strict=True), list[tuple[torch.Tensor, ...]]()
    for row, col in itertools.product(*(_thirds(*dim) for dim in dims)):
        read_BCHW = x_BCHW[:, :, row.read.slice, col.read.slice]
        block_BCHW = twin.on_block(BlockPlace(row, col), serial_axes().image, read_BCHW)
        pairs.append((y_BCHW[:, :, row.given.slice, col.given.slice], block_BCHW))
    apart, size = max(float((one - other).abs().max()) for one, other in pairs), float(y_BCHW.abs().max())
    what = f"a part of an image gives other values than the image there, by {apart:.1e} of {size:.1e}"
    return None if apart <= EXACT * size else what


def _thirds(layer: Any, side: int, unit: int) -> list[DimPlace]:
    """Return the places of three ranks that share a dim; the ranks at its ends own one unit each."""
    edges = 0, layer.output_edge(unit), layer.output_edge(side - unit), side // layer.stride
    thirds = [Interval(*pair) for pair in itertools.pairwise(edges)]
    reads = [layer.within(layer.required_input(given), side) for given in thirds]
    return [DimPlace(read, given, read, (side, edges[-1]), False) for read, given in zip(reads, thirds, strict=True)]
