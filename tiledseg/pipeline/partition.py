"""Cutting a flat network into the chunks of a pipeline, and leaving each rank with the layers of its own alone.

Layers keep their names, and a rank keeps a place for every parameter of the whole network: those of other ranks are
on the `meta` device, which holds no values, and want no gradient. So optimizers number their parameters alike on all
ranks, and checkpoints know nothing of the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from tiledseg.geometry.layer import Layer, PopConcatenate, Stash
from tiledseg.models.blocks import PopSkip, StashSkip
from tiledseg.models.unet import FlatNetwork
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.schedule import Pipeline, chunk_ranks, chunk_skips

_PROBE = 8  # pixels a side, if the kernel is not larger


@dataclass(frozen=True)
class Cut:
    """A network's layers over the chunks of a pipeline; `runs` are their layers (first, stop), half-open."""

    pipeline: Pipeline
    runs: tuple[tuple[int, int], ...]

    def layers_of(self, stage: int) -> set[int]:
        """The layers whose weights a stage holds."""
        own = [run for run, rank in zip(self.runs, self.pipeline.ranks, strict=True) if rank == stage]
        return {layer for first, stop in own for layer in range(first, stop)}

    def source_layer(self, source: int, target: int, skip: str, layers: Sequence[Layer]) -> int:
        """The layer whose output travels from chunk `source` to chunk `target`: a skip's stash, or the last one."""
        if not skip:
            return self.runs[target][0] - 1
        first, stop = self.runs[source]
        return next(i for i in range(first, stop) if isinstance(layers[i], Stash) and layers[i].skip == skip)  # type: ignore[attr-defined]


def cut_network(layers: Sequence[Layer], balance: Sequence[int], schedule: str, stages: int) -> Cut:
    """The chunks of a balance that fits (see `balance.parse_balance`)."""
    runs = cuts(balance)
    stashed = {layer.skip: index for index, layer in enumerate(layers) if isinstance(layer, Stash)}
    pops = [(index, layer) for index, layer in enumerate(layers) if isinstance(layer, PopConcatenate)]
    skips = [(layer.skip, stashed[layer.skip], index) for index, layer in pops]
    return Cut(Pipeline(chunk_ranks(schedule, stages), chunk_skips(skips, runs)), runs)


def keep_layers(network: FlatNetwork, own: set[int], device: torch.device, dtype: torch.dtype) -> None:
    """Put the layers of `own` on a device, channels last, and let go of the values of all others."""
    for index, module in enumerate(network.layers.values()):
        if index in own:
            module.to(device, dtype)
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        else:
            module.to("meta", dtype)
            module.requires_grad_(False)


def output_dtypes(
    network: FlatNetwork, autocast: AbstractContextManager[object] | None, device: torch.device
) -> tuple[torch.dtype, ...]:
    """The dtype of each layer's output: what a receiver allocates for a tensor that another rank makes.

    With autocast it depends on the layer and the device, so each layer is tried on a few pixels, by itself, before
    other ranks' layers are let go. Changes no buffer. The network is on the CPU or on `device`.
    """
    parameter = next(network.parameters()).dtype
    if autocast is None:
        return (parameter,) * len(network.descriptions)
    found: list[torch.dtype] = []
    stashed: dict[str, torch.dtype] = {}
    channels, at_hand = network.bands, torch.float32
    with torch.no_grad(), autocast:
        for layer, module in zip(network.descriptions, network.layers.values(), strict=True):
            side = max(_PROBE, 2 * getattr(layer, "kernel", 1))
            at_hand = _probe(module, layer, (channels, side), at_hand, stashed, device)
            channels = layer.output_channels(channels)
            if isinstance(layer, Stash):
                stashed[layer.skip] = at_hand
            found.append(at_hand)
    return tuple(found)


def _probe(
    module: nn.Module,
    layer: Layer,
    sides: tuple[int, int],
    dtype: torch.dtype,
    stashed: dict[str, torch.dtype],
    device: torch.device,
) -> torch.dtype:
    """The dtype of a layer's output for an input of (channels, pixels a side) in `dtype`."""
    channels, side = sides
    x_BCHW = torch.zeros(1, channels, side, side, dtype=dtype, device=device)
    if isinstance(module, StashSkip):
        return dtype
    training, home = module.training, next((p.device for p in module.parameters()), device)
    module.eval().to(device)
    if isinstance(module, PopSkip):
        assert isinstance(layer, PopConcatenate), "a module and its description are of one kind"
        whole = side + 2 * layer.crop
        skip_BCHW = torch.zeros(1, layer.skip_channels, whole, whole, dtype=stashed[layer.skip], device=device)
        result: torch.Tensor = module(x_BCHW, skip_BCHW)
    else:
        result = module(x_BCHW)
    module.train(training).to(home)
    return result.dtype
