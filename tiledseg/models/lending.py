"""Places of a network's weights: other tensors in them while some of its nodes run, and weights of several names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class Lending:
    """The places in the modules of a network's nodes, in their order, of the parameters that are trained."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._nodes = [
            [(part, name) for part in module.modules() for name, kept in part._parameters.items() if _is_trained(kept)]
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


def _is_trained(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


def by_memory(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the tensors in groups of those that share memory, in the order of their first names: a head that is
    called twice, a bias of two layers."""
    groups: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), {})[name] = tensor
    return list(groups.values())
