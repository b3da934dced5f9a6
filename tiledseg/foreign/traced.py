"""A module of somebody's as a graph: the one seam to `tracing`."""

from __future__ import annotations

from torch import nn

from tiledseg.errors import ConfigError
from tiledseg.models.network import GraphNetwork


def traced(module: nn.Module, bands: int | None = None) -> GraphNetwork:
    """The module as a network with the same weights; one of ours is that already.

    `bands`: None for those that its first convolution takes. Raises ConfigError that lists every place that is not
    exact.
    """
    if isinstance(module, GraphNetwork):
        return module
    if not isinstance(module, nn.Module):
        raise ConfigError(f"a {type(module).__name__} is no torch.nn.Module; give one, built")
    from tiledseg.tracing.trace import trace

    return trace(module, _bands_of(module) if bands is None else bands)


def _bands_of(module: nn.Module) -> int:
    first = next((each for each in module.modules() if isinstance(each, nn.Conv2d)), None)
    if first is None:
        raise ConfigError(f"{type(module).__name__} has no convolution that tells its bands; give bands=")
    return first.in_channels
