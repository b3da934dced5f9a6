"""E, the price of halos: pixels computed over pixels owned. Ideally 1."""

from __future__ import annotations

from tiledseg.geometry.tiling import Tiling


def paper_efficiency(tile: float, halo: float) -> float:
    """The paper's E = T^2 / T'^2 with T = T' + 2 epsilon."""
    return ((tile + 2 * halo) / tile) ** 2


def paper_efficiency_linear(size: int, grid: int, halo: float) -> float:
    """The paper's linear form E ~ 1 + q * 4 epsilon / N."""
    return 1 + grid * 4 * halo / size


def tiling_efficiency(tiling: Tiling) -> float:
    """Context pixels over core pixels of a whole raster: what the tiles really compute."""
    return sum(t.context.area for t in tiling.tiles) / sum(t.core.area for t in tiling.tiles)
