"""Where the tensors of a tile lie in those of the whole image."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tiledseg.errors import GeometryError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.receptive_field import scales


class Part(NamedTuple):
    """Along one dim, the positions `at` of a tensor that has `size` of them in the whole image."""

    at: Interval
    size: int


@lru_cache(maxsize=256)
def parts(graph: Graph, whole: Interval, context: Interval) -> tuple[Part, ...]:
    """Of each tensor the part that a network makes of `context`, where the image is `whole`: along rows; ask
    `graph.along_columns` for columns.

    Raises GeometryError where the context does not begin a whole number of coarse pixels after the image.
    """
    ahead = context.start - whole.start
    sizes, own = ([int(n) for n in _sizes(graph, dim.size)] for dim in (whole, context))
    found = []
    for name, step, size, count in zip(graph.names, scales(graph), sizes, own, strict=True):
        start = ahead / step
        if start.denominator > 1:
            raise GeometryError(
                f"a tile begins {ahead} pixels after the image, which is no whole number of pixels of '{name}', each "
                f"{step} wide; begin tiles at multiples of the network's alignment"
            )
        found.append(Part(Interval(int(start), int(start) + count), size))
    return tuple(found)


def _sizes(graph: Graph, size: int) -> list[int]:
    return graph.fold(size, lambda k, sizes: graph.layers[k].output_size(*sizes))
