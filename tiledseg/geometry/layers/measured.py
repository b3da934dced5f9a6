"""What autograd was seen to keep of a node, and to allocate for its gradients: of functions that only torch knows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tiledseg.geometry.layers.layer import Shape
from tiledseg.records import dataclass
from tiledseg.units.widths import SINGLE_BYTES


@dataclass(frozen=True)
class Measured:
    """Of a node that works pixel by pixel, in float32: bytes a pixel.

    `kept_inputs` and `keeps_output`: the tensors that autograd keeps; `besides`: others. `view_of`: the input whose
    memory the output shares. `flat`: all pixels of the output are one in memory. `gradients`: of each input; None where
    it shares the memory of the output's, or there is none. `transient`: allocated besides, while they are made.
    """

    kept_inputs: tuple[int, ...] = ()
    keeps_output: bool = False
    besides: float = 0.0
    view_of: int | None = None
    flat: bool = False
    gradients: Sequence[float | None] = ()
    transient: float = 0.0

    def bytes_of(self, each: float, shape: Shape, width: int) -> int:
        """Of so many bytes a pixel, on `shape` and for values of `width` bytes."""
        return round(each * prod(shape[1:])) * width // SINGLE_BYTES
