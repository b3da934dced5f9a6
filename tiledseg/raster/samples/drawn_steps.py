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
from dataclasses import dataclass, replace

from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, window_tile
from tiledseg.raster.places import View
from tiledseg.raster.samples.content import Content, ContentSampler
from tiledseg.raster.samples.draws import Draw, Drawer, drawn_number
from tiledseg.raster.samples.sampling import Position, Sampler, Step, Steps, TileReference


@dataclass(frozen=True)
class DrawnTiles(Steps):
    """The steps of `sampler`, each image (`each` "image") or tile of an epoch with a draw of its own.

    Tiles that were drawn by their content are given with the `tilings`: a draw that moves pixels then shows the tile of
    the changed raster in which the centre of the drawn one stands. `turned`: the images that have another shape after a
    quarter turn; so shown the k-th of them is an image of its own, the k-th after all others, with as many tiles.
    """

    sampler: Sampler | ContentSampler
    drawer: Drawer
    each: str
    tilings: tuple[Tiling, ...] = ()
    turned: tuple[int, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def steps(self, epoch: int) -> Iterator[Step]:
        for step in self.sampler.steps(epoch):
            yield step if self.drawer.is_idle else self._drawn(step, epoch)

    def _drawn(self, step: Step, epoch: int) -> Step:
        draws: dict[str, Draw | None] = {}
        result = []
        for reference in step:
            tile = f" {reference.tile}" if self.each == "tile" else ""
            words = f"tiledseg.augmentation {self.sampler.seed} {epoch} {reference.image}{tile}"
            if words not in draws:
                draws[words] = self.drawer.draw(words, reference.image)
            result.append(self._shown(reference, draws[words]))
        return tuple(result)

    def _shown(self, reference: TileReference, draw: Draw | None) -> TileReference:
        image, tile, _ = reference
        if draw is None or draw.view is None:
            return TileReference(image, tile, draw)
        if draw.view.shape != self.drawer.shapes[image]:
            draw = replace(draw, source=image)
            image = len(self.drawer.shapes) + self.turned.index(image)
        if self.tilings:
            core = self.tilings[reference.image].tiles[tile].core  # type: ignore[index]
            tile = self.tilings[image].tile_at(*draw.view.find(*_centre(core))).index  # type: ignore[union-attr]
        return TileReference(image, tile, draw)


def _centre(box: Box) -> tuple[float, float]:
    return (box.row.start + box.row.stop - 1) / 2, (box.col.start + box.col.stop - 1) / 2


@dataclass(frozen=True)
class DrawnWindows(Steps):
    """Steps of `per_step` square windows of `side` pixels, drawn anywhere in the drawer's images. Each has a draw of
    its own: an image by its share of the pixels, then a place in it, each as likely as any other.

    With a `footprint` a window is a tile with its exact halo: it begins at multiples of the network's alignment in its
    raster, as drawn. Without one it begins anywhere and is an image of its own: number k of a step is image k, of a
    single tile, and beyond it is nothing. An epoch has as many windows as cover all pixels once.

    With `content` (of squares) a share of the windows is drawn by class, around a place in a square that has the class.
    Where empty squares are skipped, the others are drawn around a square that has a label.

    A rotation is about the middle of the window, so that it shows what stands there.

    Raises ConfigError where a window is larger than an image.
    """

    drawer: Drawer
    side: int
    per_step: int
    seed: int
    footprint: Footprint | None
    content: Content | None = None

    def __post_init__(self) -> None:
        least = min(min(shape) for shape in self.drawer.shapes)
        if self.side > least:
            raise ConfigError(
                f"train.window is {self.side}, but an image has {least} px along one side; give at most {least}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(sum(self._areas()) / (self.per_step * self.side**2))

    def steps(self, epoch: int) -> Iterator[Step]:
        for index in range(self.steps_per_epoch):
            yield self.step(Position(epoch, index))

    def step(self, position: Position) -> Step:
        return tuple(self._window(position, k) for k in range(self.per_step))

    def _window(self, position: Position, k: int) -> TileReference:
        words = f"tiledseg.windows {self.seed} {position.epoch} {position.step} {k}"
        generator = random.Random(drawn_number(words, "place"))
        place = self._place(generator)
        image = place[0] if place else self._image(generator)
        view, photometry, angle = self.drawer.draw_upright(words, image)
        if place:
            row, col = (self._around(at, size) for at, size in zip(view.find(*place[1:]), view.shape, strict=True))
        else:
            row, col = (int(generator.random() * self._starts(size)) * self._unit for size in view.shape)
        if angle:
            view = view.rotated(angle, row + (self.side - 1) / 2, col + (self.side - 1) / 2)
        if self.footprint:
            tile = window_tile(view.shape, (row, col), self.side, self.footprint, k)
            changed = None if view == View(self.drawer.shapes[image]) else view
            return TileReference(image, tile, Draw(changed, photometry) if changed or photometry else None)
        return TileReference(k, 0, Draw(view.window(row, col, (self.side, self.side)), photometry, image))

    def _place(self, generator: random.Random) -> tuple[int, float, float] | None:
        """Return (image, row, col) that a window is to show, by content; None for any."""
        content = self.content
        if content is None:
            return None
        by_class = generator.random() < content.choice.balance
        if not by_class and not content.choice.skip_empty:
            return None
        region = content.regions[content.by_class(generator) if by_class else content.by_label(generator)]
        row, col = (side.start + generator.random() * side.size for side in (region.box.row, region.box.col))
        return region.image, row, col

    def _image(self, generator: random.Random) -> int:
        ends = list(itertools.accumulate(self._areas()))
        return bisect.bisect_right(ends, int(generator.random() * ends[-1]))

    @property
    def _unit(self) -> int:
        return self.footprint.alignment if self.footprint else 1

    def _starts(self, size: int) -> int:
        """Return the places where a window may begin along a dim."""
        return -(-(size - self.side) // self._unit) + 1

    def _around(self, at: float, size: int) -> int:
        """Return the begin of the window whose middle is nearest to a place."""
        return max(0, min(self._starts(size) - 1, round((at - self.side / 2) / self._unit))) * self._unit

    def _areas(self) -> list[int]:
        return [height * width for height, width in self.drawer.shapes]
