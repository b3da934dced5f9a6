"""Upsampling of a rank's block: nearest is local, bilinear needs one coarse pixel of its neighbours, bicubic two.

With align_corners=True samples are placed by the size of the whole image: `models.layers.aligned` does that.
"""

from __future__ import annotations

import torch
from torch import nn

from tiledseg.errors import ConfigError
from tiledseg.geometry.layers.resampling import PixelShuffle, PixelUnshuffle, Upsample
from tiledseg.models.layers.block import BlockPlace
from tiledseg.models.layers.upsample import upsample
from tiledseg.spatial.place import SpatialLayer


class SpatialUpsample(SpatialLayer):
    """Upsampling by whole factors: nearest, or bilinear or bicubic with align_corners=False."""

    fill = 0.0  # never read: at the image's ends the interpolation repeats the last pixel itself

    def __init__(self, name: str, module: nn.Upsample) -> None:
        factors = module.scale_factor
        if factors is None or module.size is not None:
            raise ConfigError(
                f"layer '{name}' upsamples to a fixed size, which would be a block's; give a scale_factor"
            )
        pair = (factors, factors) if isinstance(factors, int | float) else (factors[0], factors[1])
        if any(f != int(f) or f < 1 for f in pair):
            raise ConfigError(f"layer '{name}' upsamples by {factors}; only whole factors fall on the ranks' edges")
        if module.mode not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
            raise ConfigError(f"layer '{name}' upsamples '{module.mode}'; give nearest, bilinear or bicubic")
        if module.align_corners:
            raise ConfigError(
                f"layer '{name}' upsamples with align_corners=True, whose weights depend on the whole image's size; "
                "set align_corners=False"
            )
        self.factors = int(pair[0]), int(pair[1])
        self.mode = module.mode
        kind = module.mode.removesuffix("-exact")
        self.descriptions = (
            Upsample(kind, self.factors[0]),
            Upsample(kind, self.factors[1]),
        )

    def __call__(self, place: BlockPlace, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = upsample(x_BCHW, self.factors, self.mode)
        return place.crop_given(y_BCHW, self.factors)


class SpatialPixelUnshuffle(SpatialLayer):
    """Each block of pixels becomes channels: a rank reads the blocks of what it gives."""

    def __init__(self, name: str, module: nn.PixelUnshuffle) -> None:
        self._module = module
        self.descriptions = PixelUnshuffle(module.downscale_factor), PixelUnshuffle(module.downscale_factor)

    def __call__(self, place: BlockPlace, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._module(x_BCHW)
        return result


class SpatialPixelShuffle(SpatialLayer):
    """Each pixel's channels become its own pixels: local."""

    def __init__(self, name: str, module: nn.PixelShuffle) -> None:
        self._module = module
        self.descriptions = PixelShuffle(module.upscale_factor), PixelShuffle(module.upscale_factor)

    def __call__(self, place: BlockPlace, x_BCHW: torch.Tensor, *others_BCHW: torch.Tensor) -> torch.Tensor:
        return place.crop_given(self._module(x_BCHW), self._module.upscale_factor)
