"""Settings that a search weighs: how a run could be spread, as the keys of `train` say it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tiledseg.planning.modes.mode_choice import fusion_word, mode_words
from tiledseg.planning.run.plan import RunPlan
from tiledseg.planning.run.question import RunQuestion


@dataclass(frozen=True)
class Candidate:
    """Settings of one run. `mesh` (rows, cols) of ranks an image, None in mode `read`; `fusion` of mode `layer`, None
    for the best; `stages` above 1: pipelines of mode `read`, with the `recompute` of each stage and the micro-batches
    between two flushes (None: all of a step). In `blocks`: the fewest that fit."""

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
        """Of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def kind(self) -> str:
        """What the candidates that differ in numbers alone have in common."""
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
        """The run that is asked about, with these settings."""
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
        """The keys of the group `parallel` that a run of the plan has besides their defaults."""
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
