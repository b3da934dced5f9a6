"""From two records of a module's calls to the nodes of a graph, each with the module that computes it.

Two runs at two sizes make the same calls, or the module is refused. A number that differs between them depends on the
size; only those functions are taken for which that is known to be a factor, a crop, or another tensor's size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from tiledseg.comm.axes import serial_axes
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layer import Layer
from tiledseg.geometry.pixelwise import Cut, Formula, Layout, OfOnePixel, Pixelwise, Slot
from tiledseg.models.pixelwise import OnePixel, PixelFunction, Weights
from tiledseg.spatial.convert import convert_layer
from tiledseg.tracing.layouts import Dims, is_channels
from tiledseg.tracing.record import Call, Given, Made, Record, values_in

WHOLE = Layout()
ONE_PIXEL = Layout((("B",), ("C0",), (), ()), one_pixel=True)


class RefusalError(Exception):
    """Why a call cannot be exact, and what to do."""


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

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """As the call was given it: a tensor's `Value`, or what it is."""
        return self._of(self.call, index, name, default)

    def arguments(self, index: int, name: str, default: Any = None) -> tuple[Any, Any]:
        """In either run: for what may depend on the size."""
        return self._of(self.call, index, name, default), self._of(self.other, index, name, default)

    def _of(self, call: Call, index: int, name: str, default: Any) -> Any:
        given = call.arguments[index] if index < len(call.arguments) else call.keywords.get(name, default)
        return self.lowering.resolved(given)

    def as_called(self, name: str) -> str:
        """The function by its name, or the tensor's method of that name where the author called one."""
        return f"Tensor.{name}" if self.call.is_method and hasattr(torch.Tensor, name) else name

    def value(self, index: int = 0, name: str = "input") -> Value:
        found = self.argument(index, name)
        if not isinstance(found, Value):
            raise RefusalError("takes a tensor there that does not depend on the input; compute it from the input")
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
        if _constants(self.call) != _constants(self.other):
            raise RefusalError("is given numbers that depend on the image's size; give it fixed ones")


class Lowering:
    """Nodes and modules of a graph, call by call; what cannot be exact is a fault, and the rest is still looked at."""

    def __init__(self, one: Record, other: Record) -> None:
        self.records = one, other
        self.nodes: list[Node] = []
        self.modules: dict[str, nn.Module] = {}
        self.pixels: dict[str, tuple[tuple[int, int], ...]] = {INPUT: (one.size, other.size)}  # in either run
        self.values: dict[Made, Value] = {Made(-1): Value(INPUT, WHOLE, (), ())}
        self.faults: list[str] = list(one.faults)
        self._names = {INPUT}
        self._axes = serial_axes()

    def run(self, bands: int, lower: Callable[[Step], list[Value]]) -> None:
        one, other = self.records
        self.values[Made(-1)] = Value(INPUT, WHOLE, (2, bands, *one.size), (2, bands, *other.size))
        for index, (call, again) in enumerate(zip(one.calls, other.calls, strict=True)):
            step = Step(call, again, self)
            try:
                made = lower(step)
            except UnknownError:
                made = self._stand_ins(step)
            except (RefusalError, ConfigError) as error:
                self.faults.append(f"{where(call)} {error}")
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
        self.nodes.append(Node(name, layer, sources, **cols))
        self.modules[name] = module
        self.pixels[name] = self.pixels[sources[0]]
        return name

    def add_module(self, step: Step, module: nn.Module, value: Value, what: str | None = None) -> str:
        """A torch module with a twin, which knows its geometry."""
        if value.node is None:
            raise UnknownError
        rows, cols = convert_layer(step.call.owner, module, self._axes).descriptions
        what = what or type(module).__name__
        if not value.layout.one_pixel:
            return self.add(step, what, rows, module, (value,), cols=None if rows == cols else cols)
        if any(layer.output_size(1) != 1 or layer.statistics for layer in (rows, cols)):
            raise RefusalError("works on pixels around one that is all there is; leave it away")
        layer = OfOnePixel(rows.output_channels(value.shape[1]), sum(p.numel() for p in module.parameters()))
        name = self.add(step, what, layer, OnePixel(_writing(module, False), layer), (value,))
        return name


class UnknownError(RefusalError):
    """What is computed from a refused call says nothing of its own."""


def where(call: Call) -> str:
    kind = type(call.module).__name__ if call.module is not None else call.function
    return f"'{call.owner or 'the module itself'}' ({kind}, {call.at})"


def pixelwise(
    step: Step,
    function: str,
    arguments: Sequence[Any],
    keywords: dict[str, Any],
    layout: Layout | None = None,
    broadcasts: bool = True,
) -> list[Value]:
    """A node for a call of single pixels; `layout`: of what it gives, that of the inputs unless given. `broadcasts`:
    whether its weights stand beside the tensor's dims."""
    inputs: list[Value] = []
    weights: list[Given] = []
    given = _slots((tuple(arguments), tuple(sorted(keywords.items()))), inputs, weights)
    beside = [value.tensor for value in values_in((tuple(arguments), keywords)) if isinstance(value, Given)]
    common = _common_layout(inputs)
    after = layout or common
    for weight in beside if broadcasts else ():
        _check_weight(weight, common)
    made = []
    for part, shape in enumerate(step.call.shapes):
        layer = Pixelwise(
            function,
            given[0],
            _channels(after, shape),
            given[1],
            tuple(value.layout for value in inputs),
            after,
            tuple(tuple(weight.tensor.shape) for weight in weights),
            part if len(step.call.shapes) > 1 else None,
        )
        node = step.lowering.add(
            step, function.removeprefix("Tensor."), layer, PixelFunction(layer, shared(weights)), inputs
        )
        made.append(step.made(node, after, part))
    return made


def _slots(value: Any, inputs: list[Value], weights: list[Given]) -> Any:
    if isinstance(value, Value):
        if value not in inputs:
            inputs.append(value)
        return Slot(inputs.index(value))
    if isinstance(value, Given):
        return _given_slot(value, weights)
    if isinstance(value, tuple | list):
        return tuple(_slots(each, inputs, weights) for each in value)
    return value


def _given_slot(value: Given, weights: list[Given]) -> Any:
    if value.name is None and value.weights:
        return formula(value, weights)
    if value.name is None and value.tensor.numel() == 1:
        return value.tensor.item()
    place = next((at for at, weight in enumerate(weights) if weight.tensor is value.tensor), len(weights))
    if place == len(weights):
        weights.append(value)
    return Slot(place, True)


def shared(weights: Sequence[Given]) -> Weights:
    return Weights([weight.owner or weight.tensor for weight in weights])


def formula(value: Given, weights: list[Given]) -> Any:
    """How a weight is computed from others, which are added to `weights`."""
    if value.name is not None or value.recipe is None or not value.weights:
        return _given_slot(value, weights)
    function, arguments, keywords, part = value.recipe
    if function.endswith("_") and not function.endswith("__"):
        raise RefusalError(f"takes a weight that {function} has written over; compute it without")
    given = _formula_arguments(arguments, weights)
    named = tuple((key, _formula_arguments(each, weights)) for key, each in sorted(keywords.items()))
    return Formula(function, given, named, part)


def _formula_arguments(value: Any, weights: list[Given]) -> Any:
    if isinstance(value, Given):
        return formula(value, weights)
    if isinstance(value, tuple):
        return tuple(_formula_arguments(each, weights) for each in value)
    return Cut(value.start, value.stop, value.step) if isinstance(value, slice) else value


def _common_layout(inputs: Sequence[Value]) -> Layout:
    """That of what the inputs give together: pixels where one of them has pixels."""
    if any(value.node is None for value in inputs):
        raise UnknownError
    full = [value.layout for value in inputs if not value.layout.one_pixel] or [value.layout for value in inputs]
    ranks = {len(value.layout.dims) for value in inputs}
    kinds = {replace(layout, channels=()) for layout in full}
    if len(kinds) > 1 or len(ranks) > 1 or any(not _fits(value.layout, full[0]) for value in inputs):
        raise RefusalError("joins tensors that lie in different layouts; bring them to one before")
    return full[0]


def _fits(one: Layout, other: Layout) -> bool:
    """Whether dims that hold pixels, or channels, are the same in both."""
    pairs = zip(one.dims, other.dims, strict=False)
    return all(is_channels(a) == is_channels(b) or not (a and b) for a, b in pairs)


def _check_weight(weight: torch.Tensor, layout: Layout) -> None:
    """Refuse a weight that has values of its own for pixels, or images."""
    if weight.dim() > len(layout.dims):
        raise RefusalError(f"takes a weight of shape {tuple(weight.shape)}, which has more dims than the tensor")
    if weight.dim() == 0:
        return
    for dim, size in zip(layout.dims[-weight.dim() :], weight.shape, strict=True):
        if size > 1 and not is_channels(dim):
            raise RefusalError(
                f"takes a weight of shape {tuple(weight.shape)}, one for each pixel of one size of image; use one a "
                "channel"
            )


def _channels(layout: Layout, shape: Sequence[int]) -> int:
    if layout.channels:
        return prod(layout.channels)
    return prod(size for dim, size in zip(layout.dims, shape, strict=True) if is_channels(dim))


def channel_dims(value: Value, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    """Dims by number from the front. Refuses those that hold pixels or images."""
    count = len(value.layout.dims)
    numbers = range(count) if dims is None else [dims] if isinstance(dims, int) else dims
    found = tuple(sorted(number % count for number in numbers))
    if not all(is_channels(value.layout.dims[number]) for number in found):
        raise RefusalError("works along pixels or images, of which a tile has a part only; work along channels")
    return found


def without(layout: Layout, dims: Sequence[int], keep: bool) -> Layout:
    """The layout after channels have been reduced to one."""
    gone = {atom for number in dims for atom in layout.dims[number]}
    stay = [(f"C{index}", size) for index, size in enumerate(layout.channels) if f"C{index}" not in gone]
    names = {atom: f"C{index}" for index, (atom, _) in enumerate(stay)}
    one: tuple[str, ...] = () if stay else ("C0",)  # a single channel is left
    left: Dims = tuple(
        one if number in dims else tuple(names.get(atom, atom) for atom in dim)
        for number, dim in enumerate(layout.dims)
        if keep or number not in dims
    )
    return replace(layout, dims=left, channels=tuple(size for _, size in stay) if len(stay) > 1 else ())


def _constants(call: Call) -> tuple[Any, ...]:
    return _plain(call.arguments), tuple((key, _plain(value)) for key, value in call.keywords.items())


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value)
    if isinstance(value, Given):
        if value.name or value.weights:
            return value.name, tuple(value.tensor.shape)
        return tuple(value.tensor.shape), tuple(value.tensor.flatten().tolist())
    return value


def differing(one: Record, other: Record) -> str | None:
    """Where two runs go different ways; None where they do not."""
    for call, again in zip(one.calls, other.calls, strict=False):
        same = call.function == again.function and call.module is again.module and call.at == again.at
        if not same or list(_made(call)) != list(_made(again)):
            return f"{where(call)} comes next at {one.size} pixels, and {where(again)} at {other.size}"
    if len(one.calls) != len(other.calls):
        longer = max(one, other, key=lambda each: len(each.calls))
        return f"{where(longer.calls[min(len(one.calls), len(other.calls))])} comes at {longer.size} pixels only"
    return None


def differing_in_training(one: Record, trained: Record) -> str | None:
    """What a module does otherwise in training than in evaluation, dropout apart; None where nothing."""
    different = differing(one, trained)
    if different:
        return different.replace(f" at {one.size} pixels, and", " in evaluation, and", 1).replace(
            f" at {trained.size}", " in training"
        )
    for call, again in zip(one.calls, trained.calls, strict=True):
        if "dropout" not in call.function and _constants(call) != _constants(again):
            return f"{where(call)} is given other numbers"
    if one.given != trained.given:
        return "it computes other things from its weights"
    return None


def _made(call: Call) -> list[Made]:
    return [value for value in values_in((call.arguments, call.keywords)) if isinstance(value, Made)]


def assembled(lowering: Lowering, outputs: Sequence[str]) -> tuple[Graph, list[nn.Module]]:
    """The graph of what the outputs need, and its modules."""
    needed = set(outputs)
    for node in reversed(lowering.nodes):
        if node.name in needed:
            needed.update(node.inputs)
    graph = Graph(tuple(node for node in lowering.nodes if node.name in needed), tuple(outputs))
    modules = [lowering.modules[node.name] for node in graph.nodes]
    return graph, [_writing(module, over) for module, over in zip(modules, graph.overwrites, strict=True)]


def _writing(module: nn.Module, over: bool) -> nn.Module:
    """An activation that writes over its input where the graph says that it may, whatever its author thought of."""
    if getattr(module, "inplace", over) == over:
        return module
    again = copy.copy(module)
    again.inplace = over  # type: ignore[assignment]
    return again
