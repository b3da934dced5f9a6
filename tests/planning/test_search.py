"""The automatic grid against a search of all grids."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.architecture.unet import UNet
from tiledseg.errors import GeometryError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import finest_grid, make_tiling
from tiledseg.planning.run.grid import choose_grid
from tiledseg.planning.walk.step_memory import training_memory

UNETS = [
    UNet(3, base_channels=4),
    UNet(3, base_channels=4, padding="valid"),
    UNet(4, base_channels=2, upsampling="bilinear", norm="instance"),
]


@functools.cache
def step_bytes(unet: UNet, context: tuple[int, int]) -> int:
    return training_memory(unet.graph(), unet.bands, context, 4).total


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.sampled_from(UNETS),
    st.tuples(st.integers(1, 120), st.integers(1, 120)),
    st.floats(0, 1),
    st.integers(1, 30),
)
def test_no_other_grid_has_fewer_tiles(unet: UNet, raster: tuple[int, int], tightness: float, ranks: int) -> None:
    layers = unet.graph()
    footprint = network_footprint(layers)
    finest = finest_grid(raster, footprint)
    grids = [(rows, cols) for rows in range(1, finest[0] + 1) for cols in range(1, finest[1] + 1)]
    need = {grid: step_bytes(unet, make_tiling(raster, grid, footprint).context_max) for grid in grids}
    smallest, largest = need[finest], max(need.values())
    assert smallest == min(need.values()), "nothing needs less than the finest grid"

    memory = round(smallest + tightness * (largest - smallest))
    grid = choose_grid(raster, layers, footprint, memory, 4, ranks)
    assert grid == choose_grid(raster, layers, footprint, memory, 4, ranks)
    assert need[grid] <= memory
    assert grid[0] * grid[1] >= min(ranks, len(make_tiling(raster, finest, footprint)))

    longest = max(2.0, max(raster) / min(raster))
    for rows, cols in grids:
        sides = raster[0] / rows, raster[1] / cols
        fits = need[rows, cols] <= memory and max(sides) <= longest * min(sides)
        if fits and rows * cols >= min(ranks, finest[0] * finest[1]):
            assert grid[0] * grid[1] <= rows * cols


def test_nothing_fits_names_both_values() -> None:
    layers = UNet().graph()
    with pytest.raises(GeometryError, match=r"208 x 208 pixels needs .* MiB, but the memory is 1000 B"):
        choose_grid((10000, 10000), layers, network_footprint(layers), 1000, 4, 1)


def test_bands_and_precision_count() -> None:
    layers = UNet(5).graph()
    footprint = network_footprint(layers)

    def tiles(bytes_per_value: int, bands: int = 4) -> int:
        rows, cols = choose_grid((10000, 10000), layers, footprint, 8 * 2**30, bytes_per_value, 1, bands)
        return rows * cols

    assert tiles(2) < tiles(4) < tiles(8)
    assert tiles(4, bands=400) > tiles(4)
