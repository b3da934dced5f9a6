"""Norms that take statistics over the pixels of a channel: are there enough of them?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.geometry.layer import Norm
from tiledseg.geometry.shapes import layer_shapes
from tiledseg.geometry.tiling import Tiling

TRAINED, MAPPED = ("instance", "batch"), ("instance",)  # a trained batch norm is a constant


def check_statistics(unet: UNet, tilings: Iterable[Tiling], whole: bool, kinds: Collection[str]) -> None:
    """Raise ConfigError where a norm of `kinds` would see one pixel of a channel, whose variance is no statistic.

    `whole`: statistics are those of the image, not of a tile (halo mode `layer`).
    """
    if unet.norm not in kinds:
        return
    layers = unet.layers()
    for height, width in sorted({size for tiling in tilings for size in _sizes(tiling, whole)}):
        for layer, shape in zip(layers, layer_shapes(layers, unet.bands, height, width), strict=True):
            if isinstance(layer, Norm) and shape[1] * shape[2] == 1:
                what = "an image" if whole else "a tile"
                raise ConfigError(
                    f"model.norm {unet.norm} takes statistics over pixels, but {what} of {height} x {width} px, "
                    f"halo included, leaves 1 pixel at {layer.name}; use larger ones, fewer model.levels, or norm none "
                    "or pixel"
                )


def _sizes(tiling: Tiling, whole: bool) -> Sequence[tuple[int, int]]:
    """(height, width) of what a norm sees at once, at the network's input."""
    contexts = [tile.context for tile in tiling.tiles]
    if not whole:
        return [(context.height, context.width) for context in contexts]
    rows, cols = [context.row for context in contexts], [context.col for context in contexts]
    height, width = (max(i.stop for i in dim) - min(i.start for i in dim) for dim in (rows, cols))
    return [(height, width)]
