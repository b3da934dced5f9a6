"""The axes replica x row x col of a job: which block of which image a rank owns, and how it talks to the others."""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.comm.collectives import Communicator, SerialCommunicator
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import PointToPoint, SerialPointToPoint
from tiledseg.errors import CommunicationError, ConfigError
from tiledseg.geometry.mesh_shape import MeshPosition, MeshShape


@dataclass(frozen=True)
class Axes:
    """One rank's view of the axes.

    `position` is None on a rank outside the mesh, which owns nothing. `image` joins the ranks of this replica, its rank
    is row * cols + col; a SerialCommunicator outside the mesh. `point_to_point` joins all ranks of the job, and its
    peers count as the job does.
    """

    shape: MeshShape
    position: MeshPosition | None
    image: Communicator
    point_to_point: PointToPoint

    def rank_at(self, row: int, col: int) -> int:
        """The rank of the job at (row, col) of this rank's replica; CommunicationError where there is none."""
        if self.position is None:
            raise CommunicationError(f"no rank at row {row}, col {col}: this rank stands outside the mesh {self.shape}")
        if not (0 <= row < self.shape.rows and 0 <= col < self.shape.cols):
            raise CommunicationError(f"no rank at row {row}, col {col} of the mesh {self.shape}: both count from 0")
        return self.shape.rank_at(MeshPosition(self.position.replica, row, col))

    def close(self) -> None:
        """Ends messages and the image's communicator; the mesh's own stays. Collective."""
        self.point_to_point.close()
        self.image.close()


def open_axes(mesh: Mesh, shape: MeshShape) -> Axes:
    """The axes of `shape` over the first ranks of a mesh. Collective over all ranks of the mesh.

    Raises ConfigError on every rank, before any communication, where the job has too few ranks.
    """
    if shape.ranks > mesh.size:
        raise mark_agreed(
            ConfigError(
                f"a mesh of {shape} needs {shape.ranks} ranks but the job has {mesh.size}: start {shape.ranks} ranks, "
                "or a mesh of fewer"
            )
        )
    position = shape.position(mesh.rank)
    if shape.ranks_per_image == 1:  # nobody has anyone to talk to
        return Axes(shape, position, SerialCommunicator(), SerialPointToPoint())
    firsts = range(0, shape.ranks, shape.ranks_per_image)
    image = mesh.communicator.split([range(first, first + shape.ranks_per_image) for first in firsts])
    return Axes(shape, position, image, mesh.communicator.point_to_point())


def serial_axes() -> Axes:
    """One rank that owns one image whole."""
    return Axes(MeshShape(1, 1, 1), MeshPosition(0, 0, 0), SerialCommunicator(), SerialPointToPoint())
