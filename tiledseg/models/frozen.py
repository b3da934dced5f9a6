"""Weights: lent for a while, of several names, and not trained (chosen by patterns, marked in modules and graph).

A weight whose factor of the learning rate is 0 wants no gradient of autograd. A node is frozen in the graph if none of
its weights wants a gradient. The rest follows from the graph: no gradient is made of tensors before the first trained
node, nothing is kept for it, and pipelines send none back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import nn

from tiledseg.models.layers.pixelwise import tensors_of
from tiledseg.models.network import GraphNetwork


def factor_of(name: str, factors: Mapping[str, float]) -> float:
    """Return the factor of the first pattern that fits a weight's name; 1 where none does."""
    return next((factor for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)


def freeze(network: GraphNetwork, factors: Mapping[str, float]) -> GraphNetwork:
    """Have weights of a factor of 0 want no gradient, and return the network; those that its author froze stay so.

    Nor do those that no layer takes, to which no gradient comes: an optimizer that had zeros in its place would let
    them decay, which torch does not.
    """
    taken = {id(weight) for module in network.layers.values() for weight in _weights(module)}
    for name, parameter in network.parameters_by_node():
        if factor_of(name, factors) == 0 or id(parameter) not in taken:
            parameter.requires_grad_(False)
    network.graph = network.graph.with_frozen(frozen_nodes(network))
    return network


def frozen_nodes(network: GraphNetwork) -> frozenset[str]:
    """Return the nodes that have weights, none of which wants a gradient."""
    names = network.graph.names[1:]
    return frozenset(
        n for n, m in zip(names, network.layers.values(), strict=True) if _weights(m) and not is_trained(m)
    )


def is_trained(module: nn.Module) -> bool:
    """Return True if a weight of it wants a gradient."""
    return any(weight.requires_grad for weight in _weights(module))


def _weights(module: nn.Module) -> list[nn.Parameter]:
    return [tensor for tensor in tensors_of(module) if isinstance(tensor, nn.Parameter)]


class Lending:
    """The places in the modules of a network's nodes, in their order, of the parameters that are trained."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._nodes = [
            [
                (part, name)
                for part in module.modules()
                for name, kept in part._parameters.items()
                if kept is not None and kept.requires_grad
            ]
            for module in modules
        ]

    @contextmanager
    def lend(self, first: int, stop: int, made: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[None]:
        """Put what is `made` of each parameter of nodes `first` to `stop` (half-open) into its place for a while."""
        places = [place for node in self._nodes[first:stop] for place in node]
        kept = [part._parameters[name] for part, name in places]
        try:
            for (part, name), parameter in zip(places, kept, strict=True):
                part._parameters[name] = made(parameter)  # type: ignore[arg-type, assignment]
            yield
        finally:
            for (part, name), parameter in zip(places, kept, strict=True):
                part._parameters[name] = parameter


def by_memory(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors in groups of those that share memory, in the order of their first names: a head that is
    called twice, a bias of two layers."""
    groups: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), {})[name] = tensor
    return list(groups.values())
