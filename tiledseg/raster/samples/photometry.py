"""Changes of pixels' values that leave them in their places: contrast, brightness, noise, bands that are dropped.

Noise is a function of a key and of a pixel's place. It is counter-based: row and column are mixed, each by itself, and
their sum is mixed again (the 32-bit finaliser "lowbias32" of C. Wellons's hash prospector). Each half of the 32 bits
picks one of 65536 quantiles of the normal distribution, so one mixing serves two bands.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.box import Box
from tiledseg.raster.mirrored_reader import mirrored_positions

_CHUNK = 1 << 14  # pixels that are mixed at a time: they stay in the processor's cache
_GOLDEN = 0x9E3779B9
_MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B))  # shifts, and factors that follow them


def pixel_noise(key: int, bands: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return noise of mean 0 and deviation 1, for each band, row and column: float32 (bands, rows, cols).

    `key`: 64 bits.
    """
    noise_CHW = np.empty((bands, rows.size, cols.size), np.float32)
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    height = max(1, _CHUNK // max(1, cols.size))
    for first in range(0, bands, 2):
        words_H = _mixed(
            _mixed(rows.astype(np.uint32) ^ np.uint32(low)) + np.uint32(_GOLDEN * (first + 1) & 0xFFFFFFFF)
        )
        words_W = _mixed(cols.astype(np.uint32) ^ np.uint32(high))
        for start in range(0, rows.size, height):
            part = slice(start, start + height)
            words_HW = _mixed(words_H[part, None] + words_W)
            _quantiles().take(words_HW & np.uint32(0xFFFF), out=noise_CHW[first, part], mode="wrap")
            if first + 1 < bands:
                words_HW >>= np.uint32(16)
                _quantiles().take(words_HW, out=noise_CHW[first + 1, part], mode="wrap")
    return noise_CHW


def _mixed(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return each word mixed, in place where it can be: modulo 2^32, as arrays of unsigned integers multiply."""
    for shift, factor in _MIXING:
        words ^= words >> np.uint32(shift)
        words *= np.uint32(factor)
    words ^= words >> np.uint32(16)
    return words


@functools.cache
def _quantiles() -> NDArray[np.float32]:
    """Return 65536 quantiles of the standard normal distribution, at the middles of as many equal shares."""
    inverse, count = NormalDist().inv_cdf, 1 << 16
    upper = np.array([inverse((2 * i + 1) / (2 * count)) for i in range(count // 2, count)])
    values = np.concatenate([-upper[::-1], upper])
    return (values / values.std()).astype(np.float32)


@dataclass(frozen=True)
class Photometry:
    """A change of values: value * factor + offset in each band, then noise, then 0 in the bands that are not `kept`.
    `noise`: its deviation. The noise is a function of `key` (64 bits) and the pixel's place."""

    factors: tuple[float, ...]
    offsets: tuple[float, ...]
    kept: tuple[bool, ...]
    noise: float = 0.0
    key: int = 0

    def apply(self, x_CHW: NDArray, valid_HW: NDArray[np.bool_], box: Box, raster: tuple[int, int]) -> None:
        """Change in place the network's input of `box` of a raster of shape `raster`; 0 stays where a pixel is not
        valid.

        Beyond the raster the box shows mirrored pixels, which have the noise of their originals.
        """
        dtype = x_CHW.dtype.type
        for band_HW, factor, offset in zip(x_CHW, self.factors, self.offsets, strict=True):
            if factor != 1:
                band_HW *= dtype(factor)
            if offset:
                band_HW += dtype(offset)
        if self.noise:
            rows, cols = mirrored_positions(box.row, raster[0]), mirrored_positions(box.col, raster[1])
            noise_CHW = pixel_noise(self.key, len(x_CHW), rows, cols)
            noise_CHW *= np.float32(self.noise)
            x_CHW += noise_CHW
        for band_HW, kept in zip(x_CHW, self.kept, strict=True):
            if not kept:
                band_HW[:] = 0
        if not valid_HW.all():
            x_CHW[:, ~valid_HW] = 0
