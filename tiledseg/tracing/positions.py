"""Positions: tensors that a module computes from the image's size alone, such as coordinates.

A `Rule` says, from two runs, which numbers of a tensor's calls are sizes; runs at other sizes must follow it. A node
computes the tensor for the whole image at any size. Layers with weights take it as any other tensor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.pixelwise import Cut, Formula, FormulaSlot, Layout, Positions
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.models.layers.positions import PositionModule, Program, Size, SizeNumber
from tiledseg.tracing.calls import Call, Given, Made, Record, same, values_in
from tiledseg.tracing.lowering import Handler, RefusalError, Step, Value, is_channels, refuse, shared

Path = tuple[Any, ...]  # the number of a call, then indices into its arguments and into the recipes of constants
MANY = 8  # images of a trial: positions must be those of one image
ANCHOR = "computes a tensor of the image's size by other than plain functions of torch; write it by such alone"


@dataclass(frozen=True)
class Placed:
    """The positions that a node computes: their path among the calls, their rule, and the call's file and line."""

    node: str
    path: Path
    rule: Rule
    where: str


class Rule:
    """The calls that compute positions, for any size, from what several runs gave. Raises RefusalError for a number
    that differs between the runs and is no size."""

    def __init__(self, runs: Sequence[Given], sizes: Sequence[Size], batches: Sequence[int]) -> None:
        self.runs, self.sizes, self.batches = tuple(runs), tuple(sizes), tuple(batches)
        self.steps, self.given = list[Formula](), list[Given]()
        self._places: dict[tuple[int, ...], FormulaSlot] = {}
        self._takes_batch = False
        self._slots(self.runs)

    def _slots(self, runs: tuple[Any, ...]) -> Any:
        """Return an argument of all runs as one: slots for tensors, a `SizeNumber` for each number that differs."""
        first = runs[0]
        alike = all(isinstance(each, type(first)) for each in runs)
        match first:
            case Given() if alike:
                return self._places.get(tuple(map(id, runs))) or self._tensor(runs)
            case tuple() if alike and all(len(each) == len(first) for each in runs):
                return tuple(map(self._slots, zip(*runs, strict=True)))
            case dict() if alike and all(each.keys() == first.keys() for each in runs):
                return tuple((key, self._slots(tuple(each[key] for each in runs))) for key in first)
            case slice() if alike:
                return Cut(*map(self._slots, zip(*((each.start, each.stop, each.step) for each in runs), strict=True)))
        if all(same(first, each) for each in runs):
            return first
        kinds = (SizeNumber(kind, more) for more in (0, 1, -1) for kind in ("H", "W", "HW", "B"))
        numbers = all(type(each) is int for each in runs)
        each_run = list(zip(runs, self.sizes, self.batches, strict=True))
        found = next((k for k in kinds if numbers and all(k.of(size, b) == n for n, size, b in each_run)), None)
        refuse(found is None, ANCHOR)
        self._takes_batch |= found is not None and found.kind == "B"
        return found

    def _tensor(self, runs: tuple[Given, ...]) -> FormulaSlot:
        recipes: Any = [each.recipe for each in runs]
        if runs[0].name or None in recipes:
            refuse(not all(same(runs[0], each) for each in runs), ANCHOR)
            self.given.append(runs[0])
            slot = FormulaSlot(len(self.given) - 1, True)
        else:
            functions, arguments, keywords, parts = zip(*recipes, strict=True)
            alike = len(set(functions)) == len(set(parts)) == 1 and isinstance(functions[0], str)
            refuse(not alike, ANCHOR)
            self.steps.append(Formula(functions[0], self._slots(arguments), self._slots(keywords), parts[0]))
            slot = FormulaSlot(len(self.steps) - 1)
        self._places[tuple(map(id, runs))] = slot
        return slot

    def program(self) -> Program:
        """Return the calls as a program. Raises RefusalError if it does not give the tensors of all runs."""
        made, device = Program(self.steps, shared(self.given)), self.runs[0].tensor.device
        values = list[float]()
        for size, given in zip(self.sizes, self.runs, strict=True):
            try:
                many = made(size, device, MANY) if self._takes_batch and not values else None
                y = made(size, device)
                refuse(many is not None and not torch.equal(y.expand_as(many), many), ANCHOR)
                y = y.expand(given.tensor.shape)
            except Exception as error:  # a function may not run as it was recorded
                raise RefusalError(ANCHOR) from error
            refuse(y.dtype != given.tensor.dtype or not torch.equal(y, given.tensor), ANCHOR)
            values.append(made.largest / prod(size))
        refuse(values[1] > 1.01 * max(values[0], 1), "makes a tensor of every pixel with every other")
        return made

    def holds(self, given: Any, size: Size, batch: int) -> bool:
        """Return True if these calls made the tensor of another run, with the same values."""
        try:
            rule = Rule((*self.runs, given), (*self.sizes, size), (*self.batches, batch))
        except RefusalError:
            return False
        if rule.steps != self.steps or isinstance(given.tensor, FakeTensor):
            return rule.steps == self.steps
        made = Program(self.steps, shared(self.given))(size, given.tensor.device)
        return torch.equal(made.expand(given.tensor.shape), given.tensor)


def tensor_at(run: Record, path: Path) -> Any:
    """Return the tensor at a path in the calls of a run."""
    call = run.calls[path[0]]
    value: Any = call.arguments, call.keywords
    for key in path[1:]:
        value = value.recipe[1:3][key] if hasattr(value, "recipe") else value[key]
    return value


def _is_learned(given: Given) -> bool:
    """Return True for a tensor that is computed from parameters, or by a module."""
    if given.recipe is None:
        return isinstance(given.tensor, nn.Parameter) or given.tensor.requires_grad
    function, *rest, _ = given.recipe
    return isinstance(function, nn.Module) or any(isinstance(v, Given) and _is_learned(v) for v in values_in(rest))


def positioned(step: Step, lower: Handler, at: Path | None = None, anchor: Value | None = None) -> Step:
    """Return the step with a node's value in the place of each argument that is computed from the image's size.
    `at`: the place of a call of a constant's recipe; `anchor`: a tensor of as many pixels."""
    pairs = [(each.arguments, dict(each.keywords)) for each in (step.call, step.other)]
    if same(*pairs):
        return step
    made = [step.lowering.values[each] for each in values_in(pairs[0]) if isinstance(each, Made)]
    anchor = anchor or next((value for value in made if value.node and not value.layout.one_pixel), None)
    if anchor is None or anchor.pairs:
        return step
    number = (k for k, call in enumerate(step.lowering.records[0].calls) if call is step.call)
    at = at or (next(number),)

    def placed(one: Any, other: Any, path: Path) -> Any:
        if isinstance(one, Given) and isinstance(other, Given) and not same(one, other):
            with suppress(Exception):  # a handler fails at arguments that it was not written for
                value = _position_value(step, lower, (one, other), path, anchor)
                return value, value
        alike = isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other)
        if not alike or isinstance(one, torch.Size):
            return one, other
        both = [placed(*pair, (*path, k)) for k, pair in enumerate(zip(one, other, strict=True))]
        return tuple(zip(*both, strict=True)) if both else (one, other)

    arguments = placed(pairs[0][0], pairs[1][0], (*at, 0))
    named = {k: placed(pairs[0][1][k], pairs[1][1].get(k), (*at, 1, k)) for k in pairs[0][1]}
    calls = zip((step.call, step.other), arguments, (0, 1), strict=True)
    call, other = (replace(c, arguments=own, keywords={k: v[n] for k, v in named.items()}) for c, own, n in calls)
    return replace(step, call=call, other=other)


def _position_value(step: Step, lower: Handler, pair: tuple[Given, Given], path: Path, anchor: Value) -> Value:
    """Return the value of a node for a tensor computed from the image's size. Raises RefusalError where none can be."""
    shapes = tuple(tuple(each.tensor.shape) for each in pair)
    missing = max(0, len(anchor.layout.dims) - len(shapes[0]))
    shapes = tuple((*(1,) * missing, *shape) for shape in shapes)
    if _is_learned(pair[0]):
        recipes = [each.recipe for each in pair]
        refuse(None in recipes or any(recipe[3] is not None for recipe in recipes if recipe), ANCHOR)
        calls = [_as_call(step, each, shape) for each, shape in zip(pair, shapes, strict=True)]
        return lower(positioned(replace(step, call=calls[0], other=calls[1], trained=None), lower, path, anchor))[0]
    lowering = step.lowering
    sizes, runs = lowering.pixels[str(anchor.node)], lowering.records
    batches = runs[0].batch, runs[1].batch
    layout = _position_layout(shapes, sizes, batches, anchor)
    key = id(pair[0]), sizes, layout
    if key not in lowering.positions:
        rule = Rule(pair, sizes, batches)
        program = rule.program()
        programs = {runs[0].dtype: program}
        with suppress(Exception):  # whatever a copy in another dtype raises
            wide = tuple(tensor_at(run, path) for run in lowering.in_other_dtype())
            programs[lowering.in_other_dtype()[0].dtype] = Rule(wide, sizes, batches).program()
        channels = prod(shapes[0][at] for at, dim in enumerate(layout.dims) if is_channels(dim))
        refuse(pair[0].tensor.dtype == torch.bool, ANCHOR)
        layer = Positions(channels, ceil(program.peak / prod(sizes[1])) + channels)
        module = PositionModule(layer, programs, layout)
        node = lowering.add(replace(step, call=replace(step.call, module=None)), "positions", module, (anchor,))
        lowering.placed.append(Placed(node, path, rule, step.call.at))
        lowering.positions[key] = Value(node, layout, *shapes)
    return lowering.positions[key]


def _as_call(step: Step, given: Given, shape: tuple[int, ...]) -> Call:
    """Return the call that made a constant, from its recipe."""
    recipe: Any = given.recipe
    function, arguments, keywords, _ = recipe
    if isinstance(function, nn.Module) and given.owner:
        of: tuple[str, Any, str] = type(function).__name__, function, given.owner[1]
    else:
        of = function.removeprefix("Tensor."), None, step.call.owner
    is_method = of[1] is None and function.startswith("Tensor.")
    return Call(*of, step.call.at, arguments, keywords, (shape,), (True,), is_method)


def _position_layout(
    shapes: Sequence[tuple[int, ...]], sizes: Sequence[Size], batches: tuple[int, int], anchor: Value
) -> Layout:
    """Return the layout of positions, from their shapes, sizes and batches in both runs. The layout of `anchor`, a
    tensor beside them, tells dims of size 1 and channels apart."""
    kinds: dict[Any, tuple[str, ...]] = {batches: ("B",), (prod(sizes[0]), prod(sizes[1])): ("H", "W")}
    kinds |= {pair: (name,) for name, pair in zip("HW", zip(*sizes, strict=True), strict=True)}
    pairs = list(zip(*shapes, strict=True))
    dims = [kinds.get(pair, ("?",)) if pair[0] != pair[1] else () for pair in pairs]
    beside = anchor.layout.dims if len(anchor.layout.dims) == len(dims) else (((),) * len(dims))
    each = zip(dims, pairs, beside, strict=True)
    dims = [like if dim == () and pair == (1, 1) and not is_channels(like) else dim for dim, pair, like in each]
    dims = [("B",), *dims[1:]] if ("B",) not in dims and pairs[0] == (1, 1) else dims
    atoms = [atom for dim in dims for atom in dim]
    none = not any(set(d) & {"H", "W"} and p != (1, 1) for d, p in zip(dims, pairs, strict=True))
    refuse(none or sorted(atoms) != ["B", "H", "W"], ANCHOR)
    rest, factors = [at for at, dim in enumerate(dims) if dim == ()], list[int]()
    if all(len(beside[at]) == 1 and is_channels(beside[at]) for at in rest):
        factors = [1] * max(1, len(anchor.layout.channels))
        for at in rest:
            dims[at] = beside[at]
            factors[int(beside[at][0][1:])] = pairs[at][0]
    else:
        factors = [pairs[at][0] for at in rest]
        for number, at in enumerate(rest):
            dims[at] = (f"C{number}",)
    return Layout(tuple(dims), tuple(factors) if len(factors) > 1 else ())


def breaks_rule(placed: Sequence[Placed], graph: Graph, bands: int, again: Record) -> str | None:
    """Return in words the first positions that do not follow their rule in a run of another size; None without one."""
    if not placed:
        return None
    shapes = dict(zip(graph.names, tensor_shapes(graph, bands, *again.size), strict=True))
    for each in placed:
        if each.node in shapes and not each.rule.holds(tensor_at(again, each.path), shapes[each.node][1:], again.batch):
            size = f"{again.batch} x {again.size[0]} x {again.size[1]} pixels"
            return f"{each.where} computes positions otherwise at {size}"
    return None
