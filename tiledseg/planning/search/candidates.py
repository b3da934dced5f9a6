"""The settings that a search compares: for each mode those grids and meshes that can keep the ranks busy.

The images of a step decide the result, and are not searched. Grids are nearly square. Mode `read` has those that give
each rank 1 to 8 tiles, and coarser and finer ones for the memory. The shared modes have a block a rank, of one tile or
of 2 x 2, for as many images at once as divide the step's in other rounds. Pipelines have 2, 3, 4 ranks or a host. Where
blocks may be taken, modes `read` and `layer` have them too. A given setting is kept, also where it is none of these.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tiledseg.config.words import SCHEDULES, chunk_ranks
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import finest_grid
from tiledseg.planning.run.norms import of_steps
from tiledseg.planning.run.plan import RunPlan
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.mode_cost import fusion_word, mode_words

TILES_A_RANK = (1, 2, 3, 4, 6, 8)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
MOST_TILES = 2**13  # of an image: each is looked at
MOST_PASSES = 256  # of a pipeline a step: each is simulated
MESHES = 3  # for each number of ranks an image
LONGEST = 2.0  # sides of a tile or block, or of the raster
FREE = frozenset(("halo", "mesh", "fusion", "stages", "schedule", "micro_batches", "recompute"))
Grid = tuple[int, int]


@dataclass(frozen=True)
class Candidate:
    """Settings of a run. `parallel`: its mesh is None in mode `read`. `blocks`: the fewest that fit."""

    parallel: Parallelism
    grid: Grid
    blocks: bool = False

    @property
    def tiles(self) -> int:
        """Count the tiles of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def kind(self) -> str:
        """Return the kind of a candidate, without its numbers."""
        if self.parallel.stages > 1:
            return f"{self.parallel.stages} stages, {self.parallel.schedule}"
        return f"{self.parallel.halo}, in blocks" if self.blocks else self.parallel.halo

    @property
    def in_words(self) -> str:
        parallel, cut = self.parallel, f"grid {self.grid[0]} x {self.grid[1]}"
        if parallel.mesh is None:
            again = f", recompute {parallel.recompute[0]}" if parallel.recompute[0] != "never" else ""
            flush = f", {parallel.micro_batches} micro-batches a flush" if parallel.micro_batches else ""
            return f"{self.kind}{again}{flush}, {cut}"
        mode = mode_words(parallel.halo, fusion_word(parallel.fusion or 1)) + ", in blocks" * self.blocks
        cut = f", {cut}" if self.grid != parallel.mesh else ""
        return f"{mode}, mesh {parallel.mesh[0]} x {parallel.mesh[1]}{cut}"

    def question(self, asked: RunQuestion) -> RunQuestion:
        """Return the question with these settings."""
        blocks = replace(asked.blocks, if_needed=False) if asked.blocks and self.blocks else None
        store = asked.store if self.parallel.stages == 1 and not self.blocks else None  # stages choose nothing of it
        return replace(asked, parallel=self.parallel, grid=self.grid, blocks=blocks, store=store)

    def keys(self, plan: RunPlan) -> dict[str, Any]:
        """Return the keys of the group `parallel` by which a run of the plan differs from the defaults."""
        parallel, keys = self.parallel, dict[str, Any]()
        if parallel.mesh is not None:
            keys = {"halo": parallel.halo, "mesh": list(parallel.mesh)}
            if plan.spread.shares_layers and plan.spread.fusion != 1:
                keys["fusion"] = fusion_word(plan.spread.fusion)
        if plan.pipeline is not None:
            keys |= {"stages": parallel.stages, "balance": list(plan.pipeline.balance), "schedule": parallel.schedule}
            keys |= {"recompute": parallel.recompute[0]} if parallel.recompute[0] != "never" else {}
            keys |= {"micro_batches": parallel.micro_batches} if parallel.micro_batches else {}
        return keys


def largest_shape(question: RunQuestion) -> tuple[int, int]:
    """Return the height and width of the question's largest image."""
    return max((extent.shape for extent in question.rasters), key=math.prod)


def candidates(question: RunQuestion, footprint: Footprint, host: int, free: Collection[str]) -> list[Candidate]:
    """List the settings to compare, those included that memory or a norm forbids. `host`: ranks of one. `free`: the
    settings that are searched; the others are as the question has them, but for a mesh and a fusion that it leaves to
    the plan."""
    asked, finest = question.parallel, finest_grid(largest_shape(question), footprint)
    one_rank = {"stages": 1, "schedule": "1f1b", "micro_batches": None, "recompute": ("never",)}
    plain = replace(asked, halo="read", mesh=None, fusion=1, **one_rank)  # type: ignore[arg-type]  # names of its fields
    whole = [Candidate(plain, grid) for grid in _read_grids(question, finest, question.ranks)]
    whole += _shared(question, finest, plain, free)
    if question.is_profiled:
        whole += _staged(question, finest, plain, host, free)
    in_blocks = [replace(each, blocks=True) for each in whole if question.blocks and _may_block(each.parallel)]
    return [each for each in dict.fromkeys((*whole, *in_blocks)) if _keeps(each.parallel, asked, free)]


def _may_block(parallel: Parallelism) -> bool:
    """Return True if a rank may compute its tiles, or its part of an image, in blocks."""
    layers = parallel.halo == "layer" and parallel.fusion in (None, 1) and not parallel.overlap
    return parallel.stages == 1 and (parallel.halo == "read" or layers)


def _keeps(parallel: Parallelism, asked: Parallelism, free: Collection[str]) -> bool:
    """Return True if the settings that are not free are as asked."""
    chunks = len(chunk_ranks(parallel.schedule, parallel.stages))
    return (asked.balance is None or len(asked.balance) == chunks) and all(
        set(asked.recompute) == set(parallel.recompute)
        if name == "recompute"
        else getattr(asked, name) in (None, getattr(parallel, name))
        for name in FREE - set(free)
    )


def _read_grids(question: RunQuestion, finest: Grid, ranks: int) -> list[Grid]:
    if question.grid:
        return [question.grid]
    (height, width), images = largest_shape(question), question.images_per_step
    busy = {grid for per in TILES_A_RANK for grid in near_squares((height, width), finest, per * ranks // images, 2)}
    squares = {(rows, min(finest[1], max(1, round(rows * width / height)))) for rows in ROWS if rows <= finest[0]}
    return sorted(grid for grid in busy | squares if math.prod(grid) <= MOST_TILES)


def _shared(question: RunQuestion, finest: Grid, plain: Parallelism, free: Collection[str]) -> Iterator[Candidate]:
    fusion = None if "fusion" in free else question.parallel.fusion
    together = question.images_per_step > 1 and bool(of_steps(question.graph))
    for mesh in _meshes(question, finest, free):
        if mesh == (1, 1) and "halo" in free and not together:
            continue  # nobody to share an image with
        grids = [question.grid] if question.grid else [mesh, (2 * mesh[0], 2 * mesh[1])]
        for grid in grids:
            if all(ranks <= tiles <= most for ranks, tiles, most in zip(mesh, grid, finest, strict=True)):
                yield Candidate(replace(plain, halo="exchange", mesh=mesh), grid)
                if grid == grids[0]:
                    yield Candidate(replace(plain, halo="layer", mesh=mesh, fusion=fusion), grid)


def _meshes(question: RunQuestion, finest: Grid, free: Collection[str]) -> list[Grid]:
    images, ranks, given = question.images_per_step, question.ranks, question.parallel.mesh
    if given and "mesh" not in free:
        return [given] if math.prod(given) <= ranks else []
    most, at_once = math.prod(question.grid or (MOST_TILES, 1)), {-(-images // n) for n in range(1, images + 1)}
    counts = {min(ranks // replicas, most) for replicas in at_once}
    return sorted({mesh for n in counts for mesh in near_squares(largest_shape(question), finest, n, MESHES)})


def _staged(
    question: RunQuestion, finest: Grid, plain: Parallelism, host: int, free: Collection[str]
) -> Iterator[Candidate]:
    asked, most = question.parallel, min(host, len(question.graph) // 2)
    schedules = SCHEDULES if "schedule" in free else (asked.schedule,)
    words = ("never", "always") if "recompute" in free else asked.recompute[:1]
    for stages in sorted({n for n in (2, 3, 4, host) if n <= most}) if "stages" in free else [asked.stages]:
        pipelines = question.ranks // stages
        for grid in _read_grids(question, finest, pipelines) if stages > 1 and pipelines else ():
            passes = -(-math.prod(grid) * question.images_per_step // pipelines)
            if passes > MOST_PASSES and not question.grid:
                continue
            flushes = {None, 4 * stages if passes > 4 * stages else None}
            flushes = flushes if "micro_batches" in free else {asked.micro_batches}
            for schedule, word, flush in product(schedules, words, sorted(flushes, key=str)):
                pipeline = {"stages": stages, "schedule": schedule, "recompute": (word,) * stages}
                yield Candidate(replace(plain, **pipeline, micro_batches=flush), grid)  # type: ignore[arg-type]


def near_squares(shape: tuple[int, int], finest: Grid, most: int, count: int) -> list[Grid]:
    """Return the `count` best grids of at most `most` parts: by the largest part's pixels, then by its edges."""
    (height, width), square = shape, math.sqrt(most * shape[0] / shape[1])
    ordered = []
    for rows in range(max(1, int(square / LONGEST)), int(square * LONGEST) + 2):
        cols = most // rows
        if rows <= finest[0] and 1 <= cols <= finest[1] and (height != width or rows >= cols):
            part = -(-height // rows), -(-width // cols)
            ordered.append((math.prod(part), sum(part), (rows, cols)))
    return [grid for *_, grid in sorted(ordered)[:count]]
