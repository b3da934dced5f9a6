"""Rasters that name other files, by choice: every command says so in a line, and its result is that of the files."""

from pathlib import Path

import numpy as np
import pytest
import rasterio

from tests.bad_input.materials import SIDE, good_config
from tests.raster.referring import vrt
from tests.small_files import write_raster, write_yaml
from tiledseg.evaluate import main as evaluate
from tiledseg.predict import main as predict
from tiledseg.raster.reader import open_raster
from tiledseg.tile import main as tile
from tiledseg.train import main as train


@pytest.fixture
def root(tmp_path: Path) -> Path:
    generator = np.random.default_rng(3)
    write_raster(tmp_path / "image.tif", generator.integers(1, 255, (1, SIDE, SIDE), np.uint8))
    write_raster(tmp_path / "labels.tif", generator.integers(0, 3, (1, SIDE, SIDE), np.uint8))
    for name in ("image", "labels"):
        (tmp_path / f"{name}.vrt").write_text(vrt(str(tmp_path / f"{name}.tif"), SIDE))
    config = good_config(tmp_path)
    config["run"]["verbosity"] = 1
    write_yaml(tmp_path / "run.yaml", config)
    return tmp_path


def line(path: Path) -> str:
    source = path.with_suffix(".tif")
    return f"warning: {path} is a VRT and may read further files and URLs, as allowed: {source}"


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The warnings about references on standard error, once each."""
    return [words for words in capfd.readouterr().err.splitlines() if "may read further" in words]


def test_each_command_takes_them_by_choice(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    image, labels = root / "image.vrt", root / "labels.vrt"
    config = ["--config", str(root / "run.yaml")]
    sources = ["--data.images", str(image), "--data.labels", str(labels)]
    assert train(config) == 0
    assert said(capfd) == []
    other = ["--data.references", "true", "--run.output", str(root / "other")]
    assert train([*config, *sources, *other]) == 0
    assert said(capfd) == [line(image), line(labels)]

    maps = root / "map.tif", root / "vrt-map.tif"
    flags = ["--checkpoint", str(root / "run"), "--tiling.grid", "2", "--output"]
    assert predict([*flags, str(maps[0]), "--image", str(image)]) == 2
    capfd.readouterr()
    assert predict([*flags, str(maps[0]), "--image", str(root / "image.tif")]) == 0
    flags[1] = str(root / "other")
    assert predict([*flags, str(maps[1]), "--image", str(image), "--references"]) == 0
    assert said(capfd) == [line(image)]
    with rasterio.open(maps[0]) as one, rasterio.open(maps[1]) as other_map:
        np.testing.assert_array_equal(one.read(), other_map.read())

    store = root / "tiles.h5"
    cut = ["--images", str(image), "--labels", str(labels), "--grid", "2", "--levels", "2", "--output", str(store)]
    assert tile([*cut, "--references"]) == 0
    assert said(capfd) == [line(image), line(labels)]
    with open_raster(f"{store}#0") as reader, open_raster(str(root / "image.tif")) as plain:
        assert reader.info.tiling is not None
        box = reader.info.tiling.tiles[0].context
        np.testing.assert_array_equal(reader.read(box)[0], plain.read(box)[0])

    score = ["--prediction", str(maps[0]), "--labels", str(labels), "--references"]
    assert evaluate(score) == 0
    assert said(capfd) == [line(labels)]
