"""The configuration's group `parallel`: the spread of the work over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiledseg.config.checks import (
    AUTO,
    MOST,
    TRANSPORTS,
    Group,
    Need,
    conditional,
    counts_of,
    number,
    rows_cols,
    shown,
    word,
)
from tiledseg.config.words import NEVER, RECOMPUTE, REMOVED_SCHEDULES, SCHEDULES, chunk_ranks
from tiledseg.errors import ConfigError

HALO_MODES = ("read", "exchange", "layer")
REMOVED_MODES = {"scatter": "exchange"}
MESH = "auto, or ranks along rows and columns as [R, C]"
FUSION = "auto, whole or a number of layers from 1 on"
BALANCE = "auto, modelled, or layers a stage as [14,24,30,22,12,7]"
SEARCHED = ("halo", "mesh", "fusion", "stages", "balance", "schedule", "micro_batches", "recompute")
FOUND = ("tiling.grid", *(f"parallel.{key}" for key in SEARCHED))
"""Keys whose values the search for the least predicted time can choose."""
_SHARED = Need("halo", "exchange or layer", lambda parallel: parallel.shares_images)
_LAYER = Need("halo", "layer", lambda parallel: parallel.shares_layers)
_IDLE = Need("halo", "exchange or layer", lambda each: each.shares_images or each.stages > 1 or each.auto)
_STAGES = Need("stages", "2 or more", lambda parallel: parallel.stages > 1)


@dataclass
class ParallelConfig(Group):
    """The spread of the work over ranks.

    Args:
        exact: refuse what tiling would change; false accepts it with a warning
        halo: how a rank gets its halo: read (from the raster), exchange (from its neighbours, once) or layer (from its
            neighbours, at each layer that needs one; nothing is computed twice)
        mesh: ranks along rows and columns that share an image, in all modes but read: [R, C], or auto
        fusion: layers that share one exchange in mode layer: 1 (a thin halo each), more, whole (one exchange of the
            input), or auto (by the cost model)
        overlap: compute the interior of convolutions while their halos travel, in mode layer; whether it pays depends
            on the machine (python -m benchmarks.spatial measures it)
        stages: ranks over which the network's layers are split in a pipeline, through which tiles go as micro-batches
        balance: layers a stage as a list (folded: a chunk); auto or modelled by the machine's profile, else by
            multiply-adds
        schedule: 1f1b, gpipe or folded (the encoder's part of a stage and its mirror in the decoder on one rank)
        micro_batches: micro-batches between two flushes of the pipeline (default: all tiles of a step)
        recompute: compute a stage's forward pass again in place of keeping its activations: never, except_last (the
            newest micro-batch) or always, for all stages, or a list with one of them for each
        idle_ranks: let ranks that own nothing wait in place of refusing a job that has more ranks than its mesh
        transport: auto, nccl, xccl, gloo or mpi
        deadline: seconds after which a job ends in which no rank makes progress, naming the rank that is stuck or dead
            (default: 600)
        machine: the profile of the machine, a file of plan --calibrate or a name that plan --machine knows, by which
            fusion auto and auto choose (docs/how-to/find-settings.md)
        auto: keys that get the values of least predicted time when the run starts, as [tiling.grid,parallel.halo];
            `--parallel auto` names tiling.grid and all of this group that are not given (docs/how-to/find-settings.md)
    """

    exact: bool = True
    halo: str = word("read", *HALO_MODES, removed=REMOVED_MODES)
    mesh: list[int] | str = number(AUTO, 1, MOST, texts=(AUTO,), pair=True, need=_SHARED, remedy=MESH)
    fusion: int | str = number(1, 1, MOST, texts=(AUTO, "whole"), need=_LAYER, remedy=FUSION)
    overlap: bool = conditional(False, _LAYER)
    stages: int = number(1, 1, 4096)
    balance: list[int] | str = number(AUTO, 1, MOST, need=_STAGES, remedy=BALANCE)
    schedule: str = word("1f1b", *SCHEDULES, removed=REMOVED_SCHEDULES, need=_STAGES)
    micro_batches: int | None = number(None, 1, MOST, need=_STAGES)
    recompute: list[str] | str = word(NEVER, *RECOMPUTE, need=_STAGES)
    idle_ranks: bool = conditional(False, _IDLE)
    transport: str = word("auto", *TRANSPORTS)
    deadline: float | None = number(None, 1.0, 30 * 86400.0)
    machine: str | None = None
    auto: list[str] = field(default_factory=list)

    @property
    def shares_images(self) -> bool:
        """Return True if several ranks own parts of one image."""
        return self.halo != "read"

    @property
    def shares_layers(self) -> bool:
        """Return True if the ranks of an image compute each layer together."""
        return self.halo == "layer"

    def check_together(self) -> None:
        for name in self.auto:
            if name not in FOUND:
                raise ConfigError(f"parallel.auto names '{shown(name)}'; give some of {', '.join(FOUND)}")
            key = name.removeprefix("parallel.")
            value = getattr(self, key, "auto")
            if value not in ("auto", getattr(ParallelConfig, key, "auto")):
                raise ConfigError(
                    f"parallel.auto names {name}, which is given as {shown(value)}; leave one of them out"
                )

        self.recompute_modes()
        counts = self.layer_counts()
        chunks = len(chunk_ranks(self.schedule, self.stages))
        if counts is not None and len(counts) != chunks:
            several = f", which has {chunks} chunks when {self.schedule}" if chunks != self.stages else ""
            raise ConfigError(
                f"parallel.balance has {len(counts)} parts, but parallel.stages is {self.stages}{several}; give "
                f"{chunks} counts of layers, or auto"
            )

    def layer_counts(self) -> tuple[int, ...] | None:
        """Return the layers of each chunk, or None where the program chooses them."""
        if self.balance in ("auto", "modelled"):
            return None
        values = counts_of(self.balance) if isinstance(self.balance, str) else self.balance
        if not values or min(values) < 1:
            raise ConfigError(f"parallel.balance is {shown(self.balance)}; give {BALANCE}")
        return tuple(values)

    def recompute_modes(self) -> tuple[str, ...]:
        """Return one mode for each stage."""
        if isinstance(self.recompute, str):
            return (self.recompute,) * self.stages
        if len(self.recompute) != self.stages:
            raise ConfigError(
                f"parallel.recompute has {len(self.recompute)} parts, but parallel.stages is {self.stages}; give one "
                "for each stage, or one word for all"
            )
        return tuple(self.recompute)

    def mesh_rows_cols(self) -> tuple[int, int] | None:
        """Return (rows, cols) of ranks an image, or None for auto."""
        return rows_cols(self.mesh)

    def fusion_depth(self) -> int | None:
        """Return the layers an exchange, or None for auto; whole: more than any network has."""
        if isinstance(self.fusion, str):
            return None if self.fusion == AUTO else MOST
        return self.fusion
