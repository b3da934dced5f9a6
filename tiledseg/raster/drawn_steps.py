"""The steps of a run with what each tile draws: tiles of a tiling, or windows anywhere in the images.

Draws depend on (seed, epoch, image), and the tile where each has its own, or on (seed, epoch, step) for windows: never
on ranks, nor on what was drawn before. Every rank makes all of them.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import window_tile
from tiledseg.raster.draws import Draw, Drawer, drawn_number
from tiledseg.raster.sampling import DrawnStep, DrawnTile, Position, Sampler, Step
from tiledseg.raster.views import whole


@dataclass(frozen=True)
class DrawnTiles:
    """The steps of `sampler`, each image (`each` "image") or tile of an epoch with a draw of its own."""

    sampler: Sampler
    drawer: Drawer
    each: str

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def steps_from(self, position: Position, epochs: int) -> Iterator[tuple[Position, DrawnStep]]:
        for at, step in self.sampler.steps_from(position, epochs):
            yield at, step if self.drawer.is_idle else self._drawn(step, at.epoch)

    def _drawn(self, step: Step, epoch: int) -> DrawnStep:
        found: dict[str, Draw | None] = {}
        result = []
        for reference in step:
            tile = f" {reference.tile}" if self.each == "tile" else ""
            words = f"tiledseg.augmentation {self.sampler.seed} {epoch} {reference.image}{tile}"
            if words not in found:
                found[words] = self.drawer.draw(words, reference.image)
            result.append(DrawnTile(*reference, found[words]))
        return tuple(result)


@dataclass(frozen=True)
class DrawnWindows:
    """Steps of `per_step` square windows of `side` pixels, drawn anywhere in the drawer's images, each with a draw of
    its own: an image by its share of the pixels, then a place in it, each as likely as any other.

    With a `footprint` a window is a tile with its exact halo: it begins at multiples of the network's alignment in its
    raster, as drawn. Without one it begins anywhere and is an image of its own: number k of a step is image k, of a
    single tile, and beyond it is nothing. An epoch has as many windows as cover all pixels once.

    Raises ConfigError where a window is larger than an image.
    """

    drawer: Drawer
    side: int
    per_step: int
    seed: int
    footprint: Footprint | None

    def __post_init__(self) -> None:
        least = min(min(shape) for shape in self.drawer.shapes)
        if self.side > least:
            raise ConfigError(
                f"train.window is {self.side}, but an image has {least} px along one side; give at most {least}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(sum(self._areas()) / (self.per_step * self.side**2))

    def steps_from(self, position: Position, epochs: int) -> Iterator[tuple[Position, DrawnStep]]:
        for epoch in range(position.epoch, epochs):
            first = position.step if epoch == position.epoch else 0
            for index in range(first, self.steps_per_epoch):
                yield Position(epoch, index), self.step(Position(epoch, index))

    def step(self, position: Position) -> DrawnStep:
        return tuple(self._window(position, k) for k in range(self.per_step))

    def _window(self, position: Position, k: int) -> DrawnTile:
        words = f"tiledseg.windows {self.seed} {position.epoch} {position.step} {k}"
        generator = random.Random(drawn_number(words, "place"))
        ends = list(itertools.accumulate(self._areas()))
        image = bisect.bisect_right(ends, int(generator.random() * ends[-1]))
        draw = self.drawer.draw(words, image)
        view = whole(self.drawer.shapes[image]) if draw is None or draw.view is None else draw.view
        unit = self.footprint.alignment if self.footprint else 1
        row, col = (int(generator.random() * (-(-(size - self.side) // unit) + 1)) * unit for size in view.shape)
        if self.footprint:
            return DrawnTile(image, window_tile(view.shape, (row, col), self.side, self.footprint, k), draw)
        seen = view.window(row, col, (self.side, self.side))
        return DrawnTile(k, 0, Draw(seen, draw.photometry if draw else None, image))

    def _areas(self) -> list[int]:
        return [height * width for height, width in self.drawer.shapes]
