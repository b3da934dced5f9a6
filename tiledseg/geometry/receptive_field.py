"""Interval arithmetic through a flat sequence of layers with skips: which inputs do these outputs need?

The law: the result contains exactly the input positions that an output of the range depends on through some path,
per side; positions below 0 or beyond the size are padding. Checked against the support of real gradients in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiledseg.errors import GeometryError
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer import Layer, PopConcatenate, Stash


def required_input(layers: Sequence[Layer], out: Interval) -> Interval:
    """The input positions on which the outputs `out` of the sequence depend (unclipped)."""
    need = out
    stashed: dict[str, Interval] = {}
    for layer in reversed(layers):
        if isinstance(layer, PopConcatenate):
            wanted = need.shift(layer.crop)
            stashed[layer.skip] = wanted.hull(stashed.get(layer.skip, wanted))
        elif isinstance(layer, Stash) and layer.skip in stashed:
            need = need.hull(stashed.pop(layer.skip))
        need = layer.required_input(need)
    return need


def output_size(layers: Iterable[Layer], size: int) -> int:
    """Output positions along one dim for `size` input positions.

    Raises GeometryError where a pooling would drop a remainder, a size falls to nothing, or a skip does not fit:
    the sizes for which the network is not the same function everywhere on the raster.
    """
    stashed: dict[str, int] = {}
    current = size
    for layer in layers:
        if isinstance(layer, Stash):
            stashed[layer.skip] = current
        elif isinstance(layer, PopConcatenate) and stashed[layer.skip] - 2 * layer.crop != current:
            raise GeometryError(
                f"input size {size} is not legal: at layer '{layer.name}' the skip has {stashed[layer.skip]} pixels, "
                f"less 2 x {layer.crop} cropped, against {current}; choose another size"
            )
        following = layer.output_size(current)
        shrunk = layer.required_input(Interval(0, max(following, 1))).size
        if following < 1 or (following < current and getattr(layer, "padding", 0) == 0 and shrunk != current):
            raise GeometryError(
                f"input size {size} is not legal: layer '{layer.name}' would turn {current} pixels into {following} "
                "with a remainder; choose another size"
            )
        current = following
    return current


def is_legal_size(layers: Sequence[Layer], size: int) -> bool:
    """Whether the network takes an input of `size` pixels without dropping a remainder anywhere."""
    try:
        output_size(layers, size)
    except GeometryError:
        return False
    return True


def total_stride(layers: Iterable[Layer]) -> int:
    """The coarsest grid of the sequence, in input pixels: tiles that start on its multiples see the same pooling."""
    coarsest = scale = 1
    for layer in layers:
        one_in = layer.required_input(Interval(0, 1)), layer.required_input(Interval(1, 2))
        step = one_in[1].start - one_in[0].start
        if step > 1:
            scale *= step
        elif (grown := layer.output_size(64)) > 64 and grown % 64 == 0:
            scale //= grown // 64
        coarsest = max(coarsest, scale)
    return coarsest
