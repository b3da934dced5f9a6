"""The settings that a search may choose: for each mode those grids and meshes that can keep the ranks busy.

A step has its images, whatever the settings: they decide the result, and are not searched. Grids are nearly square.
Mode `read` has those that give each rank 1, 2, 3, 4, 6 or 8 tiles, and coarser and finer ones for the memory. The
shared modes have a block a rank, of one tile or of 2 x 2, for as many images at once as divide the step's in other
rounds. Pipelines have 2, 3, 4 ranks or a host. Where blocks may be taken, modes `read` and `layer` have them too. A
given setting is kept, also where it is none of these.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tiledseg.config.words import SCHEDULES, chunk_ranks
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import finest_grid
from tiledseg.planning.modes.mode_cost import fusion_word, mode_words
from tiledseg.planning.run.norms import norm_fault, of_steps
from tiledseg.planning.run.plan import RunPlan
from tiledseg.planning.run.question import RunQuestion

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
    """Settings of one run. `mesh`: (rows, cols) of ranks an image, None in mode `read`. `fusion`: of mode `layer`, None
    for the best. `stages`: above 1 in pipelines of mode `read`, with the `recompute` of each stage and the
    micro-batches between two flushes (None: all of a step). `blocks`: the fewest that fit."""

    halo: str
    grid: tuple[int, int]
    mesh: tuple[int, int] | None = None
    fusion: int | None = 1
    stages: int = 1
    schedule: str = "1f1b"
    recompute: str = "never"
    micro_batches: int | None = None
    blocks: bool = False

    @property
    def tiles(self) -> int:
        """Count the tiles of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def kind(self) -> str:
        """Return the kind of a candidate, without its numbers."""
        if self.stages > 1:
            return f"{self.stages} stages, {self.schedule}"
        return f"{self.halo}, in blocks" if self.blocks else self.halo

    @property
    def in_words(self) -> str:
        cut = f"grid {self.grid[0]} x {self.grid[1]}"
        if self.stages > 1:
            again = f", recompute {self.recompute}" if self.recompute != "never" else ""
            flush = f", {self.micro_batches} micro-batches a flush" if self.micro_batches else ""
            return f"{self.kind}{again}{flush}, {cut}"
        if self.mesh is None:
            return f"{self.kind}, {cut}"
        blocks = f"mesh {self.mesh[0]} x {self.mesh[1]}"
        mode = mode_words(self.halo, None if self.fusion is None else fusion_word(self.fusion))
        mode += ", in blocks" if self.blocks else ""
        return f"{mode}, {blocks}" + (f", {cut}" if self.grid != self.mesh else "")

    def question(self, asked: RunQuestion) -> RunQuestion:
        """Return the question with these settings."""
        mesh = self.mesh or (None if self.stages > 1 else (1, 1))  # dealt tiles: see `price`
        parallel = replace(
            asked.parallel,
            halo=self.halo,
            mesh=mesh,
            fusion=self.fusion,
            stages=self.stages,
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            recompute=(self.recompute,) * self.stages,
        )
        found = replace(asked.blocks, if_needed=False) if asked.blocks and self.blocks else None
        store = asked.store if self.stages == 1 and not self.blocks else None  # stages choose nothing of it
        return replace(asked, parallel=parallel, grid=self.grid, blocks=found, store=store)

    def keys(self, plan: RunPlan) -> dict[str, Any]:
        """Return the keys of the group `parallel` by which a run of the plan differs from the defaults."""
        found: dict[str, Any] = {}
        if self.mesh is not None:
            found = {"halo": self.halo, "mesh": list(self.mesh)}
            if plan.spread.fusion != 1 and plan.spread.shares_layers:
                found["fusion"] = fusion_word(plan.spread.fusion)
        if plan.pipeline is not None:
            found |= {"stages": self.stages, "balance": list(plan.pipeline.balance), "schedule": self.schedule}
            found |= {"recompute": self.recompute} if self.recompute != "never" else {}
            found |= {"micro_batches": self.micro_batches} if self.micro_batches else {}
        return found


@dataclass(frozen=True)
class Space:
    """The settings that a search may choose from, for images of `shape` (height, width), cut by the question's
    grid where it has one. `host`: ranks of one. `free`: the settings that are searched; the others are as the question
    has them, but for a mesh and a fusion that it leaves to the plan."""

    question: RunQuestion
    footprint: Footprint
    shape: tuple[int, int]
    host: int
    pipelines: bool
    free: Collection[str] = FREE

    @cached_property
    def graph(self) -> Graph:
        return self.question.graph

    @cached_property
    def finest(self) -> Grid:
        return finest_grid(self.shape, self.footprint)

    def candidates(self) -> Iterator[Candidate]:
        """Yield each candidate once, those included that memory or a norm forbids."""
        seen: set[Candidate] = set()
        whole = (*self._dealt(), *self._shared(), *self._staged())
        for each in (*whole, *(replace(each, blocks=True) for each in whole if self._may_block(each))):
            if each not in seen and self._keeps(each):
                seen.add(each)
                yield each

    def _may_block(self, each: Candidate) -> bool:
        """Return True if a rank may compute its tiles, or its part of an image, in blocks."""
        lonely = each.halo == "read" or (
            each.halo == "layer" and each.fusion == 1 and not self.question.parallel.overlap
        )
        return self.question.blocks is not None and each.stages == 1 and lonely

    def _keeps(self, each: Candidate) -> bool:
        """Return True if it has the settings that are not free."""
        asked = self.question.parallel
        pairs = {
            "halo": (each.halo, asked.halo),
            "mesh": (each.mesh, asked.mesh or each.mesh),
            "fusion": (each.fusion, asked.fusion or each.fusion),
            "stages": (each.stages, asked.stages),
            "schedule": (each.schedule, asked.schedule),
            "micro_batches": (each.micro_batches, asked.micro_batches),
            "recompute": ({each.recompute}, set(asked.recompute)),
        }
        given = all(name in self.free or mine == theirs for name, (mine, theirs) in pairs.items())
        return given and (asked.balance is None or len(asked.balance) == len(chunk_ranks(each.schedule, each.stages)))

    def fault(self, candidate: Candidate) -> str | None:
        """Return why the settings would change the statistics of a norm, None if they do not."""
        question, graph = self.question, self.graph
        together = candidate.stages == 1 and (candidate.halo == "layer" or (candidate.blocks and candidate.tiles == 1))
        at_once = 1 if together else question.images_per_step
        return norm_fault(graph, candidate.halo, candidate.tiles, at_once, question.trains, question.keyed)

    def _dealt(self) -> Iterator[Candidate]:
        for grid in self._read_grids(self.question.ranks):
            yield Candidate("read", grid)

    def _read_grids(self, ranks: int) -> Sequence[Grid]:
        if self.question.grid:
            return (self.question.grid,)
        wanted = (per * ranks // self.question.images_per_step for per in TILES_A_RANK)
        busy = (grid for tiles in wanted if tiles for grid in self.near_squares(tiles, 2))
        rows = (self.nearest(rows) for rows in ROWS if rows <= self.finest[0])
        return sorted({grid for grid in (*busy, *rows) if grid[0] * grid[1] <= MOST_TILES})

    def _shared(self) -> Iterator[Candidate]:
        fusion = 1 if "fusion" in self.free else self.question.parallel.fusion
        together = self.question.images_per_step > 1 and bool(of_steps(self.graph))
        for mesh in self._meshes():
            if mesh == (1, 1) and "halo" in self.free and not together:
                continue  # nobody to share an image with
            grids = [self.question.grid] if self.question.grid else [mesh, (2 * mesh[0], 2 * mesh[1])]
            for grid in grids:
                if self._legal(grid) and mesh[0] <= grid[0] and mesh[1] <= grid[1]:
                    yield Candidate("exchange", grid, mesh)
                    if grid == grids[0]:
                        yield Candidate("layer", grid, mesh, fusion)

    def _meshes(self) -> Sequence[Grid]:
        images, ranks, given = self.question.images_per_step, self.question.ranks, self.question.parallel.mesh
        if given and "mesh" not in self.free:
            return [given] if given[0] * given[1] <= ranks else []
        at_once = {-(-images // rounds) for rounds in range(1, images + 1)}
        most = math.prod(self.question.grid or (MOST_TILES, 1))
        found = {mesh for k in at_once if k <= ranks for mesh in self.near_squares(min(ranks // k, most), MESHES)}
        return sorted(found)

    def _staged(self) -> Iterator[Candidate]:
        if not self.pipelines:
            return
        asked, free = self.question.parallel, self.free
        schedules = SCHEDULES if "schedule" in free else (asked.schedule,)
        words = ("never", "always") if "recompute" in free else asked.recompute[:1]
        most = min(self.host, len(self.graph) // 2)
        counts = [n for n in sorted({2, 3, 4, self.host}) if n <= most] if "stages" in free else [asked.stages]
        for stages in counts:
            pipelines = self.question.ranks // stages
            if stages < 2 or not pipelines:
                continue
            for grid in self._read_grids(pipelines):
                passes = -(-grid[0] * grid[1] * self.question.images_per_step // pipelines)
                if passes > MOST_PASSES and not self.question.grid:
                    continue
                flushes = [None] if passes <= 4 * stages else [None, 4 * stages]
                if "micro_batches" not in free:
                    flushes = [asked.micro_batches]
                for schedule in schedules:
                    for recompute in words:
                        for flush in flushes:
                            yield Candidate("read", grid, None, 1, stages, schedule, recompute, flush)

    def near_squares(self, most: int, count: int) -> list[Grid]:
        """Return the `count` best grids of at most `most` parts: by the largest part's pixels, then by its edges."""
        height, width = self.shape
        square = math.sqrt(most * height / width)
        found = []
        for rows in range(max(1, int(square / LONGEST)), int(square * LONGEST) + 2):
            grid = rows, most // rows
            if self._legal(grid) and (height != width or grid[0] >= grid[1]):
                part = -(-height // grid[0]), -(-width // grid[1])
                found.append((part[0] * part[1], sum(part), grid))
        return [grid for *_, grid in sorted(found)[:count]]

    def nearest(self, rows: int) -> Grid:
        """Return so many rows of tiles, and the columns that make them square."""
        return rows, min(self.finest[1], max(1, round(rows * self.shape[1] / self.shape[0])))

    def _legal(self, grid: Grid) -> bool:
        return 1 <= grid[0] <= self.finest[0] and 1 <= grid[1] <= self.finest[1]
