"""Changes of pixels' values that leave them in their places: contrast, brightness, noise, bands that are dropped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.box import Box
from tiledseg.raster.mirrored_reader import mirrored_positions
from tiledseg.raster.samples.pixel_noise import pixel_noise
from tiledseg.records import dataclass


@dataclass(frozen=True)
class Photometry:
    """Of each band: `factors` and `offsets` (value * factor + offset); then noise of deviation `noise`, a function of
    `key` (64 bits) and the pixel's place; then the bands that are `kept`, others being 0."""

    factors: tuple[float, ...]
    offsets: tuple[float, ...]
    kept: tuple[bool, ...]
    noise: float = 0.0
    key: int = 0

    def apply(self, x_CHW: NDArray, valid_HW: NDArray[np.bool_], box: Box, raster: tuple[int, int]) -> None:
        """In place, on the network's input of `box` of a raster of shape `raster`; 0 stays where a pixel is not valid.

        Beyond the raster the box shows mirrored pixels, which have the noise of their originals.
        """
        dtype = x_CHW.dtype.type
        for band_HW, factor, offset in zip(x_CHW, self.factors, self.offsets, strict=True):
            if factor != 1:
                band_HW *= dtype(factor)
            if offset:
                band_HW += dtype(offset)
        if self.noise:
            self._add_noise(x_CHW, box, raster)
        for band_HW, kept in zip(x_CHW, self.kept, strict=True):
            if not kept:
                band_HW[:] = 0
        if not valid_HW.all():
            x_CHW[:, ~valid_HW] = 0

    def _add_noise(self, x_CHW: NDArray, box: Box, raster: tuple[int, int]) -> None:
        rows, cols = mirrored_positions(box.row, raster[0]), mirrored_positions(box.col, raster[1])
        noise_CHW = pixel_noise(self.key, len(x_CHW), rows, cols)
        noise_CHW *= np.float32(self.noise)
        x_CHW += noise_CHW
