"""The draws of an augmentation, from (seed, epoch, image) and optionally the tile, and its changes of values: contrast,
brightness, noise, dropped bands.

Draws do not depend on ranks, halo modes or earlier draws, so any rank, and a resumed run, draws the same. Each kind of
change has its own generator, so a new kind does not alter the draws of the others.

Noise is a counter-based function of a key and of a pixel's position: row and column are hashed, each by itself, and
their sum is hashed again (the 32-bit finaliser "lowbias32" of C. Wellons's hash prospector). Each half of the 32 bits
selects one of 65536 quantiles of the normal distribution, so one hash serves two bands.
"""

from __future__ import annotations

import functools
import hashlib
import random
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from tiledseg.config.words import Augmentation
from tiledseg.geometry.box import Box
from tiledseg.raster.mirrored_reader import mirrored_positions
from tiledseg.raster.places import View

_CHUNK = 1 << 14  # pixels hashed at a time: they fit the processor's cache
_GOLDEN = 0x9E3779B9
_MIXING = ((16, 0x7FEB352D), (15, 0x846CA68B))  # (shift, factor) of each round


def pixel_noise(key: int, bands: int, rows: NDArray[np.intp], cols: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return normal noise (mean 0, deviation 1), float32 (bands, rows, cols). `key`: 64 bits."""
    noise_CHW = np.empty((bands, rows.size, cols.size), np.float32)
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    height = max(1, _CHUNK // max(1, cols.size))
    for first in range(0, bands, 2):
        words_H = mixed(mixed(rows.astype(np.uint32) ^ np.uint32(low)) + np.uint32(_GOLDEN * (first + 1) & 0xFFFFFFFF))
        words_W = mixed(cols.astype(np.uint32) ^ np.uint32(high))
        for start in range(0, rows.size, height):
            part = slice(start, start + height)
            words_HW = mixed(words_H[part, None] + words_W)
            _quantiles().take(words_HW & np.uint32(0xFFFF), out=noise_CHW[first, part], mode="wrap")
            if first + 1 < bands:
                _quantiles().take(words_HW >> np.uint32(16), out=noise_CHW[first + 1, part], mode="wrap")
    return noise_CHW


def mixed(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Hash each word in place, modulo 2^32, and return the array."""
    for shift, factor in _MIXING:
        words ^= words >> np.uint32(shift)
        words *= np.uint32(factor)
    words ^= words >> np.uint32(16)
    return words


@functools.cache
def _quantiles() -> NDArray[np.float32]:
    """Return 65536 quantiles of the standard normal distribution, at the midpoints of equal probabilities."""
    inverse, count = NormalDist().inv_cdf, 1 << 16
    upper = np.array([inverse((2 * i + 1) / (2 * count)) for i in range(count // 2, count)])
    values = np.concatenate([-upper[::-1], upper])
    return (values / values.std()).astype(np.float32)


@dataclass(frozen=True)
class Photometry:
    """A change of values: value * factor + offset in each band, then noise, then 0 in bands that are not `kept`.
    `noise`: its standard deviation; `key` (64 bits) and the pixel's position determine it."""

    factors: tuple[float, ...]
    offsets: tuple[float, ...]
    kept: tuple[bool, ...]
    noise: float = 0.0
    key: int = 0

    def apply(self, x_CHW: NDArray, valid_HW: NDArray[np.bool_], box: Box, raster: tuple[int, int]) -> None:
        """Change the network's input of `box`, of a raster of shape `raster`, in place; invalid pixels stay 0. Mirrored
        pixels beyond the raster get the noise of their originals."""
        dtype = x_CHW.dtype.type
        for band_HW, factor, offset in zip(x_CHW, self.factors, self.offsets, strict=True):
            band_HW *= dtype(factor)
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


@dataclass(frozen=True)
class Draw:
    """An augmentation of a tile: of positions by `view`, of values by `photometry` (None: no change). `source`: number
    of the image to read, if not the tile's."""

    view: View | None = None
    photometry: Photometry | None = None
    source: int | None = None


@dataclass(frozen=True)
class Drawer:
    """A drawer of augmentations for images of `shapes` (height, width) with `bands` bands."""

    augmentation: Augmentation
    shapes: tuple[tuple[int, int], ...]
    bands: int

    @property
    def is_idle(self) -> bool:
        """Return True if the augmentation changes nothing."""
        return not (self.augmentation.moves or self.augmentation.recolours)

    def draw(self, words: str, image: int) -> Draw | None:
        """Draw an image's augmentation, determined by `words`; None if nothing changes."""
        augmentation = self.augmentation
        if self.is_idle:
            return None
        view, photometry = draw_view(augmentation, words, self.shapes[image]), None
        if augmentation.recolours:  # each band has its own draws; at least one band is kept
            contrast, brightness, drop = (_generator(words, name) for name in ("contrast", "brightness", "drop_bands"))
            factors = tuple(1 + augmentation.contrast * (2 * contrast.random() - 1) for _ in range(self.bands))
            offsets = tuple(augmentation.brightness * (2 * brightness.random() - 1) for _ in range(self.bands))
            stays = int(self.bands * drop.random())
            kept = tuple([drop.random() >= augmentation.drop_bands for _ in range(self.bands)])
            kept = kept if any(kept) else tuple(band == stays for band in range(self.bands))
            photometry = Photometry(factors, offsets, kept, augmentation.noise, drawn_number(words, "noise"))
        return Draw(None if view == View(self.shapes[image]) else view, photometry)

    def draw_upright(self, words: str, image: int) -> tuple[View, Photometry | None, float]:
        """Draw an image's augmentation, determined by `words`: view without its rotation, photometry, degrees."""
        upright = replace(self, augmentation=replace(self.augmentation, rotate=0.0)).draw(words, image) or Draw()
        most = self.augmentation.rotate
        angle = most * (2 * _generator(words, "rotate").random() - 1) if most else 0.0
        return upright.view or View(self.shapes[image]), upright.photometry, angle


def draw_view(augmentation: Augmentation, words: str, shape: tuple[int, int]) -> View:
    """Draw a view of a raster: reflected, turned, scaled about a drawn point, moved, then rotated about another drawn
    point. A quarter turn swaps height and width of `shape`."""
    reflect, turn, scale, move = (_generator(words, name) for name in ("reflect", "turn", "scale", "translate"))
    quarters = {0: 0, 90: int(4 * turn.random()), 180: 2 * int(2 * turn.random())}[augmentation.turn]
    backward = [may and reflect.random() < 0.5 for may in augmentation.reflect]
    # Counter-clockwise turns: columns run backward after one or two quarters, rows after two or three.
    backward = [backward[0] != (quarters in (2, 3)), backward[1] != (quarters in (1, 2))]
    least, largest = augmentation.scale
    factor = least * (largest / least) ** scale.random()
    shifts = [int(move.random() * (2 * augmentation.translate + 1)) - augmentation.translate for _ in range(2)]
    (row, down), (col, right) = (
        _line(size, back, factor, scale.random(), shift)
        for size, back, shift in zip(shape, backward, shifts, strict=True)
    )
    view = View(shape, Affine(down, 0, row, 0, right, col))
    if quarters % 2:
        view = View((shape[1], shape[0]), Affine(0, down, row, right, 0, col))
    if augmentation.rotate:
        generator = _generator(words, "rotate")
        angle = augmentation.rotate * (2 * generator.random() - 1)
        view = view.rotated(angle, *(generator.random() * size - 0.5 for size in view.shape))
    return view


def _line(size: int, backward: bool, factor: float, point: float, shift: int) -> tuple[float, float]:
    """Return (start, step) of a dim of `size` pixels, run `backward`, scaled about its share `point`, then shifted."""
    base, sign = (size - 1, -1) if backward else (0, 1)
    if factor == 1:
        return base + sign * shift, sign
    fixed = point * size - 0.5
    return base + sign * ((shift - fixed) / factor + fixed), sign / factor


def _generator(words: str, name: str) -> random.Random:
    return random.Random(drawn_number(words, name))


def drawn_number(words: str, name: str) -> int:
    """Return 64 random bits determined by the words."""
    return int.from_bytes(hashlib.sha256(f"{words} {name}".encode()).digest()[:8], "big")
