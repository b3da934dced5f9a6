"""Which norms are exact where: the one place that says so.

    | norm | takes statistics over | so it is exact |
    | --- | --- | --- |
    | none, pixel | nothing, or one pixel | everywhere |
    | instance, group | the pixels of an image | where an image is one tile, or in mode `layer`, whose ranks sum them |
    | batch, trained | the pixels of all images of a step, and moves running ones | with one image; several: see below |
    | batch, mapped, or still | nothing: its statistics are constants | everywhere |
    | batch, without running statistics, mapped | the pixels of an image | as instance |

Still: by `model.freeze_norm`. Several images: in mode `layer`, or where each is one tile, in mode `read` with
`memory.blocks`; only without stages: these have one micro-batch after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiledseg.config.parallel import HALO_MODES
from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.geometry.tiling import Tiling


def measuring(graph: Graph, trains: bool = True) -> tuple[Node, ...]:
    """Return the nodes that take statistics over the pixels of an image, where the network is trained or else mapped:
    then running ones are constants."""
    return tuple(node for node in graph.nodes if node.layer.statistics and (trains or not node.layer.tracks))


def of_steps(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes that, where the network is trained, take statistics over all images of a step."""
    return tuple(node for node in graph.nodes if node.layer.statistics == "batch")


def exact_modes(graph: Graph, tiles: int, trains: bool = True) -> tuple[str, ...]:
    """Return the halo modes in which tiling changes nothing, for images of at most `tiles` tiles."""
    return HALO_MODES if tiles == 1 or not measuring(graph, trains) else ("layer",)


def norm_fault(
    graph: Graph, mode: str, tiles: int, at_once: int, trains: bool = True, keyed: bool = True
) -> str | None:
    """Return why a norm would differ from that of the undivided run, and the remedy; None where it does not.

    `tiles`: the most of an image; `at_once`: images that a step may take, each of which moves the running statistics of
    a batch norm by itself. `keyed`: a key of the configuration names the norms, else the network's author.
    """
    nodes, several = measuring(graph, trains), of_steps(graph)
    if mode not in exact_modes(graph, tiles, trains):
        fault = "its statistics would be those of a tile, not of the whole image; use parallel.halo layer"
        others, last = ", norm none or pixel" if trains and keyed else "", ", or tiling.grid 1"
    elif trains and at_once > 1 and several:
        nodes, blocks = several, " or memory.blocks," if mode == "read" and tiles == 1 else ""
        fault = f"{at_once} images at once would each take, and move, statistics by themselves; use one image a step, "
        fault += f"parallel.halo layer{blocks} without stages"
        others, last = ", or norm none, pixel, instance or group" if keyed else "", ""
    else:
        return None
    still = ", model.freeze_norm" if any(node.layer.tracks for node in nodes) else ""
    return f"{said(nodes[0], keyed)}: {fault}{still}{others}{last}"


def check_statistics(
    graph: Graph, bands: int, tilings: Iterable[Tiling], mode: str, trains: bool = True, keyed: bool = True
) -> None:
    """Raise ConfigError where a norm would see one pixel of a channel, whose variance is no statistic."""
    wanting = {node.name for node in measuring(graph, trains) if node.layer.needs_pixels}
    if not wanting:
        return
    whole, remedy = mode == "layer", ", fewer model.levels, or norm none or pixel" if keyed else ""
    for height, width in sorted({size for tiling in tilings for size in _sizes(tiling, whole)}):
        shapes = tensor_shapes(graph, bands, height, width)[1:]
        for node, shape in zip(graph.nodes, shapes, strict=True):
            if node.name in wanting and shape[1] * shape[2] == 1:
                what = "an image" if whole else "a tile"
                raise ConfigError(
                    f"{said(node, keyed)}: it takes statistics over pixels, but {what} of {height} x {width} px, "
                    f"halo included, leaves 1 pixel at {node.name}; use larger ones{remedy}"
                )


def said(node: Node, keyed: bool) -> str:
    """Return the name of a node that takes statistics: the key that sets its kind, or its author's name."""
    return node.layer.in_words(None if keyed else node.name)


def _sizes(tiling: Tiling, whole: bool) -> list[tuple[int, int]]:
    """Return (height, width) of what a norm sees at once, at the network's input."""
    contexts = [tile.context for tile in tiling.tiles]
    if not whole:
        return [context.shape for context in contexts]
    rows, cols = [context.row for context in contexts], [context.col for context in contexts]
    height, width = (max(i.stop for i in dim) - min(i.start for i in dim) for dim in (rows, cols))
    return [(height, width)]
