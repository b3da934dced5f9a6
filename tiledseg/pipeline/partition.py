"""Cutting a network into the chunks of a pipeline, and leaving each rank with the layers of its own alone.

Layers keep their names, and a rank keeps a place for every parameter of the whole network: those of other ranks are
on the `meta` device, which holds no values, and want no gradient. So optimizers number their parameters alike on all
ranks, and checkpoints know nothing of the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from tiledseg.config.words import chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.models.layers.pixelwise import tensors_of
from tiledseg.models.network import GraphNetwork, with_channels_last
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.schedule import ChunkMap, Settings, chunk_routes

_PROBE = 8  # pixels a side of what is tried


@dataclass(frozen=True)
class NetworkCut:
    """A network's nodes over the chunks of a pipeline; `runs` are their nodes (first, stop), half-open."""

    pipeline: ChunkMap
    runs: tuple[tuple[int, int], ...]

    def layers_of(self, stage: int) -> set[int]:
        own = [run for run, rank in zip(self.runs, self.pipeline.ranks, strict=True) if rank == stage]
        return {layer for first, stop in own for layer in range(first, stop)}


def cut_network(graph: Graph, balance: Sequence[int], schedule: str, stages: int) -> NetworkCut:
    """Return the chunks of a balance that fits (see `balance.parse_balance`)."""
    runs = cuts(balance)
    return NetworkCut(ChunkMap(chunk_ranks(schedule, stages), chunk_routes(graph, runs)), runs)


@dataclass(frozen=True)
class SplitNetwork:
    """A network of which a rank has its stage's layers on `device`; `dtypes` of each tensor (see `tensor_dtypes`)."""

    network: GraphNetwork
    cut: NetworkCut
    settings: Settings
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


def split_network(
    network: GraphNetwork,
    settings: Settings,
    stage: int | None,
    device: torch.device,
    dtype: torch.dtype,
    autocast: AbstractContextManager[object] | None = None,
) -> SplitNetwork:
    """Leave the network, whole and on the CPU, the layers of `stage` alone (None: of no stage), in `dtype`.

    Raises ConfigError, on all ranks, where layers of two stages share a weight: each would add its own gradient.
    """
    cut = cut_network(network.graph, settings.balance, settings.schedule, len(settings.recompute))
    _check_shared(network, cut)
    network.to(dtype)
    dtypes = tensor_dtypes(network, autocast, device)
    keep_layers(network, set() if stage is None else cut.layers_of(stage), device, dtype)
    return SplitNetwork(network, cut, settings, dtypes, device)


def keep_layers(network: GraphNetwork, own: set[int], device: torch.device, dtype: torch.dtype) -> None:
    """Put the layers of `own` on a device, channels last, and let go of the values of all others. Weights that no layer
    takes stay where the first layer is."""
    modules = list(network.layers.values())
    kept = {id(tensor) for index in own for tensor in tensors_of(modules[index])}
    if 0 in own:
        taken = {id(tensor) for module in modules for tensor in tensors_of(module)}
        kept |= {id(tensor) for tensor in tensors_of(network)} - taken
    others = [index for index in range(len(modules)) if index not in own]
    empty: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old one, whose id stays its own
    for module in network.modules():
        for values in (module._parameters, module._buffers):
            for name, tensor in list(values.items()):
                if tensor is not None and id(tensor) not in kept:
                    values[name] = _without_values(tensor, dtype, empty)  # type: ignore[assignment]
    for index in others:
        modules[index].to("meta", dtype).requires_grad_(False)
    for index in own:
        modules[index].to(device, dtype)
        with_channels_last(modules[index])


def _check_shared(network: GraphNetwork, cut: NetworkCut) -> None:
    holder: dict[int, int] = {}
    modules = list(network.layers.values())
    for stage in sorted(set(cut.pipeline.ranks)):
        for index in sorted(cut.layers_of(stage)):
            for tensor in tensors_of(modules[index]):
                if holder.setdefault(id(tensor), stage) != stage:
                    raise ConfigError(
                        f"layer '{network.graph.nodes[index].name}' of stage {stage} shares weights with a layer of "
                        f"stage {holder[id(tensor)]}; choose a parallel.balance that leaves them on one, or give each "
                        "its own"
                    )


def _without_values(
    tensor: torch.Tensor, dtype: torch.dtype, empty: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Return the same on `meta`; one for all that share it."""
    if id(tensor) not in empty:
        meta = torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else tensor.dtype)
        made = nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta
        empty[id(tensor)] = tensor, made
    return empty[id(tensor)][1]


def tensor_dtypes(
    network: GraphNetwork, autocast: AbstractContextManager[object] | None, device: torch.device
) -> tuple[torch.dtype, ...]:
    """Return the dtype of each tensor of the graph: what a receiver allocates for one that another rank makes.

    Masks and numbers of channels have one of their own; with autocast it depends on the layer and the device. So each
    layer is tried on a few pixels, by itself, before other ranks' layers are let go. Changes no buffer. The network is
    on the CPU or on `device`.
    """
    graph, modules = network.graph, list(network.layers.values())
    channels = tensor_channels(graph, network.bands)

    def step(k: int, given: list[torch.dtype]) -> torch.dtype:
        layer = graph.layers[k]
        if layer.hands_on:
            return given[0]
        return _probe(modules[k], layer, [channels[source] for source in graph.sources[k]], given, device)

    source = next(network.parameters()).dtype if autocast is None else torch.float32
    with torch.no_grad(), autocast or nullcontext():
        return tuple(graph.fold(source, step))


def _probe(
    module: nn.Module, layer: Layer, channels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
) -> torch.dtype:
    """Return the dtype of a layer's output for inputs of so many channels."""
    needs = [layer.required_input(Interval(0, _PROBE), index) for index in range(layer.arity)]
    sides = [max(_PROBE, need.start + need.stop) for need in needs]
    inputs = [
        torch.zeros(1, count, side, side, dtype=dtype, device=device)
        for count, side, dtype in zip(channels, sides, dtypes, strict=True)
    ]
    training, home = module.training, next((p.device for p in module.parameters()), device)
    module.eval().to(device)
    result: torch.Tensor = module(*inputs)
    module.train(training).to(home)
    return result.dtype
