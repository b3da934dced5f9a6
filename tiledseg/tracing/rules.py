"""Rules of positions: which numbers of the calls that make a tensor are sizes of the image. A `Rule` says so from two
runs, and runs at other sizes must follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.pixelwise import Cut, Formula, FormulaSlot
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.models.layers.positions import Program, Size, SizeNumber
from tiledseg.tracing.calls import Given, Record, same
from tiledseg.tracing.lowering import RefusalError, refuse, shared

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
