"""How a run's work is spread: the configuration's group `parallel`."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiledseg.config.checks import MOST, TRANSPORTS, check_values, counts_of, number, one_of, shown
from tiledseg.config.words import NEVER, RECOMPUTE, REMOVED_SCHEDULES, SCHEDULES, Word, chunk_ranks
from tiledseg.errors import ConfigError

HALO_MODES = ("read", "exchange", "layer")
REMOVED_MODES = {"scatter": "exchange"}
MESH = "auto, or ranks along rows and columns as [R, C]"
FUSION = "auto, whole or a number of layers from 1 on"
BALANCE = "auto, modelled, or layers a stage as [14,24,30,22,12,7]"
SEARCHED = ("halo", "mesh", "fusion", "stages", "balance", "schedule", "micro_batches", "recompute")
FOUND = ("tiling.grid", *(f"parallel.{key}" for key in SEARCHED))
"""The keys that a run can be given by the search for the least predicted time."""


@dataclass
class ParallelConfig:
    """How the work is spread.

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
        balance: layers a stage as a list (folded: a chunk), auto (by times measured at the start) or modelled
            (by multiply-adds)
        schedule: 1f1b, gpipe or folded (the encoder's part of a stage and its mirror in the decoder on one rank)
        micro_batches: micro-batches between two flushes of the pipeline (default: all tiles of a step)
        recompute: a shorthand of memory.recompute for stages: compute a stage's forward pass again in place of keeping
            its activations: never, except_last or always, for all stages, or a list with one of them for each
        idle_ranks: let ranks that own nothing wait in place of refusing a job that has more ranks than its mesh
        transport: auto, nccl, gloo or mpi
        deadline: seconds after which a job ends in which no rank makes progress, naming the rank that is stuck or dead
            (default: 600, and in a training step 20 times the longest time without progress in those before, at
            least 60)
        machine: the profile of the machine, a file of plan --calibrate or a name that plan --machine knows, by which
            tiling.grid auto and fusion auto are the quickest, and the time of a run is told (docs/plan.md)
        auto: keys that get the values of least predicted time when the run starts, as [tiling.grid,parallel.halo];
            `--parallel auto` names tiling.grid and all of this group that are not given (docs/plan.md)
    """

    exact: bool = True
    halo: str = "read"
    mesh: list[int] | str = number("auto", 1, MOST, remedy=MESH)
    fusion: int | str = number(1, 1, MOST, remedy=FUSION)
    overlap: bool = False
    stages: int = number(1, 1, 4096)
    balance: list[int] | str = number("auto", 1, MOST, remedy=BALANCE)
    schedule: str = "1f1b"
    micro_batches: int | None = number(None, 1, MOST)
    recompute: list[str] | str = NEVER
    idle_ranks: bool = False
    transport: str = "auto"
    deadline: float | None = number(None, 1.0, 30 * 86400.0)
    machine: str | None = None
    auto: list[str] = field(default_factory=list)

    @property
    def shares_images(self) -> bool:
        """Whether several ranks own parts of one image."""
        return self.halo != "read"

    @property
    def shares_layers(self) -> bool:
        """Whether they compute each layer together."""
        return self.halo == "layer"

    def check(self) -> None:
        check_values("parallel", self)
        self._check_auto()
        self._check_halo()
        self._check_pipeline()

    def _check_auto(self) -> None:
        """A key is given, or to be found."""
        for name in self.auto:
            if name not in FOUND:
                raise ConfigError(f"parallel.auto names '{shown(name)}'; give some of {', '.join(FOUND)}")
        plain = ParallelConfig()
        for key in SEARCHED:
            value = getattr(self, key)
            if f"parallel.{key}" in self.auto and value not in ("auto", getattr(plain, key)):
                raise ConfigError(
                    f"parallel.auto names parallel.{key}, which is given as {shown(value)}; leave one of them out"
                )

    def _check_halo(self) -> None:
        one_of("parallel.halo", self.halo, HALO_MODES, REMOVED_MODES)
        one_of("parallel.transport", self.transport, TRANSPORTS)
        if self.mesh_rows_cols() is not None and not self.shares_images:
            raise ConfigError(
                f"parallel.mesh is {self.mesh}, but with parallel.halo read every rank works alone; leave mesh out, or "
                "set parallel.halo to exchange or layer"
            )
        if self.fusion_depth() != 1 and not self.shares_layers:
            raise ConfigError(
                f"parallel.fusion is {self.fusion}, but parallel.halo is {self.halo}; leave fusion out, or set "
                "parallel.halo to layer"
            )
        if self.overlap and not self.shares_layers:
            raise ConfigError(
                f"parallel.overlap is true, but parallel.halo is {self.halo}, which has nothing to overlap; leave "
                "overlap out, or set parallel.halo to layer"
            )
        if self.idle_ranks and not (self.shares_images or self.stages > 1 or self.auto):
            raise ConfigError(
                "parallel.idle_ranks is true, but with parallel.halo read and one stage there is no mesh to be outside "
                "of; leave idle_ranks out"
            )

    def _check_pipeline(self) -> None:
        one_of("parallel.schedule", self.schedule, SCHEDULES, REMOVED_SCHEDULES)
        for mode in self.recompute_modes():
            one_of("parallel.recompute", mode, RECOMPUTE)
        if self.stages == 1:
            self._check_no_pipeline()
        counts = self.layer_counts()
        chunks = len(chunk_ranks(self.schedule, self.stages))
        if counts is not None and len(counts) != chunks:
            several = f", which has {chunks} chunks when {self.schedule}" if chunks != self.stages else ""
            raise ConfigError(
                f"parallel.balance has {len(counts)} parts, but parallel.stages is {self.stages}{several}; give "
                f"{chunks} counts of layers, or auto"
            )

    def _check_no_pipeline(self) -> None:
        """Without stages the keys of a pipeline have to be as they come: nothing is accepted and ignored."""
        for key in ("balance", "schedule", "micro_batches", "recompute"):
            if getattr(self, key) != getattr(ParallelConfig, key):
                raise ConfigError(
                    f"parallel.{key} is {getattr(self, key)}, but parallel.stages is 1, which is no pipeline; leave "
                    f"{key} out, or set parallel.stages to 2 or more"
                )

    def layer_counts(self) -> tuple[int, ...] | None:
        """Layers of each chunk, or None where the program chooses them."""
        if self.balance in ("auto", "modelled"):
            return None
        values = counts_of(self.balance) if isinstance(self.balance, str) else self.balance
        if not values or min(values) < 1:
            raise ConfigError(f"parallel.balance is {shown(self.balance)}; give {BALANCE}")
        return tuple(values)

    def recompute_modes(self, key: str = "parallel.recompute", word: Word | None = None) -> tuple[str, ...]:
        """One mode for each stage, of the `word` of another `key` if given."""
        said = self.recompute if word is None else word
        if isinstance(said, str):
            return (said,) * self.stages
        if len(said) != self.stages:
            raise ConfigError(
                f"{key} has {len(said)} parts, but parallel.stages is {self.stages}; give one for each stage, or one "
                "word for all"
            )
        return tuple(said)

    def mesh_rows_cols(self) -> tuple[int, int] | None:
        """(rows, cols) of ranks an image, or None for auto."""
        if self.mesh == "auto":
            return None
        values = self.mesh
        if isinstance(values, str) or len(values) != 2:
            raise ConfigError(f"parallel.mesh is {shown(self.mesh)}; give {MESH}")
        return values[0], values[1]

    def fusion_depth(self) -> int | None:
        """Layers an exchange, or None for auto; whole: more than any network has."""
        if self.fusion in ("auto", "whole"):
            return None if self.fusion == "auto" else MOST
        if isinstance(self.fusion, str):
            raise ConfigError(f"parallel.fusion is {shown(self.fusion)}; give {FUSION}")
        return self.fusion
