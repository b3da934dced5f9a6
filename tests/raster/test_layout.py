from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.samples.dataset import layout_warning, read_amplification

INFO = RasterInfo("big.tif", 10000, 10000, 4, "uint8", block_shape=(512, 512), driver="GTiff")
TILING = make_tiling(INFO.shape, (8, 8), Footprint(16, 96, 96))


@pytest.mark.parametrize("sequential", [False, True])
def test_amplification_counts_the_pixels_of_every_touched_block(sequential: bool) -> None:
    info = RasterInfo("a", 47, 60, 1, "uint8", block_shape=(7, 16), sequential=sequential)
    tiling = make_tiling(info.shape, (2, 1), Footprint(4, 4, 4))
    block_HW = np.arange(47)[:, None] // 7 * 100 + np.arange(60) // 16  # of each pixel
    decoded = asked = 0
    for tile in tiling.tiles:
        touched = block_HW[tile.context.clip(Box.of_shape(info.shape)).slices]
        asked += touched.size
        inside = np.isin(block_HW, touched) if not sequential else block_HW // 100 <= touched.max() // 100
        decoded += int(inside.sum())
    assert read_amplification(info, tiling) == pytest.approx(decoded / asked)


def test_warns_of_strips_huge_blocks_and_sequential_files_but_not_of_tiles() -> None:
    assert layout_warning(INFO, TILING) is None
    assert layout_warning(replace(INFO, block_shape=(256, 256)), TILING) is None
    strips = layout_warning(replace(INFO, block_shape=(1, 10000)), TILING)
    assert strips
    for words in ("big.tif", "1 x 10000 px", "decodes 7.", "tiledseg tile --images big.tif --grid [8,8]"):
        assert words in strips
    assert "\n" not in strips
    assert "decodes 49.7" in str(layout_warning(replace(INFO, block_shape=(10000, 10000)), TILING))
    png = replace(INFO, block_shape=(1, 10000), driver="PNG", sequential=True)
    assert "PNG rows, decoded from the top" in str(layout_warning(png, TILING))


def test_an_image_whose_blocks_are_kept_or_of_one_tile_is_never_badly_blocked() -> None:
    """Four bands of 4096 x 4096 bytes are kept, and no larger ones."""
    for side, warned in ((4096, False), (4098, True)):
        info = replace(INFO, height=side, width=side, block_shape=(1, side))
        found = layout_warning(info, make_tiling(info.shape, (8, 8), Footprint(16, 96, 96)))
        assert (found is not None) == warned
    whole = make_tiling(INFO.shape, (1, 1), Footprint(16, 96, 96))
    assert layout_warning(replace(INFO, block_shape=(1, 10000)), whole) is None
