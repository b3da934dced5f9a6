"""A convolution applies the activation after it: one pass over memory in place of two.

Between the two stands nothing that changes a value (no norm, no dropout), and nobody else takes the convolution's
output: the activation may write over it (`geometry.graph.Graph.overwrites`), so what is never in memory nobody misses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from tiledseg.geometry.graph import Graph
from tiledseg.models.layers.convolution import SteadyConvolution
from tiledseg.models.layers.on_cpu.one_dnn import sloped

Compute = Callable[[int, list[torch.Tensor]], torch.Tensor]


def activations(graph: Graph, modules: Sequence[Any]) -> dict[int, int]:
    """Of each convolution whose output goes to an activation only: the node of that."""
    made = [graph.origins[source] - 1 for source, *_ in graph.sources]
    return {
        made[k]: k
        for k, module in enumerate(modules)
        if isinstance(module, nn.LeakyReLU) and module.negative_slope > 0 and graph.overwrites[k]
        if isinstance(modules[made[k]], SteadyConvolution)
    }


class Activated:
    """`compute` of one run over nodes up to `stop`, but for those convolutions and their activations."""

    def __init__(self, graph: Graph, compute: Compute, modules: Sequence[Any], stop: int) -> None:
        self._compute, self._modules = compute, modules
        self._pairs = {maker: k for maker, k in activations(graph, modules).items() if k < stop}
        self._done: set[int] = set()

    def __call__(self, k: int, inputs: list[torch.Tensor]) -> torch.Tensor:
        if k in self._done:
            return sloped(inputs[0], self._modules[k].negative_slope)
        activation, module = self._pairs.get(k), self._modules[k]
        if activation is None or not module.activates(inputs[0]):
            return self._compute(k, inputs)
        after = self._modules[activation]
        if is_watched(module) or is_watched(after):
            return self._compute(k, inputs)
        self._done.add(activation)
        made: torch.Tensor = module.activated(inputs[0], after.negative_slope)
        return made


def is_watched(module: nn.Module) -> bool:
    """Whether somebody wants to see what goes through it, or through all modules, there or back."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or bool(_has_any_global_hook())
