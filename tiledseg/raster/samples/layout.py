"""The read amplification of a file's blocks under a tiling, and the warning that names the remedy."""

from __future__ import annotations

import numpy as np

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.tiling import Tiling
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.reading.gdal_open import CACHE_BYTES

WARN_ABOVE = 3.0
_KEPT_BYTES = CACHE_BYTES // 4
"""Size of an image whose blocks GDAL keeps once they are decoded, beside other images."""
_REMEDY = "set tiling.grid and tiling.halo to the store's, or cut it again with tiledseg tile"


def read_amplification(info: RasterInfo, tiling: Tiling) -> float:
    """Return pixels decoded per pixel needed, if every context is read on its own: 1 is ideal.

    A block that a context touches is decoded whole; in a sequential file (PNG, JPEG) everything before it is too. A
    tile store holds the contexts themselves.
    """
    if info.tiling is not None:
        return 1.0
    needed = decoded = 0
    for tile in tiling.tiles:
        box = tile.context.clip(Box.of_shape(info.shape))
        (top, bottom), (left, right) = (
            (side.start // block * block, min(-(-side.stop // block) * block, size))
            for side, block, size in zip((box.row, box.col), info.block_shape, info.shape, strict=True)
        )
        needed += box.area
        decoded += (bottom if info.sequential else bottom - top) * (right - left)
    return decoded / needed


def layout_warning(info: RasterInfo, tiling: Tiling) -> str | None:
    """Return one line for the user where blocks make reading slow (amplification above 3, of an image too large to be
    kept), else None."""
    amplification = read_amplification(info, tiling)
    kept = info.height * info.width * info.bands * np.dtype(info.dtype).itemsize <= _KEPT_BYTES
    if amplification <= WARN_ABOVE or kept:
        return None
    rows, cols = info.block_shape
    kind = f"{info.driver} rows, decoded from the top," if info.sequential else "blocks"
    grid = f"[{tiling.grid[0]},{tiling.grid[1]}]"
    return (
        f"{info.path} is stored in {kind} of {rows} x {cols} px: each context of grid {grid} decodes "
        f"{amplification:.1f} times the pixels it needs; for fast reading cut it once with "
        f"`tiledseg tile --images {info.path} --grid {grid} --output tiles.h5`"
    )


def check_cut(info: RasterInfo, tiling: Tiling) -> None:
    """Raise RasterError, showing both, where a tile store was cut otherwise than the run cuts.

    That is: another grid, other cores (alignment), or contexts that lack pixels that the network needs. Any other
    raster fits any tiling.
    """
    cut = info.tiling
    if cut is None:
        return
    cores = [[tile.core for tile in each.tiles] for each in (cut, tiling)]
    pairs: list[tuple[str, object, object]] = [
        ("grid", list(cut.grid), list(tiling.grid)),
        ("raster", cut.raster, tiling.raster),
        ("alignment", cut.footprint.alignment, tiling.footprint.alignment),
    ]
    for what, ours, theirs in pairs:
        if ours != theirs and (what != "alignment" or cores[0] != cores[1]):
            raise RasterError(f"{info.path} was cut with {what} {ours}, but the run has {theirs}; {_REMEDY}")
    if not all(a.context.contains(b.context) for a, b in zip(cut.tiles, tiling.tiles, strict=True)):
        halo, needed = (f"({f.before}, {f.after}) px" for f in (cut.footprint, tiling.footprint))
        raise RasterError(f"{info.path} was cut with halo {halo}, but the run needs {needed}; {_REMEDY}")
