"""Stores that `tiledseg tile --format zarr` has cut: named whole, by a variable, by a glob, and beside other stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.array_scenes import scene, write
from tiledseg import evaluate, tile
from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.finding import expand_sources, pair_sources
from tiledseg.raster.lists import SourceRules
from tiledseg.raster.reader import open_raster


@pytest.fixture
def cut(tmp_path: Path) -> str:
    """A store of one image of three bands and its labels, both with nodata 0."""
    image = write(tmp_path, "tif", scene((3, 64, 64)) % 7, "image", 0)
    labels = write(tmp_path, "tif", (scene((64, 64)) % 3).astype("uint8"), "labels", 0)
    store = str(tmp_path / "cut.zarr")
    words = ["--images", image, "--labels", labels, "--grid", "2", "--format", "zarr", "--output", store]
    assert tile.main(words) == 0
    return store


def test_a_variable_of_a_cut_store_has_its_mask(cut: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path(cut).parent
    for kind, file in (("images", "image"), ("labels", "labels")):
        with open_raster(f"{cut}:/0/{kind}") as found, open_raster(folder / f"{file}-tif.tif") as expected:
            (pixels, valid), (own, own_valid) = (one.read(Box.of_shape((64, 64))) for one in (found, expected))
        np.testing.assert_array_equal(pixels, own)
        np.testing.assert_array_equal(valid, own_valid)
        assert not valid.all()
    printed = []
    for labels in (str(folder / "labels-tif.tif"), f"{cut}:/0/labels"):
        assert evaluate.main(["--prediction", str(folder / "labels-tif.tif"), "--labels", labels]) == 0
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1]
    with pytest.raises(RasterError, match="is a tile store; name one of its rasters, such as"):
        open_raster(cut)


def test_stores_are_paired_as_rasters_are(cut: str, tmp_path: Path) -> None:
    """They are folders, but not of rasters."""
    keys, names = ("data.images", "data.labels"), (f"{cut}:/0/images", f"{cut}:/0/labels")
    assert pair_sources([cut], [cut], keys) == ((names[0],), (names[1],))
    assert pair_sources([str(tmp_path / "c*.zarr")], [], keys) == ((names[0],), (names[1],))
    image, labels = (write(tmp_path, "zarr3", scene((64, 64)), name).partition(":/")[0] for name in ("one", "two"))
    assert pair_sources([image], [labels], keys) == ((image,), (labels,))
    (masked,) = expand_sources([image], "x", rules=SourceRules(valid=labels))
    with open_raster(masked) as reader:
        assert not reader.read(Box.of_shape((64, 64)))[1].all()


@pytest.mark.parametrize(("form", "labels"), [("hdf5", "cut.h5#0:labels"), ("zarr", "cut.zarr:/0/labels")])
def test_labels_of_colours_keep_their_bands(form: str, labels: str, tmp_path: Path) -> None:
    image, colours = scene((3, 64, 64)), (scene((3, 64, 64)) % 7).astype("uint8")
    words = ["--images", write(tmp_path, "tif", image, "image"), "--labels", write(tmp_path, "tif", colours, "labels")]
    store = str(tmp_path / labels.split("#")[0].split(":")[0])
    assert tile.main([*words, "--grid", "2", "--format", form, "--output", store]) == 0
    with open_raster(str(tmp_path / labels)) as found:
        np.testing.assert_array_equal(found.read(Box.of_shape((64, 64)))[0], colours)
