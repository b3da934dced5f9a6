"""Rasters of several times joined as one: names, pixels, statistics, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.small_files import write_raster
from tiledseg.config.data import DataConfig
from tiledseg.errors import ConfigError, RasterError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.composed import TIMES as OF_TIMES
from tiledseg.raster.composed import Composed, joined_label, joined_paths, label_of, stem_of
from tiledseg.raster.finding import expand_sources, pair_sources
from tiledseg.raster.lists import SourceRules, has_validation
from tiledseg.raster.reader import open_raster
from tiledseg.raster.statistics import finish, partial_sums

TIMES = ["0401", "0620", "0915"]
KEYS = "data.images", "data.labels"


def joined(paths: Sequence[str]) -> str:
    """The name of the rasters of several times."""
    return str(Composed(joined_label(paths), OF_TIMES, tuple(paths)))


def series(folder: Path, name: str, nodata: int | None = None) -> np.ndarray:
    """Write a raster of 2 bands a time, and labels; return all bands."""
    rng = np.random.default_rng(len(name))
    every = rng.integers(1, 200, (3, 2, 9, 13)).astype(np.int16)
    for time, pixels_CHW in zip(TIMES, every, strict=True):
        write_raster(folder / f"{name}_{time}.tif", pixels_CHW, nodata=nodata)
    write_raster(folder / f"{name}_labels.tif", np.zeros((1, 9, 13), np.uint8))
    return every.reshape(6, 9, 13)


@pytest.mark.parametrize(
    ("paths", "name", "stem"),
    [
        (("s/a_0401.tif", "s/a_0410.tif"), "s/a_{0401,0410}.tif", "a"),
        (("s/0401/a.tif", "s/0620/a.tif"), "s/{0401,0620}/a.tif", "a"),
        (("x.tif", "y.jp2"), "{x.tif,y.jp2}", "x"),
        (("s/0401.tif", "s/0620.tif"), "s/{0401,0620}.tif", "0401"),
        (("s3://b/a-1/v.tif", "s3://b/a-2/v.tif"), "s3://b/a-{1,2}/v.tif", "v"),
    ],
)
def test_a_name_holds_all_paths(paths: tuple[str, ...], name: str, stem: str) -> None:
    assert label_of(joined(paths)) == name
    assert stem_of(joined(paths)) == stem
    assert joined_paths(name) == paths
    assert joined_paths(paths[0]) == ()


def test_bands_of_each_time_come_one_after_the_other(tmp_path: Path) -> None:
    pixels_CHW = series(tmp_path, "a", nodata=7)
    pixels_CHW[3, 2, 5] = 7  # no data at one time
    write_raster(tmp_path / "a_0620.tif", pixels_CHW[2:4], nodata=7)
    path = joined([f"{tmp_path}/a_{time}.tif" for time in TIMES])
    with open_raster(path) as reader:
        seen_CHW, valid_HW = reader.read(Box(Interval(-2, 9), Interval(3, 15)))
        assert (reader.info.bands, reader.info.times, reader.info.band_numbers) == (6, 3, (1, 2) * 3)
    rows, cols = np.pad(np.arange(9), (2, 0), "symmetric"), np.pad(np.arange(13), (0, 2), "symmetric")[3:]
    np.testing.assert_array_equal(seen_CHW, pixels_CHW[:, rows][:, :, cols])
    np.testing.assert_array_equal(valid_HW, (pixels_CHW != 7).all(0)[rows][:, cols])
    with open_raster(path, bands=[2]) as reader:
        np.testing.assert_array_equal(reader.read(Box.of_shape((9, 13)))[0], pixels_CHW[1::2])


def test_a_band_has_one_mean_over_all_times() -> None:
    pixels_CHW = np.random.default_rng(0).normal(5, 2, (6, 8, 8))
    found = finish(partial_sums(pixels_CHW, np.ones((8, 8), bool)), times=3)
    for band in (0, 1):
        np.testing.assert_allclose(found.mean[band::2], pixels_CHW[band::2].mean(), rtol=1e-14)
        np.testing.assert_allclose(found.std[band::2], pixels_CHW[band::2].std(), rtol=1e-14)


def test_wildcards_and_lists_find_the_rasters_of_all_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    series(tmp_path, "a")
    series(tmp_path, "bb")
    data = DataConfig(images="*_{time}.tif", times=TIMES)
    patterns = data.joined(data.images, "data.images")
    images = tuple(joined([f"{name}_{time}.tif" for time in TIMES]) for name in ("a", "bb"))
    wanted = images, ("a_labels.tif", "bb_labels.tif")
    for labels in ("{1}_labels.tif", "{stem}_labels.tif"):
        assert pair_sources(patterns, [labels], KEYS) == wanted
    for time in TIMES:
        Path(f"{time}.csv").write_text(f"image,label,split\na_{time}.tif,a_labels.tif,\nbb_{time}.tif,x,val\n")
    listed = data.joined("{time}.csv", "data.images")
    assert has_validation(listed)
    assert pair_sources(listed, [], KEYS) == tuple(each[:1] for each in wanted)
    Path("bb_0620.tif").unlink()
    with pytest.raises(RasterError, match=r"bb_0401.tif needs its counterpart of \*_0620.tif, which is miss"):
        pair_sources(patterns, ["{1}_labels.tif"], KEYS)


@pytest.mark.parametrize(
    ("images", "times", "words"),
    [
        ("*_{time}.tif", [], "has {time}, but data.times is empty"),
        ("a.tif", TIMES, "a.tif has no {time}, but data.times is given"),
        ("*_{time}.tif", ["0401"], "give two texts or more"),
        ("*_{time}.tif", ["0401", "0401"], "different"),
        ("*_{time}.tif", ["0401", "a,b"], "without commas"),
    ],
)
def test_times_that_cannot_be_are_refused(images: str, times: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DataConfig(images=images, times=times).check()
    assert words in str(refused.value)


def test_a_mask_that_is_missing_is_named_so(tmp_path: Path) -> None:
    for time in range(2):
        write_raster(tmp_path / f"x_{time}.tif", np.ones((1, 20, 24), "uint8"))
    cases = {"{stem}-clouds.tif": "has no masks", "{time}.tif": r"has no \{time"}
    for pattern, words in cases.items():
        composing = SourceRules(valid=f"{tmp_path}/{pattern}")
        with pytest.raises(RasterError, match=r"x_\{0,1\}.tif " + words) as refusal:
            expand_sources([f"{tmp_path}/x_{{0,1}}.tif"], "data.images", rules=composing)
        assert "composed:" not in str(refusal.value)


def test_times_of_a_run_in_another_order_are_refused() -> None:
    """Other times are another season, which a network may map."""
    run = SourceRules(("nir", "red"), times=("april", "june"))
    SourceRules().like(run, ["s2_{april,june}.tif", "one.tif", "s2_{may,july}.tif"])
    for own, names, words in (
        (SourceRules(), ["s2_{june,april}.tif"], "--image has june,april, the run april,june; give them in its order"),
        (SourceRules(times=("june", "april")), ["s2_{time}.tif"], "--times has june,april"),
        (SourceRules(("red", "nir")), ["items.json"], "--assets has red,nir, the run nir,red"),
    ):
        with pytest.raises(ConfigError, match=words):
            own.like(run, names)
