"""A raster that one rank has looked at: opened by its first read, and then the raster itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.small_files import write_raster
from tiledseg.errors import RasterError, ReadError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.reading.reader import KnownReader, open_raster

BOX = Box(Interval(-3, 9), Interval(4, 15))  # beyond the raster on two sides


def write(path: Path, height: int, width: int, **more: Any) -> None:
    pixels_CHW = np.random.default_rng(height).integers(0, 255, (2, height, width), np.uint8)
    write_raster(path, pixels_CHW, nodata=7, **more)


def test_nothing_is_opened_before_the_first_read_which_gives_the_rasters_own_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    write(path, 10, 12)
    with open_raster(str(path)) as plain:
        expected = plain.read(BOX)
        info = plain.info
    path.rename(tmp_path / "away.tif")
    with KnownReader(info, lambda: open_raster(str(path))) as reader:
        assert reader.info is info
        reader.release()
        with pytest.raises(ReadError, match=r"a\.tif"):
            reader.read(BOX)
        (tmp_path / "away.tif").rename(path)
        for _ in range(2):
            for found, wanted in zip(reader.read(BOX), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)
            reader.release()
    with pytest.raises(RasterError, match="after its reader was closed"):
        reader.read(BOX)


def test_a_file_that_has_become_another_is_refused_before_a_pixel_of_it_counts(tmp_path: Path) -> None:
    """By its shape, or its size: as a rank reads whose node has a folder of its own under the same name."""
    path = tmp_path / "a.tif"
    for width, more, words in (
        (13, {}, "was 10 x 12 px, 2 bands of uint8 when the run began and is 10 x 13 px"),
        (12, {"compress": "deflate"}, r"was a file of \d+ bytes when the run began and is a file of \d+ bytes"),
    ):
        write(path, 10, 12)
        with open_raster(str(path)) as plain:
            info = plain.info
        write(path, 10, width, **more)
        with KnownReader(info, lambda: open_raster(str(path))) as reader, pytest.raises(ReadError, match=words):
            reader.read(Box.of_shape((2, 2)))
