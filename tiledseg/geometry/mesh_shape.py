"""The axes replica x row x col of a mesh as integers: which rank holds which block of which image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.errors import GeometryError


class MeshPosition(NamedTuple):
    """Where a rank stands: its replica, and the row and column of its block in the image."""

    replica: int
    row: int
    col: int


@dataclass(frozen=True)
class MeshShape:
    """`replicas` images in flight, each over `rows` x `cols` ranks.

    Ranks count along columns first, then rows, then replicas, so the ranks of one image are neighbours in the job and
    share nodes. A job may have more ranks than the mesh: those beyond it own nothing.
    """

    replicas: int
    rows: int
    cols: int

    def __post_init__(self) -> None:
        if min(self.replicas, self.rows, self.cols) < 1:
            raise GeometryError(f"a mesh of {self}; give at least 1 along each axis")

    def __str__(self) -> str:
        return f"{self.replicas} x {self.rows} x {self.cols} (replica x row x col)"

    @property
    def ranks(self) -> int:
        return self.replicas * self.ranks_per_image

    @property
    def ranks_per_image(self) -> int:
        return self.rows * self.cols

    def position(self, rank: int) -> MeshPosition | None:
        """The place of a rank of the job; None where it stands outside the mesh."""
        if rank >= self.ranks:
            return None
        replica, within = divmod(rank, self.ranks_per_image)
        return MeshPosition(replica, *divmod(within, self.cols))

    def rank_at(self, position: MeshPosition) -> int:
        """The rank of the job that stands at `position`."""
        return (position.replica * self.rows + position.row) * self.cols + position.col
