"""The configuration's group `parallel`: the spread of the work over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiledseg.config.checks import MOST, TRANSPORTS, check_values, counts_of, number, refuse, shown, word
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


@dataclass
class ParallelConfig:
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
        transport: auto, nccl, gloo or mpi
        deadline: seconds after which a job ends in which no rank makes progress, naming the rank that is stuck or dead
            (default: 600)
        machine: the profile of the machine, a file of plan --calibrate or a name that plan --machine knows, by which
            fusion auto and auto choose (docs/how-to/find-settings.md)
        auto: keys that get the values of least predicted time when the run starts, as [tiling.grid,parallel.halo];
            `--parallel auto` names tiling.grid and all of this group that are not given (docs/how-to/find-settings.md)
    """

    exact: bool = True
    halo: str = word("read", *HALO_MODES, removed=REMOVED_MODES)
    mesh: list[int] | str = number("auto", 1, MOST, remedy=MESH)
    fusion: int | str = number(1, 1, MOST, remedy=FUSION)
    overlap: bool = False
    stages: int = number(1, 1, 4096)
    balance: list[int] | str = number("auto", 1, MOST, remedy=BALANCE)
    schedule: str = word("1f1b", *SCHEDULES, removed=REMOVED_SCHEDULES)
    micro_batches: int | None = number(None, 1, MOST)
    recompute: list[str] | str = word(NEVER, *RECOMPUTE)
    idle_ranks: bool = False
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

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot be, or that contradicts another."""
        check_values("parallel", self)
        self._check_auto()
        self._check_halo()
        self._check_pipeline()

    def _check_auto(self) -> None:
        for name in self.auto:
            if name not in FOUND:
                raise ConfigError(f"parallel.auto names '{shown(name)}'; give some of {', '.join(FOUND)}")
            key = name.removeprefix("parallel.")
            value = getattr(self, key, "auto")
            if value not in ("auto", getattr(ParallelConfig, key, "auto")):
                raise ConfigError(
                    f"parallel.auto names {name}, which is given as {shown(value)}; leave one of them out"
                )

    def _check_halo(self) -> None:
        mode = f"parallel.halo is {self.halo}"
        layer = "set parallel.halo to layer"
        if self.mesh_rows_cols() is not None and not self.shares_images:
            alone = "with parallel.halo read every rank works alone"
            refuse("parallel.mesh", self.mesh, alone, "leave mesh out, or set parallel.halo to exchange or layer")
        if self.fusion_depth() != 1 and not self.shares_layers:
            refuse("parallel.fusion", self.fusion, mode, f"leave fusion out, or {layer}")
        if self.overlap and not self.shares_layers:
            refuse("parallel.overlap", True, f"{mode}, which has nothing to overlap", f"leave overlap out, or {layer}")
        if self.idle_ranks and not (self.shares_images or self.stages > 1 or self.auto):
            alone = "with parallel.halo read and one stage there is no mesh to be outside of"
            refuse("parallel.idle_ranks", True, alone, "leave idle_ranks out")

    def _check_pipeline(self) -> None:
        self.recompute_modes()
        for key in ("balance", "schedule", "micro_batches", "recompute") if self.stages == 1 else ():
            if getattr(self, key) != getattr(ParallelConfig, key):
                alone, remedy = "parallel.stages is 1, which is no pipeline", "or set parallel.stages to 2 or more"
                refuse(f"parallel.{key}", getattr(self, key), alone, f"leave {key} out, {remedy}")
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
        if self.mesh == "auto":
            return None
        if isinstance(self.mesh, str) or len(self.mesh) != 2:
            raise ConfigError(f"parallel.mesh is {shown(self.mesh)}; give {MESH}")
        return self.mesh[0], self.mesh[1]

    def fusion_depth(self) -> int | None:
        """Return the layers an exchange, or None for auto; whole: more than any network has."""
        if self.fusion in ("auto", "whole"):
            return None if self.fusion == "auto" else MOST
        if isinstance(self.fusion, str):
            raise ConfigError(f"parallel.fusion is {shown(self.fusion)}; give {FUSION}")
        return self.fusion
