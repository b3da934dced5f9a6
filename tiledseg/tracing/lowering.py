"""The nodes of a graph, made from two records of a module's calls, each with the torch module that computes it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, repeat
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tiledseg.errors import TiledsegError
from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.pixelwise import Layout, OfOnePixel, Pixelwise
from tiledseg.models.layers.pixelwise import OnePixel, Weights, resolve
from tiledseg.models.layers.resampling import UpsampleModule
from tiledseg.models.norm import BatchNorm
from tiledseg.spatial.twins import spatial_layer
from tiledseg.tracing.calls import Call, Given, Made, Record, given_to, same, where

WHOLE = Layout()
ONE_PIXEL = Layout((("B",), ("C0",), (), ()), one_pixel=True)
STRANGE = "is given arguments that no tile is known to keep; write it simpler"
PERMUTED = "needs (batch, channels, height, width), and the dims were permuted; permute them back before"
OTHER_PIXELS = "joins a mean or a sum of an image with a tensor of other pixels; take it of one as large"
SIZED = "is given numbers that depend on the size of the image, or of the batch; give it fixed ones"


class RefusalError(Exception):
    """The reason why a call cannot be exact, and the remedy."""


class UnknownError(RefusalError):
    """The refusal of a call that takes the result of a refused call: the first refusal is reported alone."""


def refuse(when: object, why: str) -> None:
    """Raise RefusalError with the reason `why` if the condition `when` holds."""
    if when:
        raise RefusalError(why)


@dataclass(frozen=True)
class Value:
    """A tensor of the graph, in the module's layout. `node` is None for the result of a refused call."""

    node: str | None
    layout: Layout
    shape: tuple[int, ...]
    other_shape: tuple[int, ...]  # in the other run
    pairs: Pairs | None = field(default=None, kw_only=True)  # weights of attention, in the place of a node

    def as_meta(self, at: str) -> torch.Tensor:
        """Return a tensor of `shape` or `other_shape` (`at`) without values."""
        return torch.empty(getattr(self, at), device="meta")


@dataclass(frozen=True)
class Pairs:
    """Weights of attention: `scale` times the products of queries and keys; `softmaxed`: their softmax over keys."""

    query: Value
    key: Value
    scale: float = 1.0
    softmaxed: bool = False
    turned: bool = False  # the dim of keys comes before that of queries


Inputs = Sequence[Value]


@dataclass(frozen=True)
class Step:
    """A call in both runs, with the methods by which handlers read its arguments and add nodes."""

    call: Call
    other: Call
    lowering: Lowering
    trained: Call | None = None  # the call in training, if training makes the same calls

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument: a tensor's `Value`, or a number. Refuses a number that differs between the runs."""
        one, other = (given_to(call, index, name, default) for call in (self.call, self.other))
        refuse(not same(one, other), SIZED)
        return self.lowering.resolved(one)

    def arguments(self, index: int, name: str, default: Any = None) -> list[Any]:
        """Return an argument of both runs, which may depend on the size."""
        return [self.lowering.resolved(given_to(call, index, name, default)) for call in (self.call, self.other)]

    def given(self) -> tuple[list[Any], dict[str, Any]]:
        """Return all positional arguments, and all keyword arguments."""
        arguments = [self.argument(index, "") for index in range(len(self.call.arguments))]
        return arguments, {key: self.argument(len(arguments), key) for key in self.call.keywords}

    def options(self, first: int, **defaults: Any) -> dict[str, Any]:
        """Return arguments by name, `defaults` in the order of the function's arguments from number `first` on."""
        return {name: self.argument(at, name, default) for at, (name, default) in enumerate(defaults.items(), first)}

    def giving(self, one: tuple[int, ...], other: tuple[int, ...]) -> Step:
        """Return the step with another result: one tensor, of these shapes in the two runs."""
        return replace(self, call=replace(self.call, shapes=(one,)), other=replace(self.other, shapes=(other,)))

    def only(self, part: int = 0) -> Step:
        """Return the step with one tensor of its result alone."""
        return self.giving(self.call.shapes[part], self.other.shapes[part])

    def do(self, function: str, *arguments: Any, **keywords: Any) -> Value:
        """Lower a call of another function, in the place of this one, and return its result."""
        calls = list[Call]()
        for call, at in ((self.call, "shape"), (self.other, "other_shape")):
            given = tree_map(lambda each, at=at: each.as_meta(at) if isinstance(each, Value) else each, arguments)
            made = resolve(function)(*given, **keywords)
            result = (tuple(made.shape),), (made.is_floating_point(),)
            calls.append(Call(function, None, call.owner, call.at, arguments, keywords, *result, is_method=False))
        return self.lowering.lower(replace(self, call=calls[0], other=calls[1], trained=None))[0]

    def passed(self, value: Value, layout: Layout | None = None) -> list[Value]:
        """Return the value's node under the shapes of the call's result, in `layout`: nothing is computed."""
        return [self.made(value.node, value.layout if layout is None else layout)]

    def by(self, module: nn.Module, value: Value, what: str | None = None, layout: Layout = WHOLE) -> list[Value]:
        """Add a node for a torch module with a twin, and return its output."""
        return [self.made(self.lowering.add_module(self, module, value, what or type(module).__name__), layout)]

    def node(self, what: str, module: nn.Module, inputs: Inputs, layout: Layout = WHOLE) -> list[Value]:
        """Add a node, and return its output."""
        return [self.made(self.lowering.add(self, what, module, inputs), layout)]

    def as_called(self, name: str) -> str:
        """Return the function's name, as `Tensor.name` if a method was called."""
        return f"Tensor.{name}" if self.call.is_method and hasattr(torch.Tensor, name) else name

    def value(self, index: int = 0, name: str = "input") -> Value:
        """Return an argument. Refuses all but a tensor of the graph."""
        value = self.argument(index, name)
        if not isinstance(value, Value):
            kind = "a tensor that does not depend on the input" if isinstance(value, Given) else f"{value}"
            raise RefusalError(f"takes {kind} for '{name}'; give it a tensor that is computed from the input")
        return value

    def full(self, index: int = 0, name: str = "input") -> Value:
        """Return an argument. Refuses all layouts but (batch, channels, height, width)."""
        value = self.value(index, name)
        refuse(value.layout not in (WHOLE, ONE_PIXEL), PERMUTED)
        return value

    def planes(self, index: int = 0, name: str = "input") -> Value:
        """Return an argument. Refuses layouts whose last dims are not rows and columns."""
        value = self.value(index, name)
        last = ((), ()) if value.layout.one_pixel else (("H",), ("W",))
        refuse(value.layout.dims[-2:] != last, PERMUTED)
        return value

    def enlarged(self, value: Value) -> list[Value]:
        """Return a value of one pixel, repeated to the pixels of the call's result."""
        value = self.spread(value, (self.call.shapes[0][-2:], self.other.shapes[0][-2:]))
        dims = (*value.layout.dims[:-2], *WHOLE.dims[-2:])
        return self.passed(value, replace(value.layout, dims=dims, one_pixel=False))

    def spread(self, value: Value, pixels: Any) -> Value:
        """Return a value of one pixel, enlarged by a node for an image of `pixels`; any other value unchanged."""
        known, node = self.lowering.pixels, value.node
        if node is None or not value.layout.one_pixel or known[node] == pixels:
            return value
        ratios = {new / old for pair in zip(pixels, known[node], strict=True) for new, old in zip(*pair, strict=True)}
        refuse(len(ratios) > 1 or any(each != int(each) for each in ratios), OTHER_PIXELS)
        larger = UpsampleModule(scale_factor=int(ratios.pop()), mode="nearest")
        name = self.lowering.add(self, "spread", larger, (value,))
        known[name] = pixels
        return replace(value, node=name)

    def made(self, node: str | None, layout: Layout = WHOLE, part: int = 0) -> Value:
        """Return a part of the call's result as the value of a node, and note the node's pixels."""
        shapes = self.call.shapes[part], self.other.shapes[part]
        if node is not None and {("H",), ("W",)} <= {*layout.dims} and not layout.one_pixel:
            row, col = map(layout.dims.index, WHOLE.dims[-2:])
            self.lowering.pixels[node] = tuple((shape[row], shape[col]) for shape in shapes)
        return Value(node, layout, *shapes)


Handler = Callable[[Step], list[Value]]


class Lowering:
    """The nodes and modules of a graph that grows call by call. A call that cannot be exact adds a fault."""

    def __init__(self, one: Record, other: Record, trained: Record | None, still: bool, lower: Handler) -> None:
        self.records, self.trained, self.still, self.lower = (one, other), trained, still, lower
        self.nodes: list[Node] = []
        self.modules: dict[str, nn.Module] = {}
        self.pixels: dict[str, tuple[tuple[int, int], ...]] = {INPUT: (one.size, other.size)}  # of nodes, in both runs
        self.values: dict[Made, Value] = {}
        self.faults: list[str] = list(one.faults)
        self.pooled: dict[str, str] = {}  # nodes on means of parts of the image: the node of these means
        self.truths: dict[str, str] = {}  # nodes of booleans or integers: the node that they are computed of
        self.own_gradients = list[str]()  # why a declared module's backward pass is not torch's alone
        self.untrained: str | None = None  # why the graph cannot do what the module does in training
        self.positions: dict[Any, Value] = {}  # tensors computed from the image's size, by their `Given`
        self.placed: list[Any] = []  # `positions.Placed`
        self.in_other_dtype: Callable[[], Sequence[Record]] = tuple  # records both runs in another dtype

    def run(self, bands: int) -> None:
        one, other = self.records
        self.values[Made(-1)] = Value(INPUT, WHOLE, *((run.batch, bands, *run.size) for run in (one, other)))
        trained = chain(self.trained.calls if self.trained else (), repeat(None))
        for index, calls in enumerate(zip(one.calls, other.calls, trained, strict=False)):
            step, call = Step(calls[0], calls[1], self, calls[2]), calls[0]
            made = [step.made(None, part=part) for part in range(len(call.shapes))]
            try:
                made = self.lower(step)
            except Exception as error:  # a handler fails at arguments that it was not written for
                named = isinstance(error, RefusalError | TiledsegError)
                if not (isinstance(error, UnknownError) and self.faults):
                    self.faults.append(f"{where(call)} {error if named else STRANGE}")
            for part, value in enumerate(made):
                self.values[Made(index, part)] = value

    def resolved(self, argument: Any) -> Any:
        """Return an argument with each `Made` replaced by its `Value`."""
        if isinstance(argument, Made):
            return self.values[argument]
        return tuple(map(self.resolved, argument)) if isinstance(argument, tuple) else argument

    def add(self, step: Step, what: str, module: nn.Module, inputs: Inputs, layer: Layer | None = None) -> str:
        """Add a node, named after the module that calls and its function. `layer`: in place of what `module` states."""
        twin = spatial_layer(step.call.owner, module)
        rows, cols = layer or twin.rows, layer or twin.cols
        name = step.call.owner if step.call.module is not None else f"{step.call.owner}.{what}".lstrip(".")
        names = (f"{name or what}#{number}" if number > 1 else name or what for number in count(1))
        name = next(each for each in names if each not in self.pixels)
        if isinstance(rows, Pixelwise):
            full = [value for value in inputs if not value.layout.one_pixel] or inputs
            pixels = max(self.pixels[str(value.node)] for value in full)
            inputs = [step.spread(value, pixels) for value in inputs]
        sources = tuple(value.node for value in inputs if value.node is not None)
        roots = {self.pooled.get(source) for source in sources}
        refuse(len(roots) > 1, "joins means of parts of the image with other tensors; resize them before")
        if (root := roots.pop()) is not None:
            self.pooled[name] = root
        self.nodes.append(Node(name, rows, sources, cols=None if cols == rows else cols))
        self.modules[name] = module
        self.pixels[name] = self.pixels[sources[0]]
        return name

    def add_module(self, step: Step, module: nn.Module, value: Value, what: str) -> str:
        """Add a node for a torch module with a twin, which states its geometry."""
        twin = spatial_layer(step.call.owner, module)
        rows, cols = twin.rows, twin.cols
        few = value.layout.one_pixel or value.node in self.pooled
        if few and rows.tracks and self.still and isinstance(module, BatchNorm):
            module = copy.copy(module)
            module.still = True
        elif few and "batch" in (rows.statistics, cols.statistics):
            why = f"{where(step.call)} learns from a few means an image, in training those of one image alone"
            self.untrained = self.untrained or why
        if not value.layout.one_pixel:
            return self.add(step, what, module, (value,))
        around = any(layer.output_size(1) != 1 for layer in (rows, cols))
        refuse(around, "works on neighbours, and a mean of the image has none; leave it out")
        layer = OfOnePixel(rows.output_channels(value.shape[1]), sum(p.numel() for p in module.parameters()))
        return self.add(step, what, OnePixel(in_place_if(module, False), layer), (value,))


def is_channels(dim: Sequence[str]) -> bool:
    """Return True for a dim of channels alone."""
    return bool(dim) and all(atom.startswith("C") for atom in dim)


def shared(weights: Sequence[Given]) -> Weights:
    """Return the container by which a node shares weights and buffers of the traced module."""
    return Weights([weight.owner or weight.tensor for weight in weights])


def assembled(lowering: Lowering, outputs: Sequence[str], first: str = INPUT) -> tuple[Graph, list[nn.Module]]:
    """Return the graph of the nodes that the outputs need after the node `first`, its input; and their modules."""
    needed, nodes = set(outputs), list[Node]()
    for node in reversed(lowering.nodes):
        if node.name in needed and node.name != first:
            needed.update(node.inputs)
            nodes.insert(0, replace(node, inputs=tuple(INPUT if name == first else name for name in node.inputs)))
    graph = Graph(tuple(nodes), tuple(outputs))
    modules = [lowering.modules[node.name] for node in nodes]
    return graph, [in_place_if(module, over) for module, over in zip(modules, graph.overwrites, strict=True)]


def in_place_if(module: nn.Module, over: bool) -> nn.Module:
    """Return an activation with `inplace` as the graph allows (`over`), whatever its author chose. One with a slope
    below 0 is never in place: autograd cannot tell its input from its output."""
    over = over and min(getattr(module, "negative_slope", 0), getattr(module, "alpha", 0)) >= 0
    if getattr(module, "inplace", over) == over:
        return module
    again = copy.copy(module)
    again.inplace = over  # type: ignore[assignment]
    return again
