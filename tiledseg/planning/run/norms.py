"""Which norms are exact where: the one place that says so.

| norm | takes statistics over | so it is exact |
| --- | --- | --- |
| none, pixel | nothing, or one pixel | everywhere |
| instance, group | the pixels of an image | where an image is one tile, or in mode `layer`, whose ranks sum them |
| batch, trained | the same, and it moves running ones, image by image | there, with one image a step |
| batch, mapped | nothing: its statistics are constants | everywhere |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiledseg.errors import ConfigError
from tiledseg.geometry.layer import Layer, Norm
from tiledseg.geometry.shapes import layer_shapes
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.halo_traffic import WHOLE_IMAGE_NORMS

MODES = ("read", "exchange", "layer")  # of halos


def image_norms(layers: Iterable[Layer], trains: bool = True) -> tuple[Norm, ...]:
    """The norms that take statistics over the pixels of an image, where the network is trained or else mapped."""
    found = (layer for layer in layers if isinstance(layer, Norm) and layer.kind in WHOLE_IMAGE_NORMS)
    return tuple(norm for norm in found if trains or norm.kind != "batch")


def exact_modes(layers: Iterable[Layer], tiles: int, trains: bool = True) -> tuple[str, ...]:
    """The halo modes in which tiling changes nothing, for images of at most `tiles` tiles."""
    return MODES if tiles == 1 or not image_norms(layers, trains) else ("layer",)


def norm_fault(layers: Iterable[Layer], mode: str, tiles: int, at_once: int, trains: bool = True) -> str | None:
    """Why a norm would not be that of the undivided run, and what to do; None where it is.

    `tiles`: the most of an image; `at_once`: images that a step may take together, each of which moves the running
    statistics of a batch norm.
    """
    norms = image_norms(layers, trains)
    if mode not in exact_modes(norms, tiles, trains):
        others = ", norm none or pixel" if trains else ""
        return (
            f"model.norm is {norms[0].kind}: its statistics would be those of a tile, not of the whole image; use "
            f"parallel.halo layer{others}, or tiling.grid 1"
        )
    if trains and at_once > 1 and any(norm.kind == "batch" for norm in norms):
        return (
            f"model.norm is batch: {at_once} images at once would each move the running statistics by themselves; use "
            "one image a step, or norm none, pixel, instance or group"
        )
    return None


def check_statistics(
    layers: Sequence[Layer], bands: int, tilings: Iterable[Tiling], mode: str, trains: bool = True
) -> None:
    """Raise ConfigError where a norm would see one pixel of a channel, whose variance is no statistic."""
    wanting = [norm for norm in image_norms(layers, trains) if norm.kind != "group"]  # a group has several channels
    if not wanting:
        return
    whole = mode == "layer"
    for height, width in sorted({size for tiling in tilings for size in _sizes(tiling, whole)}):
        for layer, shape in zip(layers, layer_shapes(layers, bands, height, width), strict=True):
            if layer in wanting and shape[1] * shape[2] == 1:
                what = "an image" if whole else "a tile"
                raise ConfigError(
                    f"model.norm {wanting[0].kind} takes statistics over pixels, but {what} of {height} x {width} px, "
                    f"halo included, leaves 1 pixel at {layer.name}; use larger ones, fewer model.levels, or norm none "
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
