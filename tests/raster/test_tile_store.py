"""The tile store: the same arrays as from the rasters, the same bytes however it was written, killed or not."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import rasterio
from affine import Affine
from numpy.typing import NDArray

from tiledseg.errors import OutputError, RasterError, WriteError
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.tiling import make_tiling
from tiledseg.raster.finding.sources import expand_sources, pair_sources
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.reading.reader import open_raster
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.samples.layout import layout_warning
from tiledseg.raster.samples.sampling import deal
from tiledseg.raster.statistics import finish, measure, statistics_blocks
from tiledseg.raster.tile_reference import TileReference
from tiledseg.raster.tile_store import writer as tile_store_writer
from tiledseg.raster.tile_store.writer import StorePlan, begin_store, publish_store, store_output, write_tiles
from tiledseg.system.outputs import check_outputs

SHAPES = ((150, 170), (90, 200))
CLIPPED = Footprint(8, 16, 16)
MIRRORED = Footprint(8, 27, 29, 10, mirror=True)


def write_raster(path: Path, pixels_CHW: NDArray, **options: Any) -> str:
    count, height, width = pixels_CHW.shape
    options = {
        "photometric": "minisblack",
        "crs": "EPSG:32611",
        "transform": Affine(0.5, 0, 4e5, 0, -0.5, 4e6),
    } | options
    with rasterio.open(
        path, "w", driver="GTiff", count=count, height=height, width=width, dtype=pixels_CHW.dtype, **options
    ) as file:
        file.write(pixels_CHW)
    return str(path)


@pytest.fixture
def rasters(tmp_path: Path) -> tuple[list[str], list[str]]:
    """Two images, one with a nodata corner, and their labels with an ignored region."""
    images, labels = [], []
    for i, shape in enumerate(SHAPES):
        generator = np.random.default_rng(i)
        image = generator.integers(1, 60000, (3, *shape)).astype(np.uint16)
        image[:, :40, :30] = 0
        label = generator.integers(0, 4, (1, *shape)).astype(np.uint8)
        label[0, 60:70] = 9
        images.append(write_raster(tmp_path / f"image{i}.tif", image, nodata=0))
        labels.append(write_raster(tmp_path / f"labels{i}.tif", label, nodata=9))
    return images, labels


def plan(
    images: Sequence[str],
    labels: Sequence[str] | None,
    grid: tuple[int, int] = (3, 2),
    footprint: Footprint = CLIPPED,
) -> StorePlan:
    infos = tuple(open_raster(path).info for path in images)
    label_infos = tuple(open_raster(path).info for path in labels) if labels else None
    return StorePlan(infos, label_infos, tuple(make_tiling(info.shape, grid, footprint) for info in infos))


def cut(path: Path | str, what: StorePlan, ranks: int = 1) -> str:
    """Write the whole store, rank by rank."""
    store = begin_store(str(path), what)
    images = {i: open_raster(info.path) for i, info in enumerate(what.images)}
    labels = {i: open_raster(info.path) for i, info in enumerate(what.labels)} if what.labels else None
    for share in reversed(deal(store.missing, ranks, lambda tile: 1)):
        write_tiles(store, images, labels, what.tilings, share)
    publish_store(store, what)
    return str(path)


def digest(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.parametrize("footprint", [CLIPPED, MIRRORED])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_training_reads_the_same_bits_from_the_store(
    tmp_path: Path, rasters: tuple[list[str], list[str]], footprint: Footprint, dtype: str
) -> None:
    what = plan(*rasters, footprint=footprint)
    store = cut(tmp_path / "tiles.h5", what)
    label_map = LabelMap.from_config(4, 255)
    sets = []
    for images, labels in (rasters, pair_sources([store], [], ("data.images", "data.labels"))):
        readers = [open_raster(path) for path in images]
        normalization = finish(measure(readers, statistics_blocks([reader.info for reader in readers])))
        label_readers = [open_raster(path) for path in labels]
        sets.append(Dataset(readers, label_readers, what.tilings, label_map, normalization, dtype))
    assert sets[0].normalization == sets[1].normalization
    ignored = 0
    for image, tiling in enumerate(what.tilings):
        for tile in range(len(tiling)):
            ours, theirs = (data.load(image, tile) for data in sets)
            for key in ("x_CHW", "y_HW", "valid_HW"):
                np.testing.assert_array_equal(getattr(ours, key), getattr(theirs, key))
                assert getattr(ours, key).dtype == getattr(theirs, key).dtype
            assert ours.y_HW is not None
            ignored += int((ours.y_HW == 255).sum())
    assert ignored > 2 * 40 * 30
    for data in sets:
        data.close()


@pytest.mark.parametrize("footprint", [CLIPPED, MIRRORED])
def test_a_store_is_also_a_plain_raster(
    tmp_path: Path, rasters: tuple[list[str], list[str]], footprint: Footprint
) -> None:
    store = cut(tmp_path / "tiles.h5", plan(*rasters, footprint=footprint))
    generator = np.random.default_rng(5)
    for source, name in zip(
        [*rasters[0], *rasters[1]], [f"{store}#{n}" for n in ("0", "1", "0:labels", "1:labels")], strict=True
    ):
        with open_raster(source) as ours, open_raster(name) as theirs:
            for key in ("shape", "bands", "dtype", "crs", "transform", "nodata", "band_numbers", "palette"):
                assert getattr(ours.info, key) == getattr(theirs.info, key), key
            for _ in range(30):
                rows, cols = (sorted(generator.integers(-300, 300, 2)) for _ in range(2))
                box = Box(Interval(rows[0], rows[1] + 1), Interval(cols[0], cols[1] + 1))
                for found, expected in zip(theirs.read(box), ours.read(box), strict=True):
                    np.testing.assert_array_equal(found, expected)


def test_a_context_is_one_read(tmp_path: Path, rasters: tuple[list[str], list[str]], monkeypatch: Any) -> None:
    what = plan(*rasters)
    store = cut(tmp_path / "tiles.h5", what)
    sizes = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: sizes.append(preadv(*args)) or sizes[-1])
    with open_raster(f"{store}#1") as reader:
        pixels_CHW, valid_HW = reader.read(what.tilings[1].tiles[5].context)
    assert valid_HW.all()
    height, width = what.tilings[1].context_max
    assert sizes == [3 * height * width * 2]
    assert pixels_CHW.shape == (3, *what.tilings[1].tiles[5].context.shape)
    assert layout_warning(reader.info, what.tilings[1]) is None


def test_the_bytes_do_not_depend_on_who_wrote_them(tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
    what = plan(*rasters)
    one = digest(cut(tmp_path / "one.h5", what))
    assert {digest(cut(tmp_path / f"{ranks}.h5", what, ranks)) for ranks in (2, 3, 20)} == {one}
    assert os.listdir(tmp_path).count("one.h5.partial") == 0


def test_stopped_at_any_system_call_and_started_again_it_is_the_same_store(
    tmp_path: Path, rasters: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes the disk is once the last one (a write half done), until one run gets through."""
    what = plan([rasters[0][0]], [rasters[1][0]], grid=(2, 1))
    expected = digest(cut(tmp_path / "whole.h5", what))

    class KilledError(BaseException):
        pass

    left = [0]

    def dying(name: str) -> Any:
        call = getattr(os, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                if name == "pwrite":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                raise KilledError
            return call(*args, **options)

        return wrapper

    for name in ("pwrite", "fdatasync", "fsync", "replace"):
        monkeypatch.setattr(tile_store_writer.os, name, dying(name))
    path = tmp_path / "tiles.h5"
    deaths = 0
    while not path.exists():
        left[0] = deaths
        try:
            cut(path, what)
        except KilledError:
            deaths += 1
            assert not path.exists() or digest(path) == expected
        for leftover in tmp_path.glob("tiles.h5.partial*"):
            if deaths % 2:  # on every other round it starts from scratch, so that late calls are reached too
                leftover.unlink()
    assert deaths > 10
    left[0] = 10**6
    assert digest(cut(path, what)) == expected


def test_killed_again_and_again_it_is_the_same_store(tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
    what = plan(*rasters, grid=(4, 4))
    expected = digest(cut(tmp_path / "whole.h5", what))
    path = tmp_path / "tiles.h5"
    code = (
        "import sys, time; sys.path.insert(0, sys.argv.pop()); "
        "from tests.raster.test_tile_store import cut, plan; from tiledseg.raster.tile_store import writer as w; "
        "old = w._write_all; w._write_all = lambda *a: (time.sleep(0.008), old(*a)); print('ready', flush=True); "
        "cut(sys.argv[1], plan(sys.argv[2:4], sys.argv[4:6], grid=(4, 4)))"
    )
    root = str(Path(__file__).parents[2])
    kills = 0
    done = False
    while not done:
        command = [sys.executable, "-c", code, str(path), *rasters[0], *rasters[1], root]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                assert process.wait(timeout=0.1 * (1 + kills)) == 0
                done = True
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
    assert kills >= 2
    assert digest(path) == expected
    assert sorted(file.name for file in tmp_path.glob("tiles.h5*")) == ["tiles.h5"]


def test_sources_name_the_images_of_a_store(tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
    store = cut(tmp_path / "tiles.h5", plan(*rasters))
    assert expand_sources([store], "data.images") == (f"{store}#0", f"{store}#1")
    assert expand_sources([f"{store}#1"], "data.images") == (f"{store}#1",)
    keys = ("data.images", "data.labels")
    pairs = (f"{store}#0", f"{store}#1"), (f"{store}#0:labels", f"{store}#1:labels")
    assert pair_sources([store], [], keys) == pair_sources([store], [store], keys) == pairs
    assert pair_sources([store], rasters[1], keys)[1] == tuple(rasters[1])
    with pytest.raises(RasterError, match=r"data.labels is empty and .*image0.tif is no tile store"):
        pair_sources(rasters[0], [], keys)
    with pytest.raises(RasterError, match="holds 2 images; name one of them"):
        open_raster(store)


class TestRefuses:
    def test_a_run_that_cuts_otherwise(self, tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
        what = plan(*rasters)
        reader = open_raster(cut(tmp_path / "tiles.h5", what) + "#0")
        normalization = finish(measure([reader], statistics_blocks([reader.info])))

        def dataset(grid: tuple[int, int], footprint: Footprint) -> Dataset:
            return Dataset([reader], None, [make_tiling(SHAPES[0], grid, footprint)], None, normalization)

        dataset((3, 2), replace(CLIPPED, before=8, after=8)).load(0, 3)
        with pytest.raises(RasterError, match=r"cut with grid \[3, 2\], but the run has \[2, 2\]"):
            dataset((2, 2), CLIPPED)
        with pytest.raises(RasterError, match=r"cut with halo \(16, 16\) px, but the run needs \(24, 24\) px"):
            dataset((3, 2), replace(CLIPPED, before=24, after=24))
        with pytest.raises(RasterError, match=r"cut with alignment 8, but the run has 32"):
            dataset((3, 2), Footprint(32, 32, 32))

    def test_other_bands_or_nodata_than_it_was_cut_with(
        self, tmp_path: Path, rasters: tuple[list[str], list[str]]
    ) -> None:
        name = cut(tmp_path / "tiles.h5", plan(*rasters)) + "#0"
        with open_raster(name, bands=[1, 2, 3], nodata=0):
            pass
        with pytest.raises(RasterError, match=r"data.bands is \[2, 1\] but .* was cut with bands \[1, 2, 3\]"):
            open_raster(name, bands=[2, 1])
        with pytest.raises(RasterError, match=r"data.nodata is 7 but .* was cut with 0"):
            open_raster(name, nodata=7)

    def test_a_store_without_that_raster(self, tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
        store = cut(tmp_path / "tiles.h5", plan(rasters[0], None))
        with pytest.raises(RasterError, match=r"tiles.h5#2 does not exist: .* holds 2 images"):
            open_raster(f"{store}#2")
        with pytest.raises(RasterError, match=r"#0:labels does not exist: .* holds 0 labels"):
            open_raster(f"{store}#0:labels")

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
    def test_a_truncated_store(self, tmp_path: Path, rasters: tuple[list[str], list[str]], share: float) -> None:
        store = Path(cut(tmp_path / "tiles.h5", plan(*rasters)))
        os.truncate(store, int(store.stat().st_size * share))
        with pytest.raises(RasterError, match=r"truncated|cannot open the tile store") as error:
            open_raster(f"{store}#1")
        assert "\n" not in str(error.value)

    def test_an_unfinished_store(self, tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
        what = plan(*rasters)
        begin_store(str(tmp_path / "tiles.h5"), what)
        with pytest.raises(RasterError, match=r"lacks 6 of 6 tiles"):
            open_raster(str(tmp_path / "tiles.h5.partial") + "#0")
        with pytest.raises(OutputError, match=r"lacks tiles"):
            publish_store(begin_store(str(tmp_path / "tiles.h5"), what), what)

    def test_a_repacked_store(self, tmp_path: Path, rasters: tuple[list[str], list[str]]) -> None:
        store = cut(tmp_path / "tiles.h5", plan(*rasters))
        with h5py.File(store, "r+") as file:
            pixels = file["images/00000/pixels"][()]
            del file["images/00000/pixels"]
            file["images/00000"].create_dataset("pixels", data=pixels, chunks=True, compression="gzip")
        with pytest.raises(RasterError, match="was changed or damaged since it was cut: its size"):
            open_raster(f"{store}#0")

    def test_going_on_with_another_plan_or_other_rasters(
        self, tmp_path: Path, rasters: tuple[list[str], list[str]]
    ) -> None:
        path = str(tmp_path / "tiles.h5")
        begin_store(path, plan(*rasters))
        with pytest.raises(OutputError, match=r"cut with grid \[3, 2\], .* now it is grid \[2, 2\]"):
            begin_store(path, plan(*rasters, grid=(2, 2)))
        with pytest.raises(OutputError, match="holds 2 images and 2 labels, not the 1 and 0 asked for"):
            begin_store(path, plan(rasters[0][:1], None))
        os.utime(rasters[0][1], ns=(1, 1))
        with pytest.raises(OutputError, match=r"another state of .*image1.tif"):
            begin_store(path, plan(*rasters))

    def test_outputs_that_cannot_be(
        self, tmp_path: Path, rasters: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        what = plan(*rasters)
        with pytest.raises(OutputError, match="is not a folder; make it first"):
            check_outputs([store_output(str(tmp_path / "none" / "tiles.h5"), what)])
        with pytest.raises(OutputError, match="exists and is no tile store"):
            begin_store(rasters[0][0], what)
        huge = replace(what, images=tuple(replace(info, bands=10**12) for info in what.images))
        with pytest.raises(OutputError, match=r"it needs .* GiB, .* GiB free; make room"):
            check_outputs([store_output(str(tmp_path / "tiles.h5"), huge)])
        with pytest.raises(OutputError, match="is the input"):
            check_outputs([store_output(rasters[0][0], what)], what.files)

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        store = begin_store(str(tmp_path / "tiles.h5"), what)
        monkeypatch.setattr(tile_store_writer.os, "pwrite", full)
        images = {0: open_raster(rasters[0][0])}
        with pytest.raises(WriteError, match=r"cannot write .*tiles.h5.partial: No space left on device"):
            write_tiles(store, images, None, what.tilings, [TileReference(0, 0)])
