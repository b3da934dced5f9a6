"""Any module in Python: its halo, and its graph (`docs/reference/python.md`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiledseg.config.checks import checked
from tiledseg.foreign.spread import Halo, traced

if TYPE_CHECKING:
    from torch import nn

    from tiledseg.inference.trained import Trained
    from tiledseg.models.network import GraphNetwork


@checked
def halo(network: nn.Module | Trained, bands: int | None = None) -> Halo:
    """Return the halo of a module, or of a result of `load`. `bands`: of its images (None: those of its first
    convolution).

    Raises ConfigError with a list of all operations that are not exact on tiles, GeometryError if no exact tile exists.
    """
    module: Any = network
    return Halo.of(traced(getattr(module, "network", module), bands).graph)


@checked
def trace(module: nn.Module, bands: int | None = None) -> GraphNetwork:
    """Return any convolutional module as a graph, with the same weights under the same names.

    `bands`: of its input (None: those of its first convolution). Raises ConfigError that lists every operation that is
    not exact on tiles, with reason and remedy.
    """
    return traced(module, bands)
