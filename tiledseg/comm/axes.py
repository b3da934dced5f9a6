"""The axes replica x row x col x stage of a job: what a rank owns of image and network, and how it talks to others.

Each communicator joins other ranks, and all of them are used within one step. Nothing waits forever, because the
operations of all ranks, on all communicators together, follow one common order (docs/explanation/communication.md);
with NCCL, which keeps an order within a communicator only, they take turns (`turns`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.comm.collectives import Communicator, SerialCommunicator
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.point_to_point import PointToPoint
from tiledseg.errors import ConfigError
from tiledseg.geometry.sharing.decomposition import MeshPosition, MeshShape


@dataclass(frozen=True)
class Axes:
    """One rank's view of the axes.

    `position` is None on a rank outside the mesh, which owns nothing. `image` joins the ranks of this replica and
    stage, its rank is row * cols + col; a SerialCommunicator outside the mesh. `weights` joins all ranks that hold the
    layers of this rank's stage (without stages: the whole job), `pipeline` the stages of this rank's block, whose rank
    is the stage. `point_to_point` carries halos, `stage_messages` what travels between stages; both join all ranks of
    the job, and their peers count as the job does.
    """

    shape: MeshShape
    position: MeshPosition | None
    image: Communicator
    point_to_point: PointToPoint
    weights: Communicator
    pipeline: Communicator
    stage_messages: PointToPoint

    def rank_at(self, row: int, col: int) -> int:
        """Return the rank of the job at (row, col) of this replica and stage."""
        return self._rank(row=row, col=col)

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank of the job that holds `stage` for this rank's block."""
        return self._rank(stage=stage)

    def _rank(self, **place: int) -> int:
        assert self.position is not None, "a rank outside the mesh has no peers in it"
        return self.shape.rank_at(self.position._replace(**place))

    def close(self) -> None:
        """End the parts of the mesh's communicator; the mesh's own stays. Collective."""
        if self.shape.stages > 1:  # without stages the weights' communicator is the mesh's own
            self.pipeline.close()
            self.weights.close()
        self.image.close()


def open_axes(mesh: Mesh, shape: MeshShape) -> Axes:
    """Return the axes of `shape` over the first ranks of a mesh. Collective over all ranks of the mesh.

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
    image: Communicator = SerialCommunicator()
    alone = SerialCommunicator()
    halos = alone.point_to_point()
    if shape.ranks_per_image > 1:
        image = mesh.communicator.split(
            [shape.blocks(r, s) for r in range(shape.replicas) for s in range(shape.stages)]
        )
        halos = mesh.communicator.point_to_point()
    if shape.stages == 1:
        return Axes(shape, position, image, halos, mesh.communicator, alone, alone.point_to_point())
    weights = mesh.communicator.split([shape.holders(stage) for stage in range(shape.stages)])
    pipeline = mesh.communicator.split([shape.pipeline(first) for first in range(0, shape.ranks, shape.stages)])
    return Axes(shape, position, image, halos, weights, pipeline, mesh.communicator.point_to_point())


def serial_axes(communicator: Communicator | None = None) -> Axes:
    """Make axes of one rank that owns an image. `communicator`: of ranks with the same weights (None: no other)."""
    alone = SerialCommunicator()
    here = MeshPosition(0, 0, 0)
    messages = alone.point_to_point
    return Axes(MeshShape(1, 1, 1), here, alone, messages(), communicator or alone, alone, messages())
