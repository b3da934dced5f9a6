"""Places of a tile's layers in the whole image, for those that ask: `tile_places`."""

from __future__ import annotations

from collections.abc import Mapping

from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.receptive_field import ContextPart, parts
from tiledseg.models.layers.block import BlockPlace, DimPlace

Places = Mapping[int, BlockPlace]  # by the node's number


def tile_places(graph: Graph, whole: Box, context: Box) -> Places:
    """Of each node that asks for its place: what it reads and gives on a tile of `context` of the image `whole`.

    Raises GeometryError as `geometry.receptive_field.parts`.
    """
    asking = [k for k, layer in enumerate(graph.layers) if layer.asks_place]
    if not asking:
        return {}
    rows = parts(graph, whole.row, context.row)
    cols = parts(graph.along_columns, whole.col, context.col)
    sources = [graph.sources[k][0] for k in asking]
    return {
        k: BlockPlace(_place(rows[source], rows[k + 1]), _place(cols[source], cols[k + 1]))
        for k, source in zip(asking, sources, strict=True)
    }


def _place(source: ContextPart, made: ContextPart) -> DimPlace:
    return DimPlace(source.at, made.at, source.at, (source.size, made.size), False)
