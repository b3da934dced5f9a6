"""From two records of a module's calls to the nodes of a graph, each with the module that computes it.

Two runs at two sizes make the same calls, or the module is refused. A number that differs between them depends on the
size; only those functions are taken for which that is known to be a factor, a crop, or another tensor's size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tiledseg.comm.axes import serial_axes
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Layout, OfOnePixel
from tiledseg.models.layers.pixelwise import OnePixel
from tiledseg.models.norm import StillBatchNorm
from tiledseg.spatial.convert import convert_layer
from tiledseg.tracing.calls import Call, Given, Made, Record, given_to, same, same_arguments, where

WHOLE = Layout()
ONE_PIXEL = Layout((("B",), ("C0",), (), ()), one_pixel=True)
STRANGE = "is given arguments that no tile is known to keep; write it simpler"
SIZED = "is given numbers that depend on the size of the image, or of the batch; give it fixed ones"


class RefusalError(Exception):
    """Why a call cannot be exact, and what to do."""


class UnknownError(RefusalError):
    """What is computed from a refused call says nothing of its own."""


@dataclass(frozen=True)
class Value:
    """A tensor of the graph, as its author sees it; of no node where the call that made it is refused."""

    node: str | None
    layout: Layout
    shape: tuple[int, ...]
    other_shape: tuple[int, ...]  # in the other run


@dataclass(frozen=True)
class Step:
    """One call in both runs."""

    call: Call
    other: Call
    lowering: Lowering
    trained: Call | None = None  # in training, where that calls the same

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """As the call was given it: a tensor's `Value`, or what it is. Refuses what depends on the image's size."""
        one, other = (given_to(call, index, name, default) for call in (self.call, self.other))
        if not same(one, other):
            raise RefusalError(SIZED)
        return self.lowering.resolved(one)

    def arguments(self, index: int, name: str, default: Any = None) -> tuple[Any, Any]:
        """In either run: for what may depend on the size."""
        one, other = (given_to(call, index, name, default) for call in (self.call, self.other))
        return self.lowering.resolved(one), self.lowering.resolved(other)

    def given(self) -> tuple[list[Any], dict[str, Any]]:
        """All arguments, and those that were given by names."""
        arguments = [self.argument(index, "") for index in range(len(self.call.arguments))]
        return arguments, {key: self.argument(len(arguments), key) for key in self.call.keywords}

    def options(self, first: int, **defaults: Any) -> dict[str, Any]:
        """Numbers by their names, in the order of the function's arguments from the one numbered `first` on."""
        return {name: self.argument(at, name, default) for at, (name, default) in enumerate(defaults.items(), first)}

    def giving(self, one: tuple[int, ...], other: tuple[int, ...]) -> Step:
        """The step as if it gave a single tensor of these shapes, in either run."""
        return replace(self, call=replace(self.call, shapes=(one,)), other=replace(self.other, shapes=(other,)))

    def as_called(self, name: str) -> str:
        """The function by its name, or the tensor's method of that name where the author called one."""
        return f"Tensor.{name}" if self.call.is_method and hasattr(torch.Tensor, name) else name

    def value(self, index: int = 0, name: str = "input") -> Value:
        found = self.argument(index, name)
        if not isinstance(found, Value):
            kind = "a tensor that does not depend on the input" if isinstance(found, Given) else f"{found}"
            raise RefusalError(f"takes {kind} for '{name}'; give it a tensor that is computed from the input")
        if found.node is None:
            raise UnknownError
        return found

    def full(self, index: int = 0, name: str = "input") -> Value:
        """An argument that its author sees as (batch, channels, height, width)."""
        found = self.value(index, name)
        if found.layout not in (WHOLE, ONE_PIXEL):
            raise RefusalError(
                "sees it in another layout than (batch, channels, height, width); permute it back before"
            )
        return found

    def made(self, node: str | None, layout: Layout = WHOLE, part: int = 0) -> Value:
        shapes = self.call.shapes[part], self.other.shapes[part]
        if node is not None and layout == WHOLE and len(shapes[0]) == 4:
            self.lowering.pixels[node] = tuple((shape[2], shape[3]) for shape in shapes)
        return Value(node, layout, *shapes)

    def check_same(self) -> None:
        """Refuse a number that depends on the size of the image."""
        if not same_arguments(self.call, self.other):
            raise RefusalError(SIZED)


Handler = Callable[[Step], list[Value]]


class Lowering:
    """Nodes and modules of a graph, call by call; what cannot be exact is a fault, and the rest is still looked at."""

    def __init__(self, one: Record, other: Record, trained: Record | None = None, still: bool = False) -> None:
        self.records, self.trained, self.still = (one, other), trained, still
        self.nodes: list[Node] = []
        self.modules: dict[str, nn.Module] = {}
        self.pixels: dict[str, tuple[tuple[int, int], ...]] = {INPUT: (one.size, other.size)}  # in either run
        self.values: dict[Made, Value] = {Made(-1): Value(INPUT, WHOLE, (), ())}
        self.faults: list[str] = list(one.faults)
        self.pooled: dict[str, str] = {}  # of nodes on means of parts of the image, the node that takes these
        self.truths: dict[str, str] = {}  # of nodes that make truths or whole numbers, what of
        self.untrained: str | None = None  # what the graph does not do as the module does in training
        self._names = {INPUT}
        self._axes = serial_axes()

    def run(self, bands: int, lower: Handler) -> None:
        one, other = self.records
        self.values[Made(-1)] = Value(INPUT, WHOLE, *((run.batch, bands, *run.size) for run in (one, other)))
        trained = self.trained.calls if self.trained and len(self.trained.calls) == len(one.calls) else one.calls
        for index, calls in enumerate(zip(one.calls, other.calls, trained, strict=True)):
            call = calls[0]
            step = Step(call, calls[1], self, calls[2] if calls[2] is not call else None)
            try:
                made = lower(step)
            except UnknownError:
                if not self.faults:
                    self.faults.append(f"{where(call)} takes places of the whole image's maxima; take the maxima alone")
                made = self._stand_ins(step)
            except GeometryError:
                raise
            except Exception as error:  # of a handler too, which was not made for such arguments
                known = isinstance(error, RefusalError | ConfigError)
                self.faults.append(f"{where(call)} {error if known else STRANGE}")
                made = self._stand_ins(step)
            for part, value in enumerate(made):
                self.values[Made(index, part)] = value

    def _stand_ins(self, step: Step) -> list[Value]:
        return [step.made(None, part=part) for part in range(len(step.call.shapes))]

    def resolved(self, given: Any) -> Any:
        if isinstance(given, Made):
            return self.values[given]
        if isinstance(given, tuple):
            return tuple(self.resolved(each) for each in given)
        return given

    def pixels_of(self, value: Value) -> tuple[tuple[int, int], ...]:
        """Rows and columns of a tensor in either run."""
        assert value.node is not None, "it is known"
        return self.pixels[value.node]

    def name(self, wanted: str) -> str:
        found, count = wanted, 1
        while found in self._names:
            count += 1
            found = f"{wanted}#{count}"
        self._names.add(found)
        return found

    def add(self, step: Step, what: str, layer: Layer, module: nn.Module, inputs: Sequence[Value], **cols: Any) -> str:
        """A node named after the module that calls, and what it does; `cols`: the layer along columns, if another."""
        if any(value.node is None for value in inputs):
            raise UnknownError
        wanted = step.call.owner if step.call.module is not None else f"{step.call.owner}.{what}".lstrip(".")
        name = self.name(wanted or what)
        sources = tuple(value.node for value in inputs if value.node is not None)
        roots = {self.pooled.get(source) for source in sources}
        if len(roots) > 1:
            raise RefusalError("joins means of parts of the image with other tensors; resize them before")
        if (root := roots.pop()) is not None:
            self.pooled[name] = root
        self.nodes.append(Node(name, layer, sources, **cols))
        self.modules[name] = module
        self.pixels[name] = self.pixels[sources[0]]
        return name

    def add_module(self, step: Step, module: nn.Module, value: Value, what: str | None = None) -> str:
        """A torch module with a twin, which knows its geometry."""
        if value.node is None:
            raise UnknownError
        rows, cols = convert_layer(step.call.owner, module, self._axes.image).descriptions
        what = what or type(module).__name__
        few = value.layout.one_pixel or value.node in self.pooled
        if few and rows.tracks and self.still:
            module = StillBatchNorm.of(module)
        elif few and "batch" in (rows.statistics, cols.statistics):
            self.untrained = self.untrained or (
                f"{where(step.call)} learns from few means an image, in training those of a single one"
            )
        if not value.layout.one_pixel:
            return self.add(step, what, rows, module, (value,), cols=None if rows == cols else cols)
        if any(layer.output_size(1) != 1 for layer in (rows, cols)):
            raise RefusalError("works on pixels around one that is all there is; leave it away")
        layer = OfOnePixel(rows.output_channels(value.shape[1]), sum(p.numel() for p in module.parameters()))
        return self.add(step, what, layer, OnePixel(writing(module, False), layer), (value,))


@dataclass(frozen=True)
class Recorded:
    """The module that a graph was traced from. `wanted`: which tensors that it returns are the graph's outputs (None:
    all); `calls`: all that it calls, in words; `made`: the node that computes what a call gives, and its layout."""

    module: nn.Module
    wanted: Sequence[int] | None
    calls: tuple[str, ...]
    made: dict[Made, tuple[int, Layout]]

    @staticmethod
    def of(module: nn.Module, wanted: Sequence[int] | None, lowering: Lowering, graph: Graph) -> Recorded:
        numbers = {node.name: k for k, node in enumerate(graph.nodes)}
        values = {made: (numbers.get(value.node or ""), value.layout) for made, value in lowering.values.items()}
        nodes = {made: (number, layout) for made, (number, layout) in values.items() if number is not None}
        return Recorded(module, wanted, tuple(map(where, lowering.records[0].calls)), nodes)


def assembled(lowering: Lowering, outputs: Sequence[str]) -> tuple[Graph, list[nn.Module]]:
    """The graph of what the outputs need, and its modules."""
    needed = set(outputs)
    for node in reversed(lowering.nodes):
        if node.name in needed:
            needed.update(node.inputs)
    graph = Graph(tuple(node for node in lowering.nodes if node.name in needed), tuple(outputs))
    modules = [lowering.modules[node.name] for node in graph.nodes]
    return graph, [writing(module, over) for module, over in zip(modules, graph.overwrites, strict=True)]


def writing(module: nn.Module, over: bool) -> nn.Module:
    """An activation that writes over its input where the graph says that it may, whatever its author thought of; not
    with a slope below 0, of which autograd cannot tell its input from what it made."""
    over = over and min(getattr(module, "negative_slope", 0), getattr(module, "alpha", 0)) >= 0
    if getattr(module, "inplace", over) == over:
        return module
    again = copy.copy(module)
    again.inplace = over  # type: ignore[assignment]
    return again
