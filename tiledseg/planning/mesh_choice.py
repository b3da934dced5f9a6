"""The mesh that `parallel.mesh: auto` means: as many ranks busy as can be, with as little to exchange as can be."""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.errors import ConfigError
from tiledseg.geometry.mesh_shape import MeshShape
from tiledseg.geometry.tiling import Tiling


def choose_mesh(
    asked: tuple[int, int] | None, tilings: Sequence[Tiling], ranks: int, images_per_step: int = 1
) -> MeshShape:
    """The axes for a job of `ranks` ranks, steps of `images_per_step` images, and rasters cut by `tilings`.

    `asked`: rows and columns of ranks an image, or None for auto. Auto keeps the most ranks busy; then it takes the
    fewest ranks an image (several images in flight exchange less), then the shortest edges between blocks. Depends on
    nothing but its arguments. Raises ConfigError where the mesh asked for has more ranks than the job.
    """
    if asked is not None:
        if asked[0] * asked[1] > ranks:
            raise ConfigError(
                f"parallel.mesh is [{asked[0]}, {asked[1]}], {asked[0] * asked[1]} ranks an image, but the job has "
                f"{ranks}; start more ranks, or use a smaller mesh"
            )
        return _shape(asked, ranks, images_per_step)
    rows, cols = (min(tiling.grid[dim] for tiling in tilings) for dim in (0, 1))
    height, width = tilings[0].raster
    found = [
        (-min(_shape((r, c), ranks, images_per_step).ranks, ranks), r * c, (r - 1) * width + (c - 1) * height, r, c)
        for r in range(1, min(rows, ranks) + 1)
        for c in range(1, min(cols, ranks // r) + 1)
    ]
    best = min(found)
    return _shape((best[3], best[4]), ranks, images_per_step)


def _shape(rows_cols: tuple[int, int], ranks: int, images_per_step: int) -> MeshShape:
    return MeshShape(min(images_per_step, ranks // (rows_cols[0] * rows_cols[1])), *rows_cols)
