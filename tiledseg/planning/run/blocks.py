"""Blocks of a tile: how many, and their bytes on a rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.joins import ImageProducts
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.planning.walk.cost_model import ASSUMED_STORE, Store
from tiledseg.planning.walk.rank_steps import check_countable

MOST_TRIED = 64  # blocks a side
MOST_WORSE = 4  # shapes tried without one that needs less, after which the search ends
GIB = 2**30


@dataclass(frozen=True)
class BlockSettings:
    """The settings of blocks. `shape`: the most (rows, cols) of blocks, None for the fewest that fit. `in_file`: blocks
    lie in a file between segments, not in memory. `store`: the rates of that file, None for assumed ones. `if_needed`:
    tiles stay whole where a step on them fits the memory."""

    shape: tuple[int, int] | None
    in_file: bool = False
    if_needed: bool = False
    store: Store | None = None


@dataclass(frozen=True)
class BlockPlan:
    """At most `shape` (rows, cols) blocks of a tile. `memory`: bytes of a step. `stored`: bytes of blocks between
    segments, a part of `memory` unless they lie `in_file`. `extra`: the further seconds of a step in blocks, as a share
    of the seconds of a step on whole tiles."""

    shape: tuple[int, int]
    memory: int
    stored: int
    in_file: bool
    trains: bool = True
    extra: float = 0.0

    @property
    def in_words(self) -> str:
        """The plan as a line of the log."""
        where = "in a file" if self.in_file else "in memory"
        cut = f"at most {self.shape[0]} x {self.shape[1]} a tile, {self.stored / GIB:.4g} GiB of them {where}"
        step = f": {self.memory / GIB:.4g} GiB a step, for about {100 * self.extra:.0f} % more time"
        return cut + step * self.trains

    def note(self, memory: int) -> str | None:
        """Return a warning where a step needs more than the `memory` of a rank."""
        needs = f"{'a training step' if self.trains else 'a map'} in blocks needs up to {self.memory / GIB:.1f} GiB"
        had = f"{memory / GIB:.1f} GiB are available; use {self.remedy}"
        return f"{needs}, but {had}" if self.memory > memory else None

    @property
    def remedy(self) -> str:
        """The way to a step of fewer bytes."""
        return f"{'more' if self.in_file else 'memory.store, a folder on a local disk, or more'} memory.blocks"


def seen_whole(graph: Graph) -> str | None:
    """Return the name of the first node that reads the whole image at once, as no block can; None without one."""
    names = (each.name for each in graph.nodes if each.layer.sees_all or isinstance(each.layer, ImageProducts))
    return next(names, None)


def blocks_of(
    settings: BlockSettings,
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    value: int,
    memory: int,
    trains: bool = True,
    shared: tuple[Partition, Partition] | None = None,
    together: int | None = None,
) -> BlockPlan:
    """Plan the blocks of one context of (height, width). `shared`: the rows and columns that each rank owns, None for
    one rank. Shapes are tried from few blocks to many. The first one that fits is taken, else the one that needs least:
    the halos of many small blocks need more memory again."""
    from tiledseg.planning.walk.segment_memory import BlockedStep

    own = context if shared is None else tuple(max(block.size for block in cut.blocks) for cut in shared)
    best, worse, longer = None, 0, max(own) / min(own)
    sides = [(side, max(1, math.ceil(side / longer))) for side in range(1, MOST_TRIED + 1)]  # about as long as wide
    for shape in [settings.shape] if settings.shape else [each if own[0] >= own[1] else each[::-1] for each in sides]:
        needs = BlockedStep(graph, bands, context, shape, value, trains, shared, together)
        needed, countable = needs.total(settings.in_file), needs.largest.is_countable
        if best is None or needed < best[1].total(settings.in_file) or not best[1].largest.is_countable:
            best, worse = (shape, needs), 0
        else:
            worse += 1
        if countable and (needed <= memory or worse == MOST_WORSE or needs.least(settings.in_file) > memory):
            break
    assert best is not None, "some shape was looked at"
    shape, needs = best
    check_countable(needs.largest, "use more memory.blocks")
    rates = settings.store or ASSUMED_STORE
    extra = needs.more_time(rates.machine, rates.waited if settings.in_file else None) if trains else 0.0
    return BlockPlan(shape, needs.total(settings.in_file), needs.stored, settings.in_file, trains, extra)
