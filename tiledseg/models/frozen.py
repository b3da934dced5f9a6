"""Weights that are frozen (by patterns of names), replaced for a while, or shared under several names.

A weight with a learning rate factor of 0 requires no gradient. A node is frozen in the graph if none of its weights
requires one. The graph then tells the rest: tensors before the first trained node get no gradient, nothing is kept for
one, and pipelines send none back.
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
    """Return the factor of the first pattern that matches a weight's name; 1 if none does."""
    return next((factor for pattern, factor in factors.items() if fnmatchcase(name, pattern)), 1.0)


def freeze(network: GraphNetwork, factors: Mapping[str, float]) -> GraphNetwork:
    """Freeze weights with a factor of 0, and weights of no layer; return the network. Weights frozen before stay
    frozen.

    Weights of no layer get no gradient: with zeros in its place an optimizer would decay them, which torch does not.
    """
    used = {id(weight) for module in network.layers.values() for weight in _weights(module)}
    for name, parameter in network.parameters_by_node():
        if factor_of(name, factors) == 0 or id(parameter) not in used:
            parameter.requires_grad_(False)
    network.graph = network.graph.with_frozen(frozen_nodes(network))
    return network


def frozen_nodes(network: GraphNetwork) -> frozenset[str]:
    """Return the nodes with weights of which none requires a gradient."""
    names = network.graph.names[1:]
    return frozenset(
        n for n, m in zip(names, network.layers.values(), strict=True) if _weights(m) and not is_trained(m)
    )


def is_trained(module: nn.Module) -> bool:
    """Return True if a weight of the module requires a gradient."""
    return any(weight.requires_grad for weight in _weights(module))


def _weights(module: nn.Module) -> list[nn.Parameter]:
    return [tensor for tensor in tensors_of(module) if isinstance(tensor, nn.Parameter)]


class Lending:
    """The trained parameters of a network's nodes, in order, which `lend` replaces for a while."""

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
        """Replace each parameter of nodes `first` to `stop` (half-open) by `made(parameter)` inside."""
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
    """Group tensors that share memory (such as a bias of two layers), in the order of their first names."""
    groups: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), {})[name] = tensor
    return list(groups.values())
