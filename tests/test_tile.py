"""`python -m tiledseg.tile`: the same store from any number of ranks; bad input gives one line and leaves nothing."""

from pathlib import Path

import numpy as np
import pytest

from tests.answers import refuse
from tests.comm.launching import mpirun, needs_mpirun
from tests.small_files import alike_in_bytes, write_raster
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.raster.finding import pair_sources
from tiledseg.raster.reader import open_raster
from tiledseg.tile import build_parser, main, resolve


def write(path: Path, bands: int, shape: tuple[int, int] = (300, 400), seed: int = 0) -> str:
    pixels_CHW = np.random.default_rng(seed).integers(0, 5, (bands, *shape)).astype(np.uint8)
    return write_raster(path, pixels_CHW, crs=None, transform=None)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Two images with labels for a small network: alignment 4, halo 24."""
    images = [write(tmp_path / f"image{i}.tif", 4, seed=i) for i in range(2)]
    labels = [write(tmp_path / f"labels{i}.tif", 1, seed=i) for i in range(2)]
    network = ["--levels", "3", "--convs-per-level", "2", "--kernel", "3"]
    return ["--images", *images, "--labels", *labels, "--grid", "3", "4", *network]


def test_images_of_a_list_that_are_not_cut_are_told(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The store does not say what is to be validated on: it would be learned from."""
    rows = f"image,label,split\n{flags[1]},{flags[4]},\n{flags[2]},{flags[5]},val\n"
    (tmp_path / "list.csv").write_text(rows)
    words = ["--images", str(tmp_path / "list.csv"), *flags[6:], "--output", str(tmp_path / "tiles.h5")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "1 image, 12 tiles" in said.out
    assert f"warning: --images: 1 image of {tmp_path / 'list.csv'} of split val left out; " in said.err


def test_alone_it_writes_a_store_for_the_network_named(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tiles.h5"
    assert main([*flags, "--output", str(output)]) == 0
    words = capsys.readouterr().out
    assert "2 images, 24 tiles, " in words
    with open_raster(f"{output}#1") as reader, open_raster(flags[2]) as source:
        assert reader.info.tiling is not None
        assert reader.info.tiling.grid == (3, 4)
        footprint = reader.info.tiling.footprint
        assert (footprint.alignment, footprint.before) == (4, 24)
        tile = reader.info.tiling.tiles[5]
        np.testing.assert_array_equal(reader.read(tile.context)[0], source.read(tile.context)[0])
    before = output.read_bytes()
    refuse(lambda: main([*flags, "--output", str(output)]), f"--output {output} is there; remove it")
    assert output.read_bytes() == before


@alike_in_bytes
@needs_mpirun
def test_two_ranks_write_the_same_bytes_as_one(tmp_path: Path, flags: list[str]) -> None:
    assert main([*flags, "--output", str(tmp_path / "one.h5")]) == 0
    done = mpirun(2, "-m", "tiledseg.tile", *flags, "--output", str(tmp_path / "two.h5"))
    assert (done.code, done.errors) == (0, []), done.err
    assert done.out.count("24 tiles") == 1
    assert (tmp_path / "two.h5").read_bytes() == (tmp_path / "one.h5").read_bytes()


def test_a_configuration_brings_data_tiling_and_model_and_flags_replace_it(tmp_path: Path) -> None:
    path, words = tmp_path / "run.yaml", ["--config", str(tmp_path / "run.yaml"), "--output", "tiles.h5"]
    path.write_text(
        "data: {images: [a.tif], labels: [b.tif], bands: [1, 2]}\ntiling: {grid: [2, 3], halo: 40}\n"
        "model: {levels: 3, upsampling: bilinear}\n"
    )
    more = ["--grid", "5", "--halo", "auto", "--levels", "4", "--bands", "[3,1]", "--images", "c.tif", "d.tif"]
    for flags, data, tiling, levels in (
        ([], (["a.tif"], [1, 2]), ((2, 3), 40), 3),
        (more, (["c.tif", "d.tif"], [3, 1]), ((5, 5), None), 4),
    ):
        config = resolve(build_parser().parse_args([*words, *flags]))
        assert (config.data.images, config.data.bands) == data
        assert (config.tiling.grid_shape(), config.tiling.halo_width()) == tiling
        assert (config.model.levels, config.model.upsampling) == (levels, "bilinear")


def test_a_grid_may_be_written_as_in_every_other_place() -> None:
    def grid(*text: str) -> tuple[int, int] | None:
        flags = ["--images", "a.tif", "--output", "t.h5", "--grid", *text]
        return resolve(build_parser().parse_args(flags)).tiling.grid_shape()

    for text in (["3", "4"], ["[3,4]"], ["[3,", "4]"]):
        assert grid(*text) == (3, 4)
    for text in (["auto"], ["0"], ["1", "2", "3"], ["two"], ["-1"]):
        with pytest.raises(ConfigError, match="grid"):
            grid(*text)


def test_a_zarr_store_holds_all_images(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zarr")
    output = str(tmp_path / "tiles.zarr")
    assert main([*flags[:-6], "--format", "zarr", "--output", output]) == 0
    assert "2 images" in capsys.readouterr().out
    images, labels = pair_sources([output], [], ("data.images", "data.labels"))
    assert (images[1], labels[1]) == (f"{output}:/1/images", f"{output}:/1/labels")
    for path, source in ((images[1], flags[2]), (labels[1], flags[5])):
        with open_raster(path) as reader, open_raster(source) as expected:
            box = Box.of_shape(expected.info.shape)
            np.testing.assert_array_equal(reader.read(box)[0], expected.read(box)[0])
    assert not list(tmp_path.glob(".*"))
