from __future__ import annotations

from pathlib import Path

import pytest

from tiledseg.errors import RasterError
from tiledseg.raster.finding.sources import EVERY, HELD_OUT, check_counts, expand_sources, left_out
from tiledseg.raster.names import gdal_path, is_remote


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.tif", "a.tif", "c.png", "odd[1].tif", "deep/d.tif", "deep/er/e.tif"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "bare").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["?.tif"], ["a.tif", "b.tif"]),
        (["c.png", "?.tif"], ["c.png", "a.tif", "b.tif"]),
        (["b.tif", "a.tif"], ["b.tif", "a.tif"]),
        (["odd[1].tif"], ["odd[1].tif"]),
        (["deep"], ["deep/d.tif"]),
        (["deep/**/*.tif"], ["deep/d.tif", "deep/er/e.tif"]),
        (["gs://bucket/*.tif", "a.tif"], ["gs://bucket/*.tif", "a.tif"]),
        (["/vsis3/bucket/a.tif", "https://host/a.tif?x=1"], ["/vsis3/bucket/a.tif", "https://host/a.tif?x=1"]),
    ],
)
def test_expands_in_the_order_given_and_globs_by_name(folder: Path, patterns: list[str], expected: list[str]) -> None:
    assert expand_sources(patterns, "data.images") == tuple(expected)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ([], "data.images is empty"),
        (["x*.tif"], "nothing matches the glob x*.tif"),
        (["none.tif"], "none.tif does not exist"),
        (["bare"], "the folder bare holds no raster (.tif, "),
        (["a.tif", "b.tif", "./a.tif"], "holds ./a.tif twice, at positions 0 and 2"),
        (["*.tif", "b.tif"], "twice, at positions 1 and 3"),
        (["s3://b/a.tif", "s3://b/a.tif"], "twice, at positions 0 and 1"),
    ],
)
def test_says_what_is_wrong_in_one_line(folder: Path, patterns: list[str], words: str) -> None:
    with pytest.raises(RasterError) as error:
        expand_sources(patterns, "data.images")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_list_gives_the_parts_that_are_asked_for_and_the_others_are_told(folder: Path) -> None:
    """To learn from: of split train, and of none; to be mapped: all."""
    (folder / "list.csv").write_text("image,split\na.tif,test\nb.tif,\nc.png,val\ndeep/d.tif,train\n")
    assert [Path(path).name for path in expand_sources(["list.csv"], "x")] == ["b.tif", "d.tif"]
    assert [Path(path).name for path in expand_sources(["list.csv"], "x", EVERY)] == [
        "a.tif",
        "b.tif",
        "c.png",
        "d.tif",
    ]
    (line,) = left_out(["list.csv", "odd[1].tif", "deep"], "--images")
    assert line.startswith("--images: 2 images of list.csv of split test or val left out; ")
    assert "3 images of list.csv of split None or test or train" in left_out(["list.csv"], "x", HELD_OUT)[0]
    assert left_out(["list.csv"], "x", EVERY) == left_out(["deep"], "x") == []


def test_counts_that_differ_are_both_shown() -> None:
    check_counts(["a"], ["b"], ("data.images", "data.labels"))
    with pytest.raises(RasterError, match=r"data.images has 2 rasters but data.labels has 1"):
        check_counts(["a", "b"], ["c"], ("data.images", "data.labels"))


def test_urls_as_gdal_spells_them() -> None:
    assert gdal_path("s3://bucket/a/b.tif") == "/vsis3/bucket/a/b.tif"
    assert gdal_path("gs://bucket/b.tif") == "/vsigs/bucket/b.tif"
    assert gdal_path("https://host/b.tif") == "/vsicurl/https://host/b.tif"
    assert gdal_path("/vsis3/bucket/b.tif") == "/vsis3/bucket/b.tif"
    assert gdal_path("local.tif") == "local.tif"
    assert not is_remote("data/s3/local.tif")
