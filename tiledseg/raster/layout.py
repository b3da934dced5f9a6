"""How well a file's blocks suit a tiling: the read amplification, and the warning that names the remedy."""

from __future__ import annotations

from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.tiling import Tiling
from tiledseg.raster.info import RasterInfo

WARN_ABOVE = 3.0


def read_amplification(info: RasterInfo, tiling: Tiling) -> float:
    """Pixels decoded per pixel asked for, if every context is read on its own: 1 is ideal.

    A block that a context touches is decoded whole; in a sequential file (PNG, JPEG) everything before it is too.
    """
    whole = Box.of_shape(info.shape)
    asked = decoded = 0
    for tile in tiling.tiles:
        box = tile.context.clip(whole)
        rows = _covered(box.row, info.block_shape[0], info.height)
        cols = _covered(box.col, info.block_shape[1], info.width)
        asked += box.area
        decoded += (rows.stop if info.sequential else rows.size) * cols.size
    return decoded / asked


def layout_warning(info: RasterInfo, tiling: Tiling) -> str | None:
    """One line for the user where blocks make reading slow (amplification above 3), else None."""
    amplification = read_amplification(info, tiling)
    if amplification <= WARN_ABOVE:
        return None
    rows, cols = info.block_shape
    kind = f"{info.driver} rows, decoded from the top," if info.sequential else "blocks"
    grid = f"[{tiling.grid[0]},{tiling.grid[1]}]"
    return (
        f"{info.path} is stored in {kind} of {rows} x {cols} px: each context of grid {grid} decodes "
        f"{amplification:.1f} times the pixels it needs; for fast reading cut it once with "
        f"`python -m tiledseg.tile --images {info.path} --grid {grid} --output tiles.h5`"
    )


def _covered(interval: Interval, block: int, size: int) -> Interval:
    """The positions of all blocks that the interval touches."""
    return Interval(interval.start // block * block, min(-(-interval.stop // block) * block, size))
