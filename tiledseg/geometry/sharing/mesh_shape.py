"""The axes replica x row x col x stage of a mesh as integers: which rank holds which layers of which block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.errors import GeometryError


class MeshPosition(NamedTuple):
    """The place of a rank: its replica, the row and column of its block in the image, and its stage of the pipeline."""

    replica: int
    row: int
    col: int
    stage: int = 0


@dataclass(frozen=True)
class MeshShape:
    """`replicas` images in flight, each cut into `rows` x `cols` blocks, each computed by `stages` ranks in a pipeline.

    Ranks count along stages first, then columns, rows and replicas: the stages of a block, which talk most, are
    neighbours in the job and share a node; so do the blocks of one image next. A job may have more ranks than the mesh:
    those beyond it own nothing.
    """

    replicas: int
    rows: int
    cols: int
    stages: int = 1

    def __post_init__(self) -> None:
        if min(self.replicas, self.rows, self.cols, self.stages) < 1:
            raise GeometryError(f"a mesh of {self}; give at least 1 along each axis")

    def __str__(self) -> str:
        if self.stages == 1:
            return f"{self.replicas} x {self.rows} x {self.cols} (replica x row x col)"
        return f"{self.replicas} x {self.rows} x {self.cols} x {self.stages} (replica x row x col x stage)"

    @property
    def ranks(self) -> int:
        return self.replicas * self.ranks_per_image * self.stages

    @property
    def ranks_per_image(self) -> int:
        """Ranks that share an image at one stage: as many as it has blocks."""
        return self.rows * self.cols

    def position(self, rank: int) -> MeshPosition | None:
        """Return the place of a rank of the job; None where it stands outside the mesh."""
        if rank >= self.ranks:
            return None
        block, stage = divmod(rank, self.stages)
        replica, within = divmod(block, self.ranks_per_image)
        return MeshPosition(replica, *divmod(within, self.cols), stage)

    def rank_at(self, position: MeshPosition) -> int:
        """Return the rank of the job that stands at `position`."""
        block = (position.replica * self.rows + position.row) * self.cols + position.col
        return block * self.stages + position.stage

    def blocks(self, replica: int, stage: int) -> list[int]:
        """Return the ranks of one image at one stage, row by row."""
        places = (MeshPosition(replica, row, col, stage) for row in range(self.rows) for col in range(self.cols))
        return [self.rank_at(place) for place in places]

    def pipeline(self, rank: int) -> list[int]:
        """Return the ranks of a rank's pipeline, stage by stage."""
        first = rank - rank % self.stages
        return list(range(first, first + self.stages))

    def holders(self, stage: int) -> list[int]:
        """Return all ranks that hold the layers of one stage."""
        return list(range(stage, self.ranks, self.stages))
