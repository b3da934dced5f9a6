"""Other tensors in the places of a network's parameters, for as long as some of its nodes run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Lending:
    """Where the modules of a network's nodes, in their order, keep the parameters that are trained."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._nodes = [
            [(part, name) for part in module.modules() for name, kept in part._parameters.items() if _is_trained(kept)]
            for module in modules
        ]

    @contextmanager
    def lend(self, first: int, stop: int, made: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[None]:
        """Meanwhile nodes `first` to `stop` (half-open) find what is `made` of a parameter of theirs in its place."""
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
