"""Every file that reading a raster opens is known, so that no output takes its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.raster.referring import vrt
from tests.small_files import write_raster
from tiledseg.evaluate import main as evaluate
from tiledseg.raster.reader import open_raster


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.tif"
    write_raster(path, np.ones((1, 8, 8), np.uint8))
    return path


def files_of(path: Path, references: bool = False) -> set[str]:
    with open_raster(str(path), references=references) as reader:
        return {Path(file).name for file in reader.info.files}


def test_a_file_and_what_stands_beside_it(image: Path) -> None:
    assert files_of(image) == {"image.tif"}
    write_raster(image.with_name("image.tif.msk"), np.ones((1, 8, 8), np.uint8))
    assert files_of(image) == {"image.tif", "image.tif.msk"}


def test_the_sources_of_a_vrt_at_any_depth(image: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """GDAL itself names those of the outermost one only. `--plot` had replaced the image."""
    for name, inner in (("inner.vrt", image), ("outer.vrt", image.with_name("inner.vrt"))):
        image.with_name(name).write_text(vrt(str(inner), 8))
    outer, before = image.with_name("outer.vrt"), image.read_bytes()
    assert files_of(outer, references=True) == {"outer.vrt", "inner.vrt", "image.tif"}
    raster = ["--prediction", str(outer), "--labels", str(outer), "--references"]
    assert evaluate([*raster, "--plot", str(image)]) == 2
    assert f"{image}: it is the input {image}" in capfd.readouterr().err
    assert image.read_bytes() == before


def test_vrts_that_name_each_other_have_an_end(image: Path) -> None:
    one, other = image.with_name("one.vrt"), image.with_name("other.vrt")
    one.write_text(vrt(str(other), 8))
    other.write_text(vrt(str(one), 8))
    assert files_of(one, references=True) == {"one.vrt", "other.vrt"}
