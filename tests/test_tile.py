"""`python -m tiledseg.tile`: the same store from any number of ranks, and where its words come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.comm.launching import mpirun, needs_mpirun
from tests.small_files import alike_in_bytes, write_raster
from tiledseg.errors import ConfigError
from tiledseg.system.outputs import files_below
from tiledseg.tile import build_parser, main, resolve


def write(path: Path, bands: int, shape: tuple[int, int] = (300, 400), seed: int = 0) -> str:
    pixels_CHW = np.random.default_rng(seed).integers(0, 5, (bands, *shape)).astype(np.uint8)
    return write_raster(path, pixels_CHW, photometric="minisblack", crs=None, transform=None)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Two images with labels."""
    images = [write(tmp_path / f"image{i}.tif", 4, seed=i) for i in range(2)]
    labels = [write(tmp_path / f"labels{i}.tif", 1, seed=i) for i in range(2)]
    return ["--images", *images, "--labels", *labels, "--grid", "3", "4"]


def test_images_of_a_list_that_are_not_cut_are_told(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The store does not say what is to be validated on: it would be learned from."""
    rows = f"image,label,split\n{flags[1]},{flags[4]},\n{flags[2]},{flags[5]},val\n"
    (tmp_path / "list.csv").write_text(rows)
    words = ["--images", str(tmp_path / "list.csv"), *flags[6:], "--output", str(tmp_path / "tiles.h5")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "1 image, " in said.out
    assert f"warning: --images: 1 image of {tmp_path / 'list.csv'} of split val left out; " in said.err


@alike_in_bytes
@needs_mpirun
@pytest.mark.parametrize("form", ["hdf5", "zarr"])
def test_two_ranks_write_what_one_writes(tmp_path: Path, flags: list[str], form: str) -> None:
    """An HDF5 file is that of rank 0, a Zarr store has the same files."""
    ending = {"hdf5": "h5", "zarr": "zarr"}[form]
    one, two = (tmp_path / f"{name}.{ending}" for name in ("one", "two"))
    assert main([*flags, "--format", form, "--output", str(one)]) == 0
    done = mpirun(2, "-m", "tiledseg.tile", *flags, "--format", form, "--output", str(two))
    assert (done.code, done.errors) == (0, []), done.err
    assert done.out.count("2 images") == 1
    assert main([*flags, "--format", form, "--output", str(two)]) == 2
    found, wanted = (
        {str(file.relative_to(store)): file.read_bytes() for file in files_below(store) or [store]}
        for store in (two, one)
    )
    assert found == wanted


def test_a_configuration_brings_data_and_tiling(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {images: [a.tif], labels: [b.tif], bands: [1, 2]}\ntiling: {grid: [2, 3], halo: 40}\n")
    config = resolve(build_parser().parse_args(["--config", str(path), "--output", "tiles.h5"]))
    assert (config.data.images, config.data.bands) == (["a.tif"], [1, 2])
    assert config.tiling.grid_shape() == (2, 3)
    more = ["--grid", "5", "--bands", "[3,1]", "--images", "c.tif", "d.tif"]
    config = resolve(build_parser().parse_args(["--config", str(path), "--output", "tiles.h5", *more]))
    assert (config.data.images, config.data.bands) == (["c.tif", "d.tif"], [3, 1])
    assert config.tiling.grid_shape() == (5, 5)


def test_a_grid_may_be_written_as_in_every_other_place() -> None:
    def grid(*text: str) -> tuple[int, int] | None:
        flags = ["--images", "a.tif", "--output", "t.h5", "--grid", *text]
        return resolve(build_parser().parse_args(flags)).tiling.grid_shape()

    for text in (["3", "4"], ["[3,4]"], ["[3,", "4]"]):
        assert grid(*text) == (3, 4)
    for text in (["auto"], ["0"], ["1", "2", "3"], ["two"], ["-1"]):
        with pytest.raises(ConfigError, match="grid"):
            grid(*text)


def test_labels_are_warped_where_there_are_some(flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*flags[:3], *flags[6:], "--warp", "--output", flags[1] + ".h5"]) == 2
    assert "--warp is given, but no labels" in capfd.readouterr().err
