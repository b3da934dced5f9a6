"""Which norms are exact where: the one place that says so.

| norm | takes statistics over | so it is exact |
| --- | --- | --- |
| none, pixel | nothing, or one pixel | everywhere |
| instance, group | the pixels of an image | where an image is one tile, or in mode `layer`, whose ranks sum them |
| batch, trained | the pixels of all images of a step, and moves running ones | there with one image; several: `layer` |
| batch, mapped | nothing: its statistics are constants | everywhere |

Without stages: these have one micro-batch after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiledseg.config_parallel import HALO_MODES
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.geometry.tiling import Tiling


def measuring(graph: Graph, trains: bool = True) -> tuple[Node, ...]:
    """The nodes that take statistics over the pixels of an image, where the network is trained or else mapped."""
    return tuple(node for node in graph.nodes if node.layer.statistics == "image" or _moves(node, trains))


def _moves(node: Node, trains: bool) -> bool:
    """Whether it moves running statistics: mapped, these are constants."""
    return trains and node.layer.statistics == "batch"


def moves_statistics(graph: Graph) -> bool:
    """Whether a node of it, where it is trained, takes statistics over all images of a step."""
    return any(_moves(node, trains=True) for node in graph.nodes)


def exact_modes(graph: Graph, tiles: int, trains: bool = True) -> tuple[str, ...]:
    """The halo modes in which tiling changes nothing, for images of at most `tiles` tiles."""
    return HALO_MODES if tiles == 1 or not measuring(graph, trains) else ("layer",)


def norm_fault(graph: Graph, mode: str, tiles: int, at_once: int, trains: bool = True) -> str | None:
    """Why a norm would not be that of the undivided run, and what to do; None where it is.

    `tiles`: the most of an image; `at_once`: images that a step may take, each of which moves the running statistics of
    a batch norm by itself.
    """
    nodes = measuring(graph, trains)
    if mode not in exact_modes(graph, tiles, trains):
        others = ", norm none or pixel" if trains else ""
        return (
            f"{nodes[0].layer.in_words}: its statistics would be those of a tile, not of the whole image; use "
            f"parallel.halo layer{others}, or tiling.grid 1"
        )
    if at_once > 1 and any(_moves(node, trains) for node in nodes):
        return (
            f"model.norm is batch: {at_once} images at once would each move the running statistics by themselves; use "
            "one image a step, parallel.halo layer without stages, or norm none, pixel, instance or group"
        )
    return None


def check_statistics(graph: Graph, bands: int, tilings: Iterable[Tiling], mode: str, trains: bool = True) -> None:
    """Raise ConfigError where a norm would see one pixel of a channel, whose variance is no statistic."""
    wanting = {node.name for node in measuring(graph, trains) if node.layer.needs_pixels}
    if not wanting:
        return
    whole = mode == "layer"
    for height, width in sorted({size for tiling in tilings for size in _sizes(tiling, whole)}):
        shapes = tensor_shapes(graph, bands, height, width)[1:]
        for node, shape in zip(graph.nodes, shapes, strict=True):
            if node.name in wanting and shape[1] * shape[2] == 1:
                what = "an image" if whole else "a tile"
                raise ConfigError(
                    f"{node.layer.in_words}: it takes statistics over pixels, but {what} of {height} x {width} px, "
                    f"halo included, leaves 1 pixel at {node.name}; use larger ones, fewer model.levels, or norm none "
                    "or pixel"
                )


def _sizes(tiling: Tiling, whole: bool) -> Sequence[tuple[int, int]]:
    """(height, width) of what a norm sees at once, at the network's input."""
    contexts = [tile.context for tile in tiling.tiles]
    if not whole:
        return [context.shape for context in contexts]
    rows, cols = [context.row for context in contexts], [context.col for context in contexts]
    height, width = (max(i.stop for i in dim) - min(i.start for i in dim) for dim in (rows, cols))
    return [(height, width)]
