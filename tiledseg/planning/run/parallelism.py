"""The configuration's group `parallel` as values."""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.config.parallel import ParallelConfig


@dataclass(frozen=True)
class Parallelism:
    """The settings of how a run is spread; None where the plan decides.

    `mesh`: (rows, cols) of ranks an image. `fusion`: layers an exchange. `balance`: layers of each chunk; None balances
    the times of the machine's profile, else multiply-adds. `recompute`: one mode for each stage. `idle_ranks`: a job
    may have more ranks than the mesh. The rest as the keys of the group.
    """

    exact: bool = True
    halo: str = "read"
    mesh: tuple[int, int] | None = None
    fusion: int | None = 1
    overlap: bool = False
    stages: int = 1
    balance: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    micro_batches: int | None = None
    recompute: tuple[str, ...] = ("never",)
    idle_ranks: bool = True

    @property
    def shares_layers(self) -> bool:
        """True if the ranks of an image are to compute each layer together."""
        return self.halo == "layer"


def parallelism(config: ParallelConfig) -> Parallelism:
    """Return the settings of the group `parallel`. Raises ConfigError for a list that is none."""
    return Parallelism(
        config.exact,
        config.halo,
        config.mesh_rows_cols(),
        config.fusion_depth(),
        config.overlap,
        config.stages,
        config.layer_counts(),
        config.schedule,
        config.micro_batches,
        config.recompute_modes(),
        config.idle_ranks,
    )
