"""E, the price of halos: pixels computed over pixels owned. Ideally 1."""

from __future__ import annotations

import math

from tiledseg.geometry.tiling import Tiling


def paper_efficiency(size: tuple[int, int], grid: tuple[int, int], halo: float) -> float:
    """The paper's E = T^2 / T'^2 with T = T' + 2 epsilon, of sides that may differ."""
    tiles = [side / q for side, q in zip(size, grid, strict=True)]
    return math.prod((tile + 2 * halo) / tile for tile in tiles)


def paper_efficiency_linear(size: tuple[int, int], grid: tuple[int, int], halo: float) -> float:
    """The paper's linear form E ~ 1 + q * 4 epsilon / N."""
    return 1 + 2 * halo * sum(q / side for side, q in zip(size, grid, strict=True))


def tiling_efficiency(tiling: Tiling) -> float:
    """Context pixels over core pixels of a whole raster: what the tiles really compute."""
    return sum(t.context.area for t in tiling.tiles) / sum(t.core.area for t in tiling.tiles)
