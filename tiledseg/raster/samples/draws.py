"""Draws of an augmentation for one raster, from (seed, epoch, image), and the tile where each has its own.

Nothing depends on ranks, halo modes or what was drawn before: any rank, and a resumed run, draws the same. Each kind
of change has a generator of its own, so that one more kind changes no draw of the others.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

from affine import Affine

from tiledseg.config.augmentation import Augmentation
from tiledseg.raster.places import View
from tiledseg.raster.samples.photometry import Photometry


@dataclass(frozen=True)
class Draw:
    """A change of a tile: of places by `view`, of values by `photometry` (None: no change). `source`: the image that is
    read, where that is not the tile's."""

    view: View | None = None
    photometry: Photometry | None = None
    source: int | None = None


@dataclass(frozen=True)
class Drawer:
    """Draws of an augmentation for images of `shapes` (height, width) with `bands` bands."""

    augmentation: Augmentation
    shapes: tuple[tuple[int, int], ...]
    bands: int

    @property
    def is_idle(self) -> bool:
        """Return True if it never changes anything."""
        return not (self.augmentation.moves or self.augmentation.recolours)

    def draw(self, words: str, image: int) -> Draw | None:
        """Draw for an image, by `words` alone. Return None where nothing changes."""
        augmentation = self.augmentation
        if self.is_idle:
            return None
        view = draw_view(augmentation, words, self.shapes[image])
        photometry = draw_photometry(augmentation, words, self.bands) if augmentation.recolours else None
        return Draw(None if view == View(self.shapes[image]) else view, photometry)

    def draw_upright(self, words: str, image: int) -> tuple[View, Photometry | None, float]:
        """Draw for an image, by `words` alone: a view that is not rotated, and the degrees of its rotation."""
        upright = replace(self, augmentation=replace(self.augmentation, rotate=0.0)).draw(words, image) or Draw()
        most = self.augmentation.rotate
        angle = _angle(most, _generator(words, "rotate")) if most else 0.0
        return upright.view or View(self.shapes[image]), upright.photometry, angle


def draw_view(augmentation: Augmentation, words: str, shape: tuple[int, int]) -> View:
    """Draw a view: the raster is reflected, turned, scaled about a point that is drawn too, and moved;
    then rotated about another point.

    A quarter turn shows a raster of `shape` as one of as many columns as that has rows.
    """
    reflect, turn, scale, move = (_generator(words, name) for name in ("reflect", "turn", "scale", "translate"))
    quarters = {0: 0, 90: int(4 * turn.random()), 180: 2 * int(2 * turn.random())}[augmentation.turn]
    backward = [may and reflect.random() < 0.5 for may in augmentation.reflect]
    # Turned counter-clockwise, a raster's columns run backward after one or two quarters, its rows after two or three.
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
        angle = _angle(augmentation.rotate, generator)
        view = view.rotated(angle, *(generator.random() * size - 0.5 for size in view.shape))
    return view


def _angle(most: float, generator: random.Random) -> float:
    return most * (2 * generator.random() - 1)


def _line(size: int, backward: bool, factor: float, point: float, shift: int) -> tuple[float, float]:
    """Return start and step of a dim of `size` pixels that is run `backward`, scaled about the share `point` of it,
    then moved."""
    base, sign = (size - 1, -1) if backward else (0, 1)
    if factor == 1:
        return base + sign * shift, sign
    fixed = point * size - 0.5
    return base + sign * ((shift - fixed) / factor + fixed), sign / factor


def draw_photometry(augmentation: Augmentation, words: str, bands: int) -> Photometry:
    """Draw how values change, each band by itself. At least one band is kept."""
    contrast, brightness, drop = (_generator(words, name) for name in ("contrast", "brightness", "drop_bands"))
    factors = tuple(1 + augmentation.contrast * (2 * contrast.random() - 1) for _ in range(bands))
    offsets = tuple(augmentation.brightness * (2 * brightness.random() - 1) for _ in range(bands))
    stays = int(bands * drop.random())
    kept = tuple([drop.random() >= augmentation.drop_bands for _ in range(bands)])
    if not any(kept):
        kept = tuple(band == stays for band in range(bands))
    return Photometry(factors, offsets, kept, augmentation.noise, drawn_number(words, "noise"))


def _generator(words: str, name: str) -> random.Random:
    return random.Random(drawn_number(words, name))


def drawn_number(words: str, name: str) -> int:
    """Return 64 random bits that depend on the words."""
    return int.from_bytes(hashlib.sha256(f"{words} {name}".encode()).digest()[:8], "big")
