"""The graph of any module, from records of its calls in two runs, `one` and `other`, at sizes far apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import nn
from torch.jit import ScriptModule

from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.shapes import output_size
from tiledseg.models.layers.times import TimeSeries
from tiledseg.models.network import GraphNetwork
from tiledseg.tracing.calls import Made, Record, differing, values_in, where
from tiledseg.tracing.compare import check_traced, holds_anywhere
from tiledseg.tracing.declared import window_sizes
from tiledseg.tracing.functions.handlers import lowered
from tiledseg.tracing.lowering import WHOLE, Lowering, Value, assembled
from tiledseg.tracing.positions import breaks_rule
from tiledseg.tracing.runs import FAR, ModuleRuns, OtherSizeError, Recorded, Size, legal_size, unsteady
from tiledseg.tracing.state import ModuleState, in_mode, own_gradients

# Pairs of sizes (height, width) of the two runs: multiples of the networks' strides, large enough for their deepest
# level. The second size is far from the first, so a branch on a size between them shows.
SIZES = [((64, 96), (160, 224)), ((128, 192), (320, 448)), ((256, 384), (640, 896))]
# Networks without padding take other sizes, such as 572 = 35 x 16 + 12.
SIZES += [((128 + more, 160 + more), (192 + more, 224 + more)) for more in range(2, 32, 2)]


def trace(module: nn.Module, bands: int, outputs: Sequence[int] | None = None, *, still: bool = False) -> GraphNetwork:
    """Return the network that computes what `module` does for images of `bands` bands, by a graph with its weights.

    `outputs`: which of the tensors that the module returns are the network's; by default all, then of one size.
    `still`: running statistics will be constants in training too (`GraphNetwork.hold_statistics`). Dropout drops whole
    channels, whatever the module drops, drawn as `models.dropout` says. A module that computes something else in
    training than in evaluation is refused in training mode; in evaluation mode its network only maps.

    Raises ConfigError that lists every call that would not be exact on tiles: the module's path, file and line, the
    reason, the remedy. Raises it too where the module cannot be run, or does not do the same at every size.
    """
    for name, each in module.named_modules():
        if isinstance(each, ScriptModule):
            raise ConfigError(f"'{name or 'the module itself'}' is compiled by torch.jit; give what it was made of")
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        raise ConfigError("all modules have a forward hook (register_module_forward_hook); remove it")
    source, refusals = ModuleRuns(module, bands), list[ConfigError | GeometryError]()
    for sizes in window_sizes(module) or SIZES:
        try:
            return _traced(source, sizes, outputs, still)
        except (OtherSizeError, GeometryError) as error:
            refusals.append(error)
    if not isinstance(refusals[0], OtherSizeError) or not refusals[0].__cause__:
        raise refusals[0]
    remedy = "give the bands that it takes; if a size is fixed in it, build it for any, or run it by crops (window)"
    raise ConfigError(f"{refusals[0]}; {remedy}") from refusals[0].__cause__


def _traced(source: ModuleRuns, sizes: tuple[Size, Size], indices: Sequence[int] | None, still: bool) -> GraphNetwork:
    """Return the network of a module, traced by runs at two sizes. Raise OtherSizeError where other sizes may do."""
    module, changed, trained = source.module, None, None
    with suppress(OtherSizeError):  # a module that needs values; PairsError ends the trace before memory runs out
        if different := differing(*source.pair(sizes, fake=True)):
            raise unsteady(different)
    one, other = source.pair(sizes)
    if one.hangs:  # the first call hangs hooks, as modules of transformers do: keep them, and record again
        before = one, other
        with suppress(ConfigError):
            source.run(1, sizes[0], fake=True, hangs=True)
        one, other = source.pair(sizes)
        changed = differing(before[0], one, "at its next call") or differing(before[1], other, "at its next call")
    if different := changed or differing(one, other):
        raise _refused(one.faults) if one.faults else unsteady(different)
    try:
        trained, trained_other = source.pair(sizes, True, gradients=True)
        untrained = differing(one, trained, "in training") or differing(other, trained_other, "in training")
    except OtherSizeError as error:
        untrained = str(error).replace("the module", "it", 1)
    lowering = Lowering(one, other, trained, still, lowered)
    lowering.in_other_dtype = cache(lambda: source.in_other_dtype().pair(sizes))
    lowering.run(source.bands)
    outputs = _outputs(lowering, one, indices)
    if one.moved:
        lowering.faults.append(f"the module moves its buffer '{one.moved[0]}' in evaluation; leave it to training")
    if one.drew and not lowering.faults:
        lowering.faults.append(f"the module draws {one.drew[0]}'s random numbers in evaluation; make them a buffer")
    if lowering.faults:
        raise _refused(lowering.faults)
    graph, modules = assembled(lowering, [value.node for value in outputs if value.node is not None])
    for height, width in sizes:
        output_size(graph, height), output_size(graph.along_columns, width)
    third = source.elsewhere(graph, sizes[0])  # from here on the graph stands, and further runs must agree with it
    if different := differing(one, third, other=other) or breaks_rule(lowering.placed, graph, source.bands, third):
        raise unsteady(different)
    runs = [one, *([trained] if trained else [])]
    kept = [name for run in runs for name in run.kept]
    for training, run in enumerate(runs) if kept else ():
        again = source.run(run.batch, run.size, bool(training), first=trained is not None)
        if reason := differing(run, again, "at its next call"):
            raise ConfigError(f"the module reads '{kept[0]}', which an earlier call set: {reason}; compute it anew")
    graded = source.run(2, sizes[0], gradients=True)
    own_backward = own_gradients(module) or next(iter(lowering.own_gradients + graded.own_gradients), None)
    own_backward = own_backward or differing(one, graded, "with gradients")
    untrained = own_backward or untrained or lowering.untrained
    if untrained and module.training:
        what = f"the module does not do in training what it does in evaluation: {untrained}"
        raise ConfigError(f"{what}; switch that off, or map with module.eval()")
    whole = module.whole if isinstance(module, TimeSeries) else module  # its weights keep their names
    network = GraphNetwork(graph, source.bands, modules, whole, untrained, one.form if indices is None else None)
    network.own_gradients, network.origin = own_backward, ModuleState(module, kept)
    numbers = {node.name: k for k, node in enumerate(graph.nodes)}
    made = {m: (numbers[v.node], v.layout) for m, v in lowering.values.items() if v.node and v.node in numbers}
    network.recorded = Recorded(source, indices, tuple(map(where, one.calls)), made, sizes, lowering.placed)
    for mode in (False, True)[: 1 + module.training]:
        with in_mode(network, mode), torch.set_grad_enabled(mode and own_backward is None):
            network.recorded.check(network, [(n, legal_size(graph, sizes[0], least)) for n, least in FAR])
    check_traced(network, [source.probe(each.batch, each.size) for each in (one, third)], still)
    odd = source.probe(1, (third.size[0] + 1, third.size[1] + 1))
    network.only_size = None if holds_anywhere(network, odd) else third.size
    return network


def _refused(faults: list[str]) -> ConfigError:
    """Return the refusal that lists the faults: those that differ in numbers alone once, with their count."""
    alike: dict[str, list[str]] = {}  # by function and reason
    for fault in dict.fromkeys(faults):
        alike.setdefault(re.sub(r"^('.*?' \(|.* at (?=\S*:\d))|\S*:\d+|\d+", "", fault), []).append(fault)
    places = [each[0] + (f" ({len(each)} such places)" if len(each) > 1 else "") for each in alike.values()]
    listed = "; ".join(f"({number}) {fault}" for number, fault in enumerate(places, 1))
    kind = OtherSizeError if any("every size" in fault or "another size" in fault for fault in faults) else ConfigError
    return kind(f"the module cannot be computed exactly on tiles: {listed}")


def _outputs(lowering: Lowering, one: Record, indices: Sequence[int] | None) -> list[Value]:
    """Return the values that the module returns. Note a fault for each that no network can return."""
    returned, faults = values_in(one.returned), lowering.faults
    if not returned or max(indices or (), default=0) >= len(returned):
        faults.append(f"the module returns {len(returned)} tensors; return one, or name those that are there")
        return []
    wanted = returned if indices is None else [returned[index] for index in indices]
    outputs = [lowering.values[each] for each in wanted if isinstance(each, Made)]
    unseen = any(value.node is None for value in outputs) and not faults
    odd = [value for value in outputs if value.node and (value.layout != WHOLE or value.node in lowering.pooled)]
    truths = any(value.node in lowering.truths for value in outputs)
    sizes = dict.fromkeys(" x ".join(map(str, value.shape[2:])) for value in outputs)
    checks = [
        (len(outputs) < len(wanted), "a tensor that does not depend on its input; leave it out"),
        (unseen, "places of maxima, or weights of attention; leave them out"),
        (truths, "booleans or whole numbers; return the scores that they are made of"),
        *((True, f"{value.shape}; return (batch, channels, height, width) of all pixels") for value in odd),
        (len(sizes) > 1, f"tensors of {', '.join(sizes)} pixels; return those of one size"),
    ]
    faults += [f"the module returns {what}" for holds, what in checks if holds]
    return outputs
