"""Any module as a graph: `trace`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.receptive_field import output_size
from tiledseg.models.layers.block import BlockModule
from tiledseg.models.network import GraphNetwork
from tiledseg.spatial.convert import POINTWISE, TWINS, WHOLE_IMAGE_TWINS
from tiledseg.tracing.functions.handlers import handler_of, unit
from tiledseg.tracing.functions.names import REASONS, UNKNOWN
from tiledseg.tracing.lowering import (
    WHOLE,
    Lowering,
    RefusalError,
    Step,
    Value,
    assembled,
)
from tiledseg.tracing.memory import with_measured_memory
from tiledseg.tracing.record import Made, Record, record, values_in
from tiledseg.tracing.runs import differing, differing_in_training

# Sizes of the runs, (height, width): multiples of what networks halve by, large enough for their deepest level. The
# second is far from the first, so that a branch between them is seen.
SIZES = [((64, 96), (160, 224)), ((128, 192), (320, 448)), ((256, 384), (640, 896))]
# Networks without padding take others: such as 572 = 35 x 16 + 12.
SIZES += [((128 + more, 160 + more), (192 + more, 224 + more)) for more in range(2, 32, 2)]
RESIZING = (
    nn.Upsample,
    nn.UpsamplingNearest2d,
    nn.UpsamplingBilinear2d,
)  # to a size, or by a factor: known at the call
TOLERANCE = {torch.float64: 1e-11}


def trace(module: nn.Module, bands: int, outputs: Sequence[int] | None = None, *, still: bool = False) -> GraphNetwork:
    """The network that computes what `module` does for images of `bands` bands, as a graph.

    `outputs`: which of the tensors that the module returns (in a tuple, list or dict) are the network's; all unless
    given, which then are of one size.

    `still`: running statistics will be constants in training too (`GraphNetwork.hold_statistics`); batch norms of few
    means of an image, which are refused in training, are constants then from the beginning.

    It has the module's weights and buffers, the same tensors under the same names: to train one trains the other.
    Dropout drops whole channels, whatever the module drops: drawn by torch's generator where the network is called by
    itself, and by seed, step and image in training of ours (`models.dropout`).

    A module that does something else in training, such as dropping whole paths, is refused where it is in training
    mode; in evaluation mode it gives a network that maps and cannot be set to train.

    Raises ConfigError that lists every call that would not be exact on tiles: the module's path, file and line, the
    reason, what to do; or that says where the module cannot be run, or does not do the same at every size.
    """
    scripted = [name or "the module itself" for name, each in module.named_modules() if isinstance(each, ScriptModule)]
    if scripted:
        raise ConfigError(
            f"'{scripted[0]}' is compiled by torch.jit, and its calls cannot be seen; give what it was made of"
        )
    first = None
    for sizes in SIZES:
        try:
            return _traced(module, bands, sizes, outputs, still)
        except (ConfigError, GeometryError) as error:
            first = first or error
            if not isinstance(error, OtherSizeError | GeometryError):
                break
    assert first is not None, "sizes are tried"
    raise first


class OtherSizeError(ConfigError):
    """A refusal that another size of the image may not meet."""


def _traced(
    module: nn.Module, bands: int, sizes: tuple[tuple[int, int], ...], wanted: Sequence[int] | None, still: bool
) -> GraphNetwork:
    with _in_mode(module, False):
        one, other = (_record(module, bands, size) for size in sizes)
    different = differing(one, other)
    if different and one.faults:
        raise _refused(one.faults)
    if different:
        raise ConfigError(
            f"the module does not call the same at every size: {different}; let no branch ask for the size"
        )
    lowering = Lowering(one, other, still)
    lowering.run(bands, _lowered)
    outputs = _outputs(lowering, one, wanted)
    if one.drew and not lowering.faults:
        lowering.faults.append(
            f"the module draws {one.drew[0]}'s random numbers in evaluation too, which no graph keeps; leave it to "
            "training, or make them a buffer"
        )
    if lowering.faults:
        raise _refused(lowering.faults)
    graph, modules = assembled(lowering, [value.node for value in outputs if value.node is not None])
    untrained = _why_untrained(module, bands, one) or lowering.untrained
    if untrained and module.training:
        raise ConfigError(
            f"the module does not do in training what it does in evaluation: {untrained}; set that off, or trace "
            "module.eval() to map with it"
        )
    graph = graph if untrained else with_measured_memory(graph, bands, modules)
    network = GraphNetwork(graph, bands, modules, module, untrained, one.form if wanted is None else None)
    for size in sizes:
        _check_size(graph, size)
    _check(network, module, bands, sizes[0], wanted)
    return network


def _check_size(graph: Graph, size: tuple[int, int]) -> None:
    """Raises GeometryError where the geometry refuses a size at which the module has run."""
    try:
        output_size(graph, size[0])
        output_size(graph.along_columns, size[1])
    except GeometryError as error:
        if not any(layer.statistics == "image" for layer in graph.layers):
            raise
        raise GeometryError(
            f"{str(error).rsplit('; ', 1)[0]}; a mean over the image counts as large as the tensor that it is taken "
            "of: take it of a tensor as large as what it is joined to"
        ) from None


def _refused(faults: list[str]) -> ConfigError:
    listed = "; ".join(f"({number}) {fault}" for number, fault in enumerate(dict.fromkeys(faults), 1))
    kind = OtherSizeError if any("every size" in fault or "another size" in fault for fault in faults) else ConfigError
    return kind(f"the module cannot be computed exactly on tiles: {listed}")


def _why_untrained(module: nn.Module, bands: int, one: Record) -> str | None:
    """Why the graph of what a module does in evaluation is not that of what it does in training; None where it is."""
    with _in_mode(module, True):
        try:
            trained = record(module, _probe(module, bands, one.size), _is_unit)
        except Exception as error:  # whatever the module raises
            return f"it does not run: {type(error).__name__}: {error}"
    return differing_in_training(one, trained)


@contextmanager
def _in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for each, before in modes:
            each.training = before


def _probe(module: nn.Module, bands: int, size: tuple[int, int]) -> torch.Tensor:
    weight = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
    draw = torch.Generator().manual_seed(0)
    return torch.randn(2, bands, *size, generator=draw).to(weight.device, weight.dtype)


def _record(module: nn.Module, bands: int, size: tuple[int, int]) -> Record:
    try:
        return record(module, _probe(module, bands, size), _is_unit)
    except Exception as error:  # whatever the module raises
        raise OtherSizeError(
            f"the module does not run on {bands} bands of {size[0]} x {size[1]} pixels: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}; give the bands that it takes, or mend it"
        ) from error


def _is_unit(module: nn.Module) -> bool:
    kind = type(module)
    own = isinstance(module, BlockModule) and module.speaks_for_blocks()
    asked = kind in RESIZING or getattr(module, "return_indices", False) or getattr(module, "ceil_mode", False)
    return own or (kind in TWINS and not asked) or kind in WHOLE_IMAGE_TWINS or kind in POINTWISE


def _lowered(step: Step) -> list[Value]:
    if step.call.module is not None:
        return unit(step)
    handler = handler_of(step.call.function)
    if handler is None:
        raise RefusalError(REASONS.get(step.call.function, UNKNOWN))
    return handler(step)


def _outputs(lowering: Lowering, one: Record, wanted: Sequence[int] | None) -> list[Value]:
    returned = list(values_in(one.returned))
    if not returned or max(wanted or (), default=0) >= len(returned):
        lowering.faults.append(f"the module returns {len(returned)} tensors; return one, or name those that are there")
        return []
    known = [lowering.values.get(value) if isinstance(value, Made) else None for value in _wanted(returned, wanted)]
    found = [value for value in known if value is not None]
    if len(found) < len(known):
        lowering.faults.append("the module returns a tensor that does not depend on its input; leave it away")
    if any(value.node is None for value in found) and not lowering.faults:
        lowering.faults.append("the module returns places of the whole image's maxima; return the maxima alone")
    for value in found:
        if value.node in lowering.pooled:
            lowering.faults.append(f"the module returns {value.shape}, means of parts of the image; resize them to it")
        if value.node is not None and value.layout != WHOLE:
            lowering.faults.append(f"the module returns {value.shape}; return (batch, channels, height, width)")
    if len({value.shape[2:] for value in found}) > 1:
        listed = ", ".join(f"{value.shape[2]} x {value.shape[3]}" for value in found if len(value.shape) == 4)
        lowering.faults.append(f"the module returns tensors of {listed} pixels; say which are wanted: outputs=[0]")
    return found


def _wanted(values: Sequence[Any], wanted: Sequence[int] | None) -> list[Any]:
    return [values[index] for index in (range(len(values)) if wanted is None else wanted)]


def _check(
    network: GraphNetwork, module: nn.Module, bands: int, size: tuple[int, int], wanted: Sequence[int] | None
) -> None:
    """Raise ConfigError where the graph does not give what the module gives: something was not seen."""
    x_BCHW = _probe(module, bands, size)
    with torch.no_grad(), _in_mode(network, False), _in_mode(module, False):
        expected = module(x_BCHW)
        try:
            found = network(x_BCHW)
        except Exception as error:  # a function that takes other things than it was thought to
            raise ConfigError(
                f"the module's graph does not run: {type(error).__name__}: {' '.join(str(error).split())[:200]}; write "
                "that function in other words, and please report it"
            ) from error
    pairs = list(zip(_tensors(found), _wanted(_tensors(expected), wanted), strict=True))
    shapes = [(tuple(a.shape), tuple(b.shape)) for a, b in pairs if a.shape != b.shape]
    if shapes:
        found_shape, wanted_shape = shapes[0]
        raise ConfigError(
            f"the module's graph gives {found_shape} in place of {wanted_shape}; please report the module"
        )
    worst = max(((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs)
    if not worst <= TOLERANCE.get(x_BCHW.dtype, 1e-4):
        raise ConfigError(
            f"the module's graph gives outputs that differ from the module's by {worst:.1e}: something that it does "
            "was not seen, such as writing into a view; write it without"
        )


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []
