"""The mesh that `parallel.mesh: auto` means: as many ranks busy as can be, with as little to exchange as can be."""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.errors import ConfigError
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.geometry.tiling import Tiling


def choose_mesh(
    asked: tuple[int, int] | None, tilings: Sequence[Tiling], ranks: int, images_per_step: int = 1, stages: int = 1
) -> MeshShape:
    """The axes for a job of `ranks` ranks in pipelines of `stages`, which there are enough for, steps of
    `images_per_step` images, and rasters cut by `tilings`.

    `asked`: rows and columns of ranks an image, or None for auto. Auto keeps the most ranks busy; then it takes the
    fewest ranks an image (several images in flight exchange less), then the shortest edges between blocks. Depends on
    nothing but its arguments. Raises ConfigError where the mesh asked for has more ranks than the job.
    """
    if asked is not None:
        needed = asked[0] * asked[1] * stages
        if needed > ranks:
            split = f" in {stages} stages" if stages > 1 else ""
            raise ConfigError(
                f"parallel.mesh is [{asked[0]}, {asked[1]}], {needed} ranks an image{split}, but the job has "
                f"{ranks}; start more ranks, or use a smaller mesh"
            )
        return _shape(asked, ranks, images_per_step, stages)
    rows, cols = (min(tiling.grid[dim] for tiling in tilings) for dim in (0, 1))
    height, width = tilings[0].raster
    pipelines = ranks // stages
    found = [
        (-_shape((r, c), ranks, images_per_step, stages).ranks, r * c, (r - 1) * width + (c - 1) * height, r, c)
        for r in range(1, min(rows, pipelines) + 1)
        for c in range(1, min(cols, pipelines // r) + 1)
    ]
    best = min(found)
    return _shape((best[3], best[4]), ranks, images_per_step, stages)


def _shape(rows_cols: tuple[int, int], ranks: int, images_per_step: int, stages: int) -> MeshShape:
    images = ranks // (rows_cols[0] * rows_cols[1] * stages)
    return MeshShape(min(images_per_step, images), *rows_cols, stages)
