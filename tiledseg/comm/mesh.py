"""The mesh of a job (ranks, devices, transport), and its axes replica x row x col x stage.

A step uses several communicators. Nothing waits forever: the operations of all ranks, over all communicators, follow
one common order (docs/explanation/communication.md). NCCL keeps an order only within a communicator; its
communicators take turns.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tiledseg.comm.collectives import Communicator
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.launch import SERIAL, Launch
from tiledseg.comm.point_to_point import PointToPoint
from tiledseg.errors import CommunicationError, ConfigError, InputError
from tiledseg.geometry.sharing.decomposition import MeshPosition, MeshShape
from tiledseg.memory.device import BACKENDS, CPU, identity

if TYPE_CHECKING:
    from tiledseg.comm.watch import Watch

T = TypeVar("T")
KINDS = {"nccl": "a CUDA or ROCm", "xccl": "an XPU"}


class Mesh:
    """One rank's view of the job. `transport`: nccl, xccl, gloo, mpi, or serial for a single rank.

    `watch`: the thread that ends a job that stands still, or None.
    """

    def __init__(
        self,
        launch: Launch,
        communicator: Communicator,
        device: torch.device,
        transport: str,
        host: str,
        watch: Watch | None = None,
    ) -> None:
        self.launch, self.communicator, self.device = launch, communicator, device
        self.transport, self.host, self.watch = transport, host, watch
        self.rank, self.size, self.is_root = launch.rank, launch.size, launch.is_root

    def close(self) -> None:
        """Close the communicator once all ranks are here, then stop the watch. The last collective call."""
        self.communicator.close()
        if self.watch is not None:
            self.watch.stop()

    def on_root(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 only and return its picklable result on every rank. Collective.

        An InputError of rank 0 is raised on every rank, with the same class and message, and printed once. Any other
        exception of rank 0 is a CommunicationError on the others, so that none waits forever.
        """
        crash: Exception | None = None
        outcome: tuple[Any, Any] = None, None
        if self.is_root:
            try:
                outcome = None, function()
            except InputError as error:
                outcome = (type(error), str(error)), None
            except Exception as error:
                crash = error
                outcome = (CommunicationError, f"rank 0 failed: {type(error).__name__}: {error}"), None
        raised, result = self.communicator.broadcast_object(outcome)
        if raised is not None:
            fault = raised[0](raised[1])
            raise crash or (mark_agreed(fault) if isinstance(fault, InputError) else fault)
        return result

    def on_all(self, function: Callable[[], T]) -> T:
        """Call `function` on every rank and return its result. If some ranks raise an InputError, every rank raises
        that of the lowest, which is printed once. Collective."""
        error: InputError | None = None
        try:
            result = function()
        except InputError as fault:
            error = fault
        errors = self.communicator.gather_objects(None if error is None else (type(error), str(error)))
        for kind, message in filter(None, errors):
            raise mark_agreed(kind(message))
        return result


ALONE = Mesh(SERIAL, Communicator(), CPU, "serial", "here")
"""The mesh of one rank, on the CPU."""


@dataclass(frozen=True)
class Facts:
    """Facts of one rank: host, cores that it may run on (a bit each), identity of its GPU, and the backend that carries
    tensors between GPUs of its kind."""

    host: str
    cores: int
    gpu: str | None
    backend: str | None = None


def gather_facts(communicator: Communicator, device: torch.device, host: str) -> list[Facts]:
    """Return the facts of all ranks, on every rank. Collective."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    gpu = identity(device), BACKENDS.get(device.type)
    return communicator.gather_objects(Facts(host, sum(1 << core for core in cores), *gpu))


def choose_transport(asked: str, facts: Sequence[Facts]) -> str:
    """Choose nccl, xccl, gloo or mpi for all ranks, from the same facts on every rank. Pure.

    Raises ConfigError if NCCL or XCCL is asked for and a rank lacks a GPU of that kind of its own.
    """
    backend = facts[0].backend if asked == "auto" else asked
    without = [rank for rank, fact in enumerate(facts) if fact.backend is None or fact.backend != backend]
    counts = Counter((fact.host, fact.gpu) for fact in facts)
    shared = [rank for rank, fact in enumerate(facts) if fact.gpu is not None and counts[fact.host, fact.gpu] > 1]
    if asked in KINDS and without:
        raise ConfigError(
            f"transport {asked} needs {KINDS[asked]} GPU on every rank but rank {without[0]} on "
            f"{facts[without[0]].host} has none: use gloo or auto"
        )
    if asked in KINDS and shared:
        raise ConfigError(
            f"transport {asked} needs a GPU of its own for every rank but ranks {shared[0]} and {shared[1]} share one "
            f"on {facts[shared[0]].host}: start one rank a GPU, or use gloo or auto"
        )
    if asked == "auto":
        return "gloo" if backend is None or without or shared else backend
    return asked


def fair_threads(rank: int, facts: Sequence[Facts]) -> int:
    """Return the number of threads of one rank: its cores, divided by the ranks of its host that share any of them.
    Pure."""
    mine = facts[rank]
    sharing = sum(1 for fact in facts if fact.host == mine.host and fact.cores & mine.cores)
    return max(1, mine.cores.bit_count() // max(1, sharing))


@dataclass(frozen=True)
class Axes:
    """One rank's view of the axes.

    `position`: None on a rank outside the mesh, which owns nothing. `image`: the ranks of this replica and stage, in
    the order row * cols + col; a Communicator outside the mesh. `weights`: all ranks that hold the layers of this
    rank's stage (without stages: the whole job). `pipeline`: the stages of this rank's block, in the order of stages.
    `point_to_point` carries halos, `stage_messages` tensors between stages; their peers are ranks of the job.
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
        """Close the parts of the mesh's communicator; the mesh's own stays open. Collective."""
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
    image: Communicator = Communicator()
    alone = Communicator()
    halos = PointToPoint(alone)
    if shape.ranks_per_image > 1:
        image = mesh.communicator.split(
            [shape.blocks(r, s) for r in range(shape.replicas) for s in range(shape.stages)]
        )
        halos = PointToPoint(mesh.communicator)
    if shape.stages == 1:
        return Axes(shape, position, image, halos, mesh.communicator, alone, PointToPoint(alone))
    weights = mesh.communicator.split([shape.holders(stage) for stage in range(shape.stages)])
    pipeline = mesh.communicator.split([shape.pipeline(first) for first in range(0, shape.ranks, shape.stages)])
    return Axes(shape, position, image, halos, weights, pipeline, PointToPoint(mesh.communicator))


def serial_axes(communicator: Communicator | None = None) -> Axes:
    """Return the axes of one rank that owns an image alone. `communicator`: the ranks with the same weights."""
    alone = Communicator()
    here = MeshPosition(0, 0, 0)
    halos, stages = PointToPoint(alone), PointToPoint(alone)
    return Axes(MeshShape(1, 1, 1), here, alone, halos, communicator or alone, alone, stages)
