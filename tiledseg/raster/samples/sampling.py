"""The tiles of each step with their augmentation draws.

The order depends on (seed, epoch) alone: every rank computes all of it without communication, and any number of ranks
has the same steps. Random numbers: `random.Random` seeded with the first 8 bytes of SHA-256 of
"tiledseg.sampling <seed> <epoch>"; the shuffle is Fisher-Yates over `Random.random()`, the one method whose sequence
Python guarantees. Augmentation draws depend on (seed, epoch, image) and optionally the tile, or on (seed, epoch, step)
for windows; never on ranks or earlier draws."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tile, Tiling, window_tile
from tiledseg.raster.places import View
from tiledseg.raster.samples.content import Content, Unit, square_units, tile_units
from tiledseg.raster.samples.draws import Draw, Drawer, drawn_number
from tiledseg.raster.statistics import Region
from tiledseg.system.console import counted


class TileReference(NamedTuple):
    """A tile of a step: number of its image, its number in the image or itself, and its augmentation."""

    image: int
    tile: int | Tile
    draw: Draw | None = None


class Position(NamedTuple):
    """A position in a run: the next step is step `step` of epoch `epoch`, both counted from 0."""

    epoch: int
    step: int


LEAST_SQUARE = 16  # least side in pixels of a region of labels by which windows are drawn
T = TypeVar("T")
Step = tuple[TileReference, ...]


@dataclass(frozen=True)
class Steps(ABC):
    """The steps of a run, the same on every rank. `content`: the labels by which they are drawn (None: by none)."""

    content: Content | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int: ...

    @abstractmethod
    def steps(self, epoch: int) -> Iterator[Step]:
        """Yield the steps of an epoch."""

    @abstractmethod
    def units(self) -> list[Unit]:
        """Return the regions whose labels `content` counts."""

    def steps_from(self, position: Position, epochs: int) -> Iterator[tuple[Position, Step]]:
        """Yield the steps from `position` to the end of epoch `epochs` - 1, each with its own position."""
        for epoch in range(position.epoch, epochs):
            first = position.step if epoch == position.epoch else 0
            for index, step in enumerate(self.steps(epoch)):
                if index >= first:
                    yield Position(epoch, index), step


@dataclass(frozen=True)
class Sampler(Steps):
    """The steps of a run over the `tiles` of each image, by their numbers.

    `tiles_per_step` None: images are shuffled, and a step is all tiles of `images_per_step` images; the last step of an
    epoch may have fewer. A number: all tiles are shuffled and cut into steps of that many; a smaller last step is kept.
    Each tile occurs once an epoch. The tiles of a step are sorted, so that neighbours share decoded blocks; the result,
    a sum, does not change.

    With `content` (and a number of tiles a step) an epoch has as many tiles as `content.drawn`. Each of these, in
    shuffled order, is replaced with the probability `balance` by a tile drawn by class, which may repeat.

    `drawer`: gives each image (`each` "image") or tile of an epoch an augmentation draw. `turned`: the images whose
    shape a quarter turn changes. The turned form of the k-th of them is image number `len(tiles)` + k, with as many
    tiles. `tilings`: of all images, turned ones last. With `content`, a draw that moves pixels selects the tile of the
    augmented raster that holds the centre of the drawn tile.

    Raises ConfigError if there are fewer tiles than one step takes.
    """

    tiles: tuple[Sequence[int], ...]
    seed: int
    tiles_per_step: int | None = None
    images_per_step: int = 1
    drawer: Drawer | None = None
    each: str = "image"
    turned: tuple[int, ...] = ()
    tilings: tuple[Tiling, ...] = ()

    def __post_init__(self) -> None:
        if self.images_per_step > len(self.tiles):
            raise ConfigError(
                f"train.images_per_step is {self.images_per_step}, but there are {len(self.tiles)} training images; "
                "give at most that many"
            )
        total = self._tiles_per_epoch
        if self.tiles_per_step is not None and self.tiles_per_step > total:
            have = f"the training images have {counted(total, 'tile')} in all"
            if self.content is not None:
                have = f"train.skip_empty leaves {total} of {len(self.content.regions)} tiles"
            raise ConfigError(
                f"train.tiles_per_step is {self.tiles_per_step}, but {have}; give at most {total}, or a finer "
                "tiling.grid"
            )

    @property
    def _tiles_per_epoch(self) -> int:
        return sum(map(len, self.tiles)) if self.content is None else len(self.content.drawn)

    @property
    def steps_per_epoch(self) -> int:
        if self.tiles_per_step is None:
            return math.ceil(len(self.tiles) / self.images_per_step)
        return math.ceil(self._tiles_per_epoch / self.tiles_per_step)

    def units(self) -> list[Unit]:
        return tile_units(self.tilings[: len(self.tiles)])

    def steps(self, epoch: int) -> Iterator[Step]:
        generator = random.Random(drawn_number(f"tiledseg.sampling {self.seed}", str(epoch)))
        every = [[TileReference(image, tile) for tile in own] for image, own in enumerate(self.tiles)]
        if self.tiles_per_step is None:
            groups, size = [every[image] for image in shuffled(range(len(every)), generator)], self.images_per_step
        elif self.content is None:
            groups = [[one] for one in shuffled(list(itertools.chain(*every)), generator)]
            size = self.tiles_per_step
        else:
            groups = [[TileReference(one.image, one.tile)] for one in self._drawn(self.content, generator)]
            size = self.tiles_per_step
        for start in range(0, len(groups), size):
            step = tuple(sorted(itertools.chain(*groups[start : start + size])))
            yield step if self.drawer is None or self.drawer.is_idle else self._augmented(step, epoch, self.drawer)

    def _drawn(self, content: Content, generator: random.Random) -> list[Region]:
        return [
            content.regions[content.draw(True, generator) if generator.random() < content.choice.balance else number]
            for number in shuffled(content.drawn, generator)
        ]

    def _augmented(self, step: Step, epoch: int, drawer: Drawer) -> Step:
        draws: dict[str, Draw | None] = {}
        result = []
        for image, tile, _ in step:
            each = f" {tile}" if self.each == "tile" else ""
            words = f"tiledseg.augmentation {self.seed} {epoch} {image}{each}"
            if words not in draws:
                draws[words] = drawer.draw(words, image)
            draw, shown = draws[words], image
            if draw is not None and draw.view is not None:
                if draw.view.shape != drawer.shapes[image]:
                    draw, shown = replace(draw, source=image), len(drawer.shapes) + self.turned.index(image)
                if self.content is not None:
                    core = self.tilings[image].tiles[tile].core  # type: ignore[index]
                    centre = ((side.start + side.stop - 1) / 2 for side in (core.row, core.col))
                    tile = self.tilings[shown].tile_at(*draw.view.find(*centre)).index  # type: ignore[union-attr]
            result.append(TileReference(shown, tile, draw))
        return tuple(result)


def shuffled(items: Sequence[T], generator: random.Random) -> list[T]:
    """Return the items shuffled by Fisher-Yates; draws `Random.random()` only."""
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        other = int(generator.random() * (last + 1))
        result[last], result[other] = result[other], result[last]
    return result


@dataclass(frozen=True)
class DrawnWindows(Steps):
    """The steps of `per_step` square windows of `side` pixels, drawn uniformly over the pixels of the drawer's images,
    each with its own augmentation draw.

    With a `footprint` a window is a tile with its exact halo; it begins at multiples of the network's alignment in the
    augmented raster. Without one it begins anywhere and is an image of its own: window k of a step is image k with a
    single tile and no halo. An epoch has as many windows as cover all pixels once.

    With `content` (of squares) a share of the windows is drawn by class, around a position in a square with the class.
    If empty squares are skipped, the other windows are drawn around a square with a valid label. A window rotates about
    its middle.

    Raises ConfigError if a window is larger than an image.
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
                f"train.windows: size is {self.side}, but an image has {least} px along one side; give at most {least}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(sum(self._areas()) / (self.per_step * self.side**2))

    def units(self) -> list[Unit]:
        return square_units(self.drawer.shapes, max(LEAST_SQUARE, self.side // 2))

    def steps(self, epoch: int) -> Iterator[Step]:
        for index in range(self.steps_per_epoch):
            yield self.step(Position(epoch, index))

    def step(self, position: Position) -> Step:
        return tuple(self._window(position, k) for k in range(self.per_step))

    def _window(self, position: Position, k: int) -> TileReference:
        words = f"tiledseg.windows {self.seed} {position.epoch} {position.step} {k}"
        generator = random.Random(drawn_number(words, "place"))
        place, ends = self._place(generator), list(itertools.accumulate(self._areas()))
        image = place[0] if place else bisect.bisect_right(ends, int(generator.random() * ends[-1]))
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
        """Draw the (image, row, col) around which a window lies, by content; None for any position."""
        content = self.content
        if content is None:
            return None
        by_class = generator.random() < content.choice.balance
        if not by_class and not content.choice.skip_empty:
            return None
        region = content.regions[content.draw(by_class, generator)]
        row, col = (side.start + generator.random() * side.size for side in (region.box.row, region.box.col))
        return region.image, row, col

    @property
    def _unit(self) -> int:
        return self.footprint.alignment if self.footprint else 1

    def _starts(self, size: int) -> int:
        """Return the number of possible starts of a window along a dim."""
        return -(-(size - self.side) // self._unit) + 1

    def _around(self, at: float, size: int) -> int:
        """Return the start of the window whose middle is nearest to a position."""
        return max(0, min(self._starts(size) - 1, round((at - self.side / 2) / self._unit))) * self._unit

    def _areas(self) -> list[int]:
        return [height * width for height, width in self.drawer.shapes]
