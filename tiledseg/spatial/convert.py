"""Conversion of a network's layers into twins that compute a rank's part. Layers that cannot be exact are refused.

The converted network shares weights and buffers with the original, under the original's names, so optimizers and
checkpoints do not depend on how the image is spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from tiledseg.errors import ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.pixelwise import stilled
from tiledseg.geometry.layers.resampling import PixelShuffle, PixelUnshuffle
from tiledseg.models.layers.block import computes_blocks
from tiledseg.models.layers.convolution import OneDnnTransposed, SteadyConvolution, TorchConvolution
from tiledseg.models.layers.pixelwise import Computed
from tiledseg.models.layers.pooling import AveragePoolModule, MaxPoolModule
from tiledseg.models.layers.resampling import UpsampleModule
from tiledseg.models.layers.times import TimesBatchNorm, TimesConvolution, TimesGroupNorm, TimesTransposed
from tiledseg.models.network import GraphNetwork
from tiledseg.models.norm import BatchNorm, GroupNorm, InstanceNorm
from tiledseg.models.normalise import Ranks
from tiledseg.spatial import twins
from tiledseg.spatial.twins import POINTWISE, SpatialLayer

# Functions that make the twin of a torch module from its name, the module, and (for norms) the ranks of an image. Keys
# are exact types: a subclass may compute anything.
TWINS: dict[type[nn.Module], Callable[..., SpatialLayer]] = {
    **dict.fromkeys((nn.Conv2d, SteadyConvolution, TorchConvolution, TimesConvolution), twins.SpatialConvolution),
    **dict.fromkeys((nn.ConvTranspose2d, OneDnnTransposed, TimesTransposed), twins.transposed_twin),
    **dict.fromkeys((nn.MaxPool2d, MaxPoolModule), twins.max_pool_twin),
    **dict.fromkeys((nn.AvgPool2d, AveragePoolModule), twins.average_pool_twin),
    nn.PixelShuffle: lambda name, m: SpatialLayer(
        lambda place, x_BCHW: place.crop_given(m(x_BCHW), m.upscale_factor), PixelShuffle(m.upscale_factor)
    ),
    nn.PixelUnshuffle: lambda name, m: SpatialLayer(lambda place, x: m(x), PixelUnshuffle(m.downscale_factor)),
    **dict.fromkeys((nn.Upsample, UpsampleModule, nn.UpsamplingNearest2d), twins.upsample_twin),
    **dict.fromkeys(POINTWISE, twins.pointwise_twin),
}
_NORMS = nn.GroupNorm, GroupNorm, TimesGroupNorm, nn.InstanceNorm2d, InstanceNorm
WHOLE_IMAGE_TWINS: dict[type[nn.Module], Callable[..., SpatialLayer]] = {
    **dict.fromkeys((nn.BatchNorm2d, BatchNorm, TimesBatchNorm), twins.SpatialBatchNorm),
    **dict.fromkeys(_NORMS, twins.SpatialNorm),
}


class ConvertedNetwork(NamedTuple):
    """The twins of a network's layers, and its graph along rows and along columns."""

    layers: tuple[SpatialLayer, ...]
    rows: Graph
    cols: Graph


def convert_layers(network: GraphNetwork, ranks: Iterable[Ranks]) -> ConvertedNetwork:
    """Convert every layer of a network. `ranks`: for each layer, the ranks that share the image."""
    graph = network.graph
    named = zip(graph.names[1:], network.layers.values(), ranks, strict=False)
    layers = tuple(convert_layer(*each) for each in named)
    still = [layer.is_still for layer in graph.layers]
    dims = (zip([layer.descriptions[dim] for layer in layers], still, strict=True) for dim in (0, 1))
    rows, cols = (graph.with_layers([stilled(layer) if is_still else layer for layer, is_still in dim]) for dim in dims)
    return ConvertedNetwork(layers, rows, cols)


def convert_layer(name: str, module: nn.Module, ranks: Ranks) -> SpatialLayer:
    """Return the spatial twin of a layer. Raises ConfigError, with the layer's name and the reason, if it has none."""
    kind = type(module) if not isinstance(module, Computed) else type(module).__bases__[1]
    if computes_blocks(module):
        own: Any = module
        dims = own.rows, own.cols
        return SpatialLayer(lambda place, *inputs: own.on_block(place, ranks, *inputs), *dims, fill=own.fill)
    if kind in WHOLE_IMAGE_TWINS:
        return WHOLE_IMAGE_TWINS[kind](name, module, ranks)
    if kind in TWINS:
        return TWINS[kind](name, module)
    what = f"layer '{name}' ({kind.__name__}) is not known to give the same result on a part of the image"
    raise ConfigError(f"{what}; use parallel.halo read")
