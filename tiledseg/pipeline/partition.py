"""Partition of a network into the chunks of a pipeline; each rank keeps only the values of its own layers.

Layers keep their names, and a rank keeps every parameter of the whole network: those of other ranks are on the `meta`
device, without values or gradients. So optimizers number their parameters alike on all ranks, and checkpoints do not
depend on the split.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.models.layers.pixelwise import tensors_of
from tiledseg.models.network import GraphNetwork, with_channels_last
from tiledseg.pipeline.schedule import ChunkMap, Settings

_PROBE = 8  # least pixels a side of the inputs on which layers are tried


@dataclass(frozen=True)
class SplitNetwork:
    """A network with the layers of one stage on `device`, and the dtype of each tensor (see `tensor_dtypes`)."""

    network: GraphNetwork
    cut: ChunkMap
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
    """Keep only the layers of `stage` (None: of no stage) of a whole network on the CPU, in `dtype`.

    Raises ConfigError, on all ranks, if layers of two stages share a weight: each would add its own gradient.
    """
    cut = settings.cut(network.graph)
    holder: dict[int, int] = {}
    for index, module in enumerate(network.layers.values()):
        own = next(rank for rank, run in zip(cut.ranks, cut.runs, strict=True) if run[0] <= index < run[1])
        for tensor in tensors_of(module):
            if (other := holder.setdefault(id(tensor), own)) != own:
                raise ConfigError(
                    f"layer '{network.graph.nodes[index].name}' of stage {own} shares weights with a layer of stage "
                    f"{other}; choose a parallel.balance that leaves them on one, or give each its own"
                )
    network.to(dtype)
    dtypes = tensor_dtypes(network, autocast, device)
    keep_layers(network, set() if stage is None else cut.layers_of(stage), device, dtype)
    return SplitNetwork(network, cut, settings, dtypes, device)


def keep_layers(network: GraphNetwork, own: set[int], device: torch.device, dtype: torch.dtype) -> None:
    """Move the layers of `own` to a device, channels last, and drop the values of all others. Weights of no layer stay
    with the first layer."""
    modules = list(network.layers.values())
    kept = {id(tensor) for index in own for tensor in tensors_of(modules[index])}
    if 0 in own:
        taken = {id(tensor) for module in modules for tensor in tensors_of(module)}
        kept |= {id(tensor) for tensor in tensors_of(network)} - taken
    empty: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the old tensor, kept alive, and that on `meta`
    for module in network.modules():
        for values in (module._parameters, module._buffers):
            for name, tensor in list(values.items()):
                if tensor is None or id(tensor) in kept:
                    continue
                if id(tensor) not in empty:  # one for all modules that share it
                    of_floats = tensor.is_floating_point()
                    meta = torch.empty_like(tensor, device="meta", dtype=dtype if of_floats else tensor.dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    empty[id(tensor)] = tensor, nn.Parameter(meta, requires_grad=False) if is_weight else meta
                values[name] = empty[id(tensor)][1]  # type: ignore[assignment]
    for index in own:
        modules[index].to(device, dtype)
        with_channels_last(modules[index])


def tensor_dtypes(
    network: GraphNetwork, autocast: AbstractContextManager[object] | None, device: torch.device
) -> tuple[torch.dtype, ...]:
    """Return the dtype of each tensor of the graph, by which a receiver allocates its buffers.

    Masks and channel indices have their own dtypes; with autocast a dtype depends on the layer and the device. So each
    layer is run on a few pixels, before other ranks' layers are dropped. Changes no buffer. The network is on the CPU
    or on `device`.
    """
    graph, modules = network.graph, list(network.layers.values())
    channels = tensor_channels(graph, network.bands)

    def step(k: int, given: list[torch.dtype]) -> torch.dtype:
        layer = graph.layers[k]
        if layer.hands_on:
            return given[0]
        needs = [layer.required_input(Interval(0, _PROBE), index) for index in range(layer.arity)]
        sides = [max(_PROBE, need.start + need.stop) for need in needs]
        inputs = [
            torch.zeros(1, channels[source], side, side, dtype=dtype, device=device)
            for source, side, dtype in zip(graph.sources[k], sides, given, strict=True)
        ]
        module, training = modules[k], modules[k].training
        home = next((p.device for p in module.parameters()), device)
        module.eval().to(device)
        result: torch.Tensor = module(*inputs)
        module.train(training).to(home)
        return result.dtype

    source = next(network.parameters()).dtype if autocast is None else torch.float32
    with torch.no_grad(), autocast or nullcontext():
        return tuple(graph.fold(source, step))
