"""True if a rank computes its tiles in blocks, how many, and what they take of its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tiledseg.errors import BudgetError, ConfigError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.sharing.blocks import layer_blocks
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.modes.mode_choice import fusion_word
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.step.tensor_limit import MOST_VALUES, check_countable

if TYPE_CHECKING:
    from tiledseg.planning.memory.store import Store
    from tiledseg.planning.walk.segment_memory import SegmentMemory

MOST_TRIED = 64  # blocks a side
MOST_WORSE = 4  # shapes, each of which needs more than one before, until no better one is looked for
GIB = 2**30


@dataclass(frozen=True)
class BlocksAsked:
    """`shape`: at most so many rows and columns of blocks, None for the fewest that fit; `in_file`: they lie in a file
    between segments, not in memory, whose rates are those of `store` where they are known. `if_needed`: tiles stay
    whole unless that does not fit."""

    shape: tuple[int, int] | None
    in_file: bool = False
    if_needed: bool = False
    store: Store | None = None


@dataclass(frozen=True)
class BlockPlan:
    """At most `shape` (rows, cols) blocks of a tile. Bytes: `memory` of a step, and `stored` of blocks between
    segments, which `memory` holds too unless they lie in a file. `extra`: the seconds by which a step is longer than on
    the whole, as a share of its own."""

    shape: tuple[int, int]
    memory: int
    stored: int
    in_file: bool
    trains: bool = True
    extra: float = 0.0

    @property
    def in_words(self) -> str:
        """For the user."""
        where = "in a file" if self.in_file else "in memory"
        cut = f"at most {self.shape[0]} x {self.shape[1]} a tile, {self.stored / GIB:.4g} GiB of them {where}"
        if not self.trains:
            return cut
        return f"{cut}: {self.memory / GIB:.4g} GiB a step, for about {100 * self.extra:.0f} % more time"

    def note(self, memory: int) -> str | None:
        """What the user should know where a step needs more than the `memory` that a rank has."""
        if self.memory <= memory:
            return None
        what = "a training step" if self.trains else "a map"
        return (
            f"{what} in blocks needs up to {self.memory / GIB:.1f} GiB, but {memory / GIB:.1f} GiB are to be "
            f"had; use {self._remedy}"
        )

    def check_budget(self, budget: int) -> None:
        """Raise BudgetError where a step needs more than the bytes that the user has said it may."""
        if self.memory > budget:
            raise BudgetError(
                f"memory.budget is {budget} bytes, but a training step in at most {self.shape[0]} x {self.shape[1]} "
                f"blocks a tile needs {self.memory}; use {self._remedy}, or a larger budget"
            )

    @property
    def _remedy(self) -> str:
        return f"{'more' if self.in_file else 'memory.store, a folder on a local disk, or more'} memory.blocks"


def choose_blocks(
    asked: BlocksAsked,
    spread: Spread,
    graph: Graph,
    bands: int,
    tilings: Sequence[Tiling],
    value: int,
    memory: int,
    trains: bool = True,
    together: int | None = None,
) -> BlockPlan:
    """What `asked` means for images cut by `tilings`, where a rank has `memory` bytes, to train or to map; so many of
    its images may go `together`.

    Raises ConfigError where ranks hold halos of tiles, or some of the layers.
    """
    if spread.shares_images and not spread.shares_layers:
        raise ConfigError(
            f"memory.blocks is set, but with parallel.halo {spread.mode} a rank has halos of whole tiles; use "
            "parallel.halo layer or read, or leave it out"
        )
    if spread.overlap or spread.fusion > 1:
        word = "overlap true" if spread.overlap else f"fusion {fusion_word(spread.fusion)}"
        raise ConfigError(
            f"memory.blocks is set, but parallel.{word} is for tensors that are computed whole; with blocks halos "
            "travel between segments: leave one of them out"
        )
    if spread.mesh.stages > 1:
        raise ConfigError(
            f"memory.blocks is set, but with parallel.stages {spread.mesh.stages} a rank holds a run of layers, and no "
            "whole image passes through it; use parallel.stages 1, or leave it out"
        )
    context, shared = _largest(spread, graph, tilings)
    return blocks_of(asked, graph, bands, context, value, memory, trains, shared, together)


def blocks_of(
    asked: BlocksAsked,
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    value: int,
    memory: int,
    trains: bool = True,
    shared: tuple[Partition, Partition] | None = None,
    together: int | None = None,
) -> BlockPlan:
    """The same of one context of (height, width), which ranks may own as `shared` says."""
    from tiledseg.planning.walk.segment_memory import segment_memory

    own = context if shared is None else (_longest(shared[0]), _longest(shared[1]))
    shapes = [asked.shape] if asked.shape else _shapes(own)
    needs = partial(
        segment_memory, graph, bands, context, bytes_per_value=value, trains=trains, shared=shared, together=together
    )
    shape, found = _fewest(shapes, needs, asked.in_file, memory)
    check_countable([found.largest], "use more memory.blocks")
    extra = 0.0
    if trains:
        from tiledseg.planning.memory.segment_time import more_time
        from tiledseg.planning.memory.store import ASSUMED_STORE

        rates = asked.store or ASSUMED_STORE
        extra = more_time(graph, bands, context, shape, value, rates, asked.in_file, shared, together is not None)
    return BlockPlan(shape, found.total(asked.in_file), found.stored, asked.in_file, trains, extra)


def _fewest(
    shapes: Iterable[tuple[int, int]], needs: Callable[[tuple[int, int]], SegmentMemory], in_file: bool, memory: int
) -> tuple[tuple[int, int], SegmentMemory]:
    """The first shape that fits; where none does, that which needs least of those looked at: of many small blocks more
    lies there again, for what they read of each other."""
    best, worse = None, 0
    for shape in shapes:
        found = needs(shape)
        countable, needed = found.largest.values <= MOST_VALUES, found.total(in_file)
        if best is None or needed < best[1].total(in_file) or best[1].largest.values > MOST_VALUES:
            best, worse = (shape, found), 0
        else:
            worse += 1
        if countable and (needed <= memory or worse == MOST_WORSE or found.least(in_file) > memory):
            break
    assert best is not None, "some shape was looked at"
    return best


def _largest(
    spread: Spread, graph: Graph, tilings: Sequence[Tiling]
) -> tuple[tuple[int, int], tuple[Partition, Partition] | None]:
    """Height and width of what the network reads at once, and how ranks own it where they share it."""
    if not spread.shares_layers:
        return max((tiling.context_max for tiling in tilings), key=math.prod), None
    largest = max(tilings, key=lambda tiling: math.prod(tiling.raster))
    image = layer_blocks(largest, graph, (spread.mesh.rows, spread.mesh.cols))
    return image.whole.shape, (image.rows, image.cols)


def _longest(cut: Partition) -> int:
    return max(block.size for block in cut.blocks)


def _shapes(context: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """From few blocks to many, about as long as wide."""
    longer = max(context) / min(context)
    for side in range(1, MOST_TRIED + 1):
        other = max(1, math.ceil(side / longer))
        yield (side, other) if context[0] >= context[1] else (other, side)
