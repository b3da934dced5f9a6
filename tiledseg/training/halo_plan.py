"""The halo mode of a run, decided and checked before any rank starts: mode, mesh, fusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiledseg.config import ParallelConfig
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.blocks import layer_blocks
from tiledseg.geometry.decomposition import decompose
from tiledseg.geometry.layer import Layer
from tiledseg.geometry.mesh_shape import MeshShape
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.halo_modes import choose_fusion
from tiledseg.planning.machine import Machine
from tiledseg.planning.mesh_choice import choose_mesh


@dataclass(frozen=True)
class HaloPlan:
    """The mode, the axes of the ranks (in mode `read` each rank is on its own), the layers that an exchange serves, and
    whether convolutions compute while halos travel."""

    halo: str = "read"
    mesh: MeshShape = field(default_factory=lambda: MeshShape(1, 1, 1))
    fusion: int = 1
    overlap: bool = False


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
    if parallel.halo == "read":
        return HaloPlan()
    mesh = choose_mesh(parallel.mesh_rows_cols(), tilings, ranks, images_per_step)
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
            layer_blocks(tiling, layers, shape, fusion)
    except GeometryError as error:
        raise ConfigError(f"parallel.halo is {parallel.halo} on a mesh of {mesh}: {error}") from error
    return HaloPlan("layer", mesh, fusion, parallel.overlap)


def plan_notes(plan: HaloPlan, ranks: int, images_per_step: int) -> list[str]:
    """What the user should know: ranks without work."""
    if plan.halo == "read" or plan.mesh.ranks >= ranks:
        return []
    return [
        f"{ranks - plan.mesh.ranks} of {ranks} ranks own nothing: the mesh is {plan.mesh} with steps of "
        f"{images_per_step} images; use fewer ranks, a finer tiling.grid, or more train.images_per_step"
    ]
