"""The predict command, one rank: one map whatever the grid, on the image's own grid, whole or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.crash.runs import Material
from tests.small_files import PLACE, UTM, read_raster, write_raster
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.errors import OutputError
from tiledseg.inference import mapping, predictor
from tiledseg.models.network import build_modules
from tiledseg.predict import main
from tiledseg.tile import main as tile
from tiledseg.train import main as train

SHAPE = (45, 67)


@pytest.fixture(scope="module")
def trained(material: Material) -> Path:
    folder = material.root / "run"
    assert train([*material.train_command(folder)[1:], "--train.epochs", "1"]) == 0
    return folder


@pytest.fixture(scope="module")
def image(material: Material) -> Path:
    """Sides that no alignment divides, a corner without data."""
    path = material.root / "image.tif"
    pixels_CHW = np.random.default_rng(2).integers(1, 256, (3, *SHAPE), np.uint8)
    pixels_CHW[:, :9, :13] = 0
    write_raster(path, pixels_CHW, nodata=0)
    return path


def predict(trained: Path, image: Path, output: Path, *options: str) -> int:
    files = ["--checkpoint", str(trained), "--image", str(image), "--output", str(output)]
    return main([*files, "--verbosity", "0", *options])


def network_of(run: Path) -> torch.nn.Module:
    """Return a run's network in float64."""
    checkpoint = find_checkpoint(str(run))
    network = build_modules(checkpoint.saved.network).double().eval()
    network.load_state_dict(load_file(checkpoint.path / "model.safetensors"))
    return network


@pytest.fixture(scope="module")
def whole(material: Material, trained: Path, image: Path) -> tuple[bytes, NDArray, NDArray]:
    """The map of grid 1 x 1: its bytes, its classes, its probabilities."""
    output, probabilities = material.root / "whole.tif", material.root / "whole-probabilities.tif"
    assert predict(trained, image, output, "--tiling.grid", "1", "--probabilities", str(probabilities)) == 0
    return output.read_bytes(), read_raster(output)[0], read_raster(probabilities)


@pytest.mark.parametrize("grid", ["[23,34]", "auto"])
def test_the_map_does_not_depend_on_the_grid(
    material: Material, trained: Path, image: Path, whole: tuple[bytes, NDArray, NDArray], tmp_path: Path, grid: str
) -> None:
    """Byte for byte; 23 x 34 is the finest."""
    output, shares = tmp_path / "map.tif", tmp_path / "shares.tif"
    assert predict(trained, image, output, "--tiling.grid", grid, "--probabilities", str(shares)) == 0
    assert output.read_bytes() == whole[0]
    np.testing.assert_array_equal(read_raster(shares), whole[2])


def test_what_tiles_change_is_refused_or_told(
    material: Material, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the plan that training has: accepted with `parallel.exact false`, it is a warning here too. Pixels as they are
    have no normalisation of their own."""
    run, output = tmp_path / "run", tmp_path / "map.tif"
    options = ["--train.epochs", "1", "--model.norm", "instance", "--parallel.exact", "false"]
    assert train([*material.train_command(run)[1:], *options, "--data.normalize", "false"]) == 0
    cut = ["--tiling.grid", "2", "--verbosity", "1"]
    assert predict(run, image, output, *cut) == 2
    assert "model.norm is instance" in capsys.readouterr().err
    assert not output.exists()
    assert predict(run, image, output, *cut, "--parallel.exact", "false") == 0
    assert "warning: not exact: model.norm is instance" in capsys.readouterr().err
    assert output.exists()
    assert predict(run, image, tmp_path / "m.tif", *cut, "--parallel.exact", "false", "--normalize", "image") == 2
    assert "--normalize is image, but the network takes pixels as they are" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("*.tif")) == ["map.tif"]


def test_fp64_is_the_trained_network_in_float64(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of its weights rounded to float32: logits were off by 1.6e-4. Input, weights, statistics and constants
    of the normalisation are taken as they are saved."""
    run, image = tmp_path / "run", material.root / "held-out.tif"
    options = "--train.epochs 1 --train.precision fp32 --model.norm batch --tiling.grid 1 --train.tiles_per_step 1"
    assert train([*material.train_command(run)[1:], *options.split()]) == 0
    found: list[torch.Tensor] = []
    original = mapping.shares_of
    monkeypatch.setattr(mapping, "shares_of", lambda scores: found.append(scores.clone()) or original(scores))
    files = ["--tiling.grid", "1", "--probabilities", str(tmp_path / "p.tif"), "--precision", "fp64"]
    assert predict(run, image, tmp_path / "m.tif", *files) == 0
    saved, network = find_checkpoint(str(run)).saved.normalization, network_of(run)
    pixels_CHW = read_raster(image).astype(np.float64)
    mean, std = (np.array(of)[:, None, None] for of in (saved.mean, saved.std))
    with torch.inference_mode():
        expected = network(torch.from_numpy((pixels_CHW - mean) / std)[None])[0]
    assert found[0].dtype == torch.float64
    assert (found[0] - expected).abs().max().item() < 1e-12


def test_a_raster_is_normalised_by_its_own_bands(trained: Path, tmp_path: Path) -> None:
    """By mean and deviation of its valid pixels, counted by numpy; pixels without data are 0."""
    image = tmp_path / "dark.tif"
    pixels_CHW = np.random.default_rng(3).integers(1, 90, (3, 44, 68), np.uint8)
    pixels_CHW[:, :9, :13] = 0
    write_raster(image, pixels_CHW, nodata=0)
    files = ["--tiling.grid", "3", "--probabilities", str(tmp_path / "p.tif"), "--precision", "fp64"]
    assert predict(trained, image, tmp_path / "m.tif", *files, "--normalize", "image") == 0
    valid_HW = (pixels_CHW > 0).all(0)
    mean, std = (of(pixels_CHW[:, valid_HW].astype(np.float64), 1)[:, None, None] for of in (np.mean, np.std))
    x_CHW = np.where(valid_HW, (pixels_CHW - mean) / std, 0)
    with torch.inference_mode():
        expected = network_of(trained)(torch.from_numpy(x_CHW)[None])[0].softmax(0).numpy()
    found = read_raster(tmp_path / "p.tif")
    assert np.abs(found - expected)[:, valid_HW].max() < 1e-6
    assert np.isnan(found[:, ~valid_HW]).all()


def test_the_map_of_a_tile_store_is_that_of_its_image(
    trained: Path, image: Path, whole: tuple[bytes, NDArray, NDArray], tmp_path: Path
) -> None:
    store, output = tmp_path / "tiles.h5", tmp_path / "map.tif"
    cut = ["--grid", "2", "--levels", "2", "--convs-per-level", "1", "--output", str(store)]
    assert tile(["--images", str(image), *cut]) == 0
    assert predict(trained, store, output) == 0
    with rasterio.open(output) as file:
        np.testing.assert_array_equal(file.read(1), whole[1])
        assert (file.crs.to_string(), file.transform) == (UTM, PLACE)


def test_the_map_lies_on_the_image_and_probabilities_agree_with_it(
    whole: tuple[bytes, NDArray, NDArray], material: Material, image: Path
) -> None:
    _, classes_HW, shares_KHW = whole
    with rasterio.open(material.root / "whole.tif") as made, rasterio.open(image) as source:
        assert (made.crs, made.transform, made.shape) == (source.crs, source.transform, source.shape)
        assert (made.count, made.dtypes, made.nodata) == (1, ("uint8",), 255)
        np.testing.assert_array_equal(classes_HW == 255, source.dataset_mask() == 0)
    assert set(np.unique(classes_HW)) <= {0, 1, 2, 255}
    assert (shares_KHW.shape, shares_KHW.dtype) == ((3, *SHAPE), np.float32)
    valid_HW = classes_HW != 255
    assert np.isnan(shares_KHW[:, ~valid_HW]).all()
    np.testing.assert_allclose(shares_KHW[:, valid_HW].sum(0), 1, rtol=1e-6)
    np.testing.assert_array_equal(shares_KHW[:, valid_HW].argmax(0), classes_HW[valid_HW])


@pytest.mark.parametrize("what", ["shares_of", "publish"])
def test_a_failure_leaves_the_old_map_and_nothing_else(
    trained: Path, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    output = tmp_path / "map.tif"
    output.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OutputError("the disk is full; make room")

    monkeypatch.setattr(predictor if what == "publish" else mapping, what, fail)
    assert predict(trained, image, output, "--probabilities", str(tmp_path / "shares.tif")) == 2
    assert output.read_bytes() == b"old"
    if what == "shares_of":
        assert [path.name for path in tmp_path.iterdir()] == ["map.tif"]
