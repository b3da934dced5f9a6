"""The tiles of each step, and of each rank: integers in, integers out.

The order depends on (seed, epoch) alone: every rank computes all of it, with no communication, and any number of ranks
sees the same steps. Random numbers: `random.Random` seeded with the first 8 bytes of SHA-256 of
"tiledseg.sampling <seed> <epoch>"; the shuffle is Fisher-Yates over `Random.random()`, the one method whose sequence
Python promises to keep.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tiledseg.errors import ConfigError
from tiledseg.geometry.tiling import Tile
from tiledseg.raster.samples.draws import Draw
from tiledseg.system.console import counted


class TileReference(NamedTuple):
    """Tile `tile` of image `image`, both counted from 0, or the tile itself, as a draw changes it, if any."""

    image: int
    tile: int | Tile
    draw: Draw | None = None


class Position(NamedTuple):
    """The place where a run stands: the next step is step `step` of epoch `epoch`, both counted from 0."""

    epoch: int
    step: int


T = TypeVar("T")
Step = tuple[TileReference, ...]


class Steps(ABC):
    """The steps of a run, the same on every rank."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int: ...

    @abstractmethod
    def steps(self, epoch: int) -> Iterable[Step]:
        """Return the steps of an epoch."""

    def steps_from(self, position: Position, epochs: int) -> Iterator[tuple[Position, Step]]:
        """Yield the steps from `position` to the end of epoch `epochs` - 1, each with its own position."""
        for epoch in range(position.epoch, epochs):
            first = position.step if epoch == position.epoch else 0
            for index, step in enumerate(self.steps(epoch)):
                if index >= first:
                    yield Position(epoch, index), step


@dataclass(frozen=True)
class Sampler(Steps):
    """The steps of a run over images of `tiles_per_image` tiles each.

    `tiles_per_step` None: a step is all tiles of `images_per_step` images, images shuffled; the last step of an epoch
    may have fewer. A number: all (image, tile) pairs are shuffled and cut into steps of that many; the last, smaller
    one is kept. Laws: each tile occurs once an epoch; nothing depends on the number of ranks. The tiles of a step are
    sorted, which changes no result (a step is a sum) and lets neighbours share the blocks that both read.

    `kept`: of each image the tiles that are taken (None: all), as many as `tiles_per_image` says.

    Raises ConfigError where there are fewer tiles than one step takes.
    """

    tiles_per_image: tuple[int, ...]
    seed: int
    tiles_per_step: int | None = None
    images_per_step: int = 1
    kept: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.images_per_step > len(self.tiles_per_image):
            raise ConfigError(
                f"train.images_per_step is {self.images_per_step}, but there are {len(self.tiles_per_image)} training "
                "images; give at most that many"
            )
        total = sum(self.tiles_per_image)
        if self.tiles_per_step is not None and self.tiles_per_step > total:
            raise ConfigError(
                f"train.tiles_per_step is {self.tiles_per_step}, but the training images have {counted(total, 'tile')} "
                f"in all; give at most {total}, or a finer tiling.grid"
            )

    @property
    def steps_per_epoch(self) -> int:
        if self.tiles_per_step is None:
            return math.ceil(len(self.tiles_per_image) / self.images_per_step)
        return math.ceil(sum(self.tiles_per_image) / self.tiles_per_step)

    def steps(self, epoch: int) -> list[Step]:
        generator = epoch_generator(self.seed, epoch)
        images = range(len(self.tiles_per_image))
        if self.tiles_per_step is None:
            order = shuffled(images, generator)
            groups = (
                order[start : start + self.images_per_step] for start in range(0, len(order), self.images_per_step)
            )
            return [tuple(tile for image in sorted(group) for tile in self._all_tiles(image)) for group in groups]
        pairs = shuffled([pair for image in images for pair in self._all_tiles(image)], generator)
        size = self.tiles_per_step
        return [tuple(sorted(pairs[start : start + size])) for start in range(0, len(pairs), size)]

    def _all_tiles(self, image: int) -> Step:
        tiles = self.kept[image] if self.kept is not None else range(self.tiles_per_image[image])
        return tuple(TileReference(image, tile) for tile in tiles)


def deal(step: Sequence[T], size: int, cost: Callable[[T], int]) -> list[tuple[T, ...]]:
    """Deal the tiles of a step to `size` ranks, balanced by `cost` (context pixels); some ranks may get none.

    The most expensive tile first, each to the rank with the least so far (Graham 1969: at most 4/3 of the best). Each
    rank keeps the step's order. The same on every rank.
    """
    costs = [cost(tile) for tile in step]
    loads = [(0, rank) for rank in range(size)]  # a heap: the least loaded rank first
    shares: list[list[int]] = [[] for _ in range(size)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = loads[0]
        shares[rank].append(i)
        heapq.heapreplace(loads, (load + costs[i], rank))
    return [tuple(step[i] for i in sorted(share)) for share in shares]


def epoch_generator(seed: int, epoch: int) -> random.Random:
    digest = hashlib.sha256(f"tiledseg.sampling {seed} {epoch}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def shuffled(items: Sequence[T], generator: random.Random) -> list[T]:
    """Return the items shuffled by Fisher-Yates, with `Random.random()` alone."""
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        other = int(generator.random() * (last + 1))
        result[last], result[other] = result[other], result[last]
    return result
