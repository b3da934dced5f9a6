"""The halo mode of a run, decided and checked before any rank starts: mode, mesh, fusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiledseg.config import ParallelConfig
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.blocks import layer_blocks
from tiledseg.geometry.decomposition import decompose
from tiledseg.geometry.layer import Layer
from tiledseg.geometry.layer_windows import WHOLE
from tiledseg.geometry.mesh_shape import MeshShape
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.halo_modes import choose_fusion
from tiledseg.planning.machine import Machine
from tiledseg.planning.mesh_choice import choose_mesh
from tiledseg.planning.mode_cost import Task, check_blocks, layer_cost
from tiledseg.planning.search import check_tiles


@dataclass(frozen=True)
class HaloPlan:
    """The mode, the axes of the ranks (in mode `read` without stages each rank is on its own), the layers that an
    exchange serves, and whether convolutions compute while halos travel."""

    halo: str = "read"
    mesh: MeshShape = field(default_factory=lambda: MeshShape(1, 1, 1))
    fusion: int = 1
    overlap: bool = False

    @property
    def in_words(self) -> str:
        """For the user, who may have left the choice to the program."""
        depth = "whole network" if self.fusion >= WHOLE else self.fusion
        fused = f", fusion {depth}{', overlap' if self.overlap else ''}" if self.halo == "layer" else ""
        return f"{self.halo}, ranks {self.mesh}{fused}"


def plan_halos(
    parallel: ParallelConfig,
    layers: tuple[Layer, ...],
    tilings: Sequence[Tiling],
    ranks: int,
    images_per_step: int,
    bands: int,
    value_bytes: int,
) -> HaloPlan:
    """What `parallel` asks for, for a job of `ranks` ranks on rasters cut by `tilings`.

    Raises ConfigError where it cannot be: a mesh of more ranks than the job or than some image has tiles, or a rank
    that would own nothing of some layer's output.
    """
    pipelines = ranks // parallel.stages
    if pipelines == 0:
        raise ConfigError(
            f"parallel.stages is {parallel.stages}, but the job has {ranks} ranks; start {parallel.stages} ranks or a "
            "multiple of them, or use fewer stages"
        )
    if parallel.halo != "layer":
        for tiling in tilings:
            check_tiles(tiling, layers, bands)
    if parallel.halo == "read":
        return HaloPlan(mesh=MeshShape(pipelines, 1, 1, parallel.stages)) if parallel.stages > 1 else HaloPlan()
    mesh = choose_mesh(parallel.mesh_rows_cols(), tilings, ranks, images_per_step, parallel.stages)
    shape = mesh.rows, mesh.cols
    try:
        if parallel.halo == "exchange":
            for tiling in tilings:
                decompose(tiling, shape)
            return HaloPlan("exchange", mesh)
        first = layer_blocks(tilings[0], layers, shape)
        fusion = parallel.fusion_depth()
        if fusion is None:
            fusion = choose_fusion(layers, first.rows, first.cols, bands, value_bytes, Machine())
        for tiling in tilings:
            blocks = layer_blocks(tiling, layers, shape, fusion)
            check_blocks(layers, blocks.rows, blocks.cols, fusion, bands)
    except GeometryError as error:
        raise ConfigError(f"parallel.halo is {parallel.halo} on a mesh of {mesh}: {error}") from error
    return HaloPlan("layer", mesh, fusion, parallel.overlap)


def layer_memory(
    plan: HaloPlan, layers: tuple[Layer, ...], tilings: Sequence[Tiling], bands: int, value_bytes: int
) -> int:
    """Predicted bytes of a training step in mode `layer` on the rank and image that need most; 0 in other modes, whose
    tiles can be made as small as the memory asks for."""
    if plan.halo != "layer":
        return 0
    largest = max(tilings, key=lambda tiling: tiling.raster[0] * tiling.raster[1])
    task = Task(layers, bands, decompose(largest, (plan.mesh.rows, plan.mesh.cols)), value_bytes)
    return layer_cost(task, Machine(), plan.fusion).memory


def plan_notes(plan: HaloPlan, ranks: int, images_per_step: int, needed: int, memory: int) -> list[str]:
    """What the user should know: too little memory (`needed` and `memory` in bytes a rank), ranks without work."""
    notes = []
    if needed > memory:
        notes.append(
            f"parallel.halo layer computes the whole block of a rank at once, which needs about {needed / 2**30:.1f} "
            f"GiB, but {memory / 2**30:.1f} GiB are to be had; use more ranks an image, or mode exchange or read with "
            "a finer tiling.grid"
        )
    if (plan.halo != "read" or plan.mesh.stages > 1) and plan.mesh.ranks < ranks:
        notes.append(_idle(plan, ranks, images_per_step))
    return notes


def _idle(plan: HaloPlan, ranks: int, images_per_step: int) -> str:
    return (
        f"{ranks - plan.mesh.ranks} of {ranks} ranks own nothing: the mesh is {plan.mesh} with steps of "
        f"{images_per_step} images; use fewer ranks, a finer tiling.grid, or more train.images_per_step"
    )
