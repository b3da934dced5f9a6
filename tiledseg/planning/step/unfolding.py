"""What kernels of convolutions lay out for the moment: in float64, for which oneDNN has none, PyTorch unfolds.

It copies every window of the input, or its gradient's, into a matrix, and lets that go when it has been multiplied: of
a kernel of 3 x 3 nine times the input. So it does on a CPU; on a GPU nothing has been measured.
"""

from __future__ import annotations

from tiledseg.geometry.layers.layer import Layer
from tiledseg.planning.step.cost import LayerCost
from tiledseg.units.widths import DOUBLE_BYTES


def unfolded_bytes(layer: Layer, cost: LayerCost, bytes_per_value: int) -> int:
    """Of a layer on one context, forward and backward alike."""
    if bytes_per_value != DOUBLE_BYTES:
        return 0
    return layer.unfolded(cost.multiply_adds, cost.shape) * bytes_per_value
