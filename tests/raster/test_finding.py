"""Images and labels as people keep them: paths, folders, globs, patterns and lists."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.answers import refusal
from tests.small_files import touch
from tiledseg.errors import RasterError
from tiledseg.raster.finding import expand_sources, find_sources, matched, pair_sources
from tiledseg.raster.lists import EVERY, HELD_OUT, HELD_OUT_ALONE, SourceRules, has_validation, left_out
from tiledseg.raster.remote import gdal_path, is_remote

pytestmark = pytest.mark.usefixtures("folder")
KEYS = "data.images", "data.labels"


def test_two_folders_are_paired_by_name() -> None:
    touch("a/x.jpg", "a/y.jpg", "b/y.png", "b/x.png", "b/z.png")
    assert pair_sources(["a"], ["b"], KEYS) == (("a/x.jpg", "a/y.jpg"), ("b/x.png", "b/y.png"))
    touch("b/x.tif")
    with pytest.raises(RasterError, match=r"a/x.jpg has several labels"):
        pair_sources(["a"], ["b"], KEYS)


@pytest.mark.parametrize(
    ("glob", "path", "parts"),
    [
        ("a/*/b?_*.tif", "a/one/b2_three.tif", ("one", "2", "three")),
        ("**/*.tif", "x/y/z.tif", ("x/y", "z")),
        ("**/*.tif", "z.tif", ("", "z")),
        ("a[!0-9](+).tif", "ab(+).tif", ("b",)),
    ],
)
def test_what_wildcards_stand_for(glob: str, path: str, parts: tuple[str, ...]) -> None:
    assert matched(glob, path) == parts


def test_lists() -> None:
    touch("set/i/1.png", "set/i/2.png", "set/l/1.png", "set/l/2.png", "set/i/3.png", "set/l/3.png")
    Path("set/images.txt").write_text("# of May\ni/2.png\n\ni/1.png\n")
    Path("set/pairs.txt").write_text("i/2.png\tl/2.png\ni/1.png\tl/1.png\n")
    Path("set/pairs.csv").write_text(
        "image,label,split\ni/2.png,l/2.png,train\ni/1.png,l/1.png,\ni/3.png,l/3.png,val\n"
    )
    rows = [{"image": f"i/{n}.png", "label": f"l/{n}.png"} for n in (2, 1, 3)]
    rows[2]["split"] = "validation"
    features = [{"type": "Feature", "geometry": None, "properties": row} for row in rows]
    Path("set/pairs.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    wanted = ("set/i/2.png", "set/i/1.png"), ("set/l/2.png", "set/l/1.png")
    assert pair_sources(["set/images.txt"], ["set/l/{stem}.png"], KEYS) == wanted
    for name in ("pairs.txt", "pairs.csv", "pairs.geojson"):
        assert pair_sources([f"set/{name}"], [], KEYS) == wanted
    for name in ("pairs.csv", "pairs.geojson"):
        assert has_validation([f"set/{name}"])
        assert pair_sources([f"set/{name}"], [], KEYS, SourceRules(parts=HELD_OUT)) == (
            ("set/i/3.png",),
            ("set/l/3.png",),
        )
    assert not has_validation(["set/pairs.txt", "set/i/*.png"])
    assert len(find_sources(["set/pairs.csv"], KEYS[0], SourceRules(parts=HELD_OUT_ALONE))) == 2


@pytest.fixture
def files(folder: Path) -> Path:
    touch("b.tif", "a.tif", "c.png", "odd[1].tif", "deep/d.tif", "deep/er/e.tif")
    (folder / "bare").mkdir()
    return folder


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
def test_expands_in_the_order_given_and_globs_by_name(files: Path, patterns: list[str], expected: list[str]) -> None:
    assert expand_sources(patterns, "data.images") == tuple(expected)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        ([], [], ["data.images is empty"]),
        (["bare"], [], ["the folder bare holds no raster (.tif, "]),
        (["a.tif", "b.tif", "./a.tif"], [], ["holds a.tif = ./a.tif twice, at positions 0 and 2"]),
        (["*.tif", "b.tif"], [], ["twice, at positions 1 and 3"]),
        (["s3://b/a.tif", "s3://b/a.tif"], [], ["twice, at positions 0 and 1"]),
        (["a/*.png"], ["b/{stem}_L.png"], ["a/1_x.png", "no labels b/1_x_L.png", "data.labels"]),
        (["a"], ["b"], ["a/1_x.png", "no labels b/1_x.*"]),
        (["a/*.png"], ["b/{2}.png"], ["{2}", "{stem}, {parent}, {1}"]),
        (["a/*.png"], ["b/{}.png"], ["{}", "{stem}"]),
        (["a/*.png"], ["b/*.png"], ["data.images has 1 rasters but data.labels has 2"]),
        ({"a.txt": ""}, [], ["a.txt lists no image"]),
        ({"a.txt": "c.png\nnone.png\n"}, [], ["a.txt, line 2", "none.png does not exist"]),
        ({"a.txt": "c.png\tc.png\tx\n"}, [], ["a.txt, line 1", "3 columns"]),
        ({"a.txt": "c.png\n"}, [], ["a.txt, line 1 names no labels", "data.labels is empty"]),
        ({"a.csv": "picture,label\nc.png,c.png\n"}, [], ["a.csv, line 1", "image,label,split"]),
        ({"a.csv": "image,label\nc.png\n"}, [], ["a.csv, line 2", "1 columns", "2"]),
        ({"a.csv": "image,label,split\nc.png,c.png,often\n"}, [], ["a.csv, line 2", "often", "train, val or test"]),
        ({"a.csv": "image,label,split\nc.png,c.png,test\n"}, [], ["a.csv lists no image of split train"]),
        ({"a.geojson": "{\n'x'}"}, [], ["a.geojson, line 2", "no JSON"]),
        ({"a.geojson": '{"features": [{"properties": {"image": 3}}]}'}, [], ["feature 0", "image 3", "text"]),
        ({"a.geojson": '{"features": [7]}'}, [], ["feature 0 names no image"]),
    ],
)
def test_says_what_is_wrong_in_one_line(files: Path, images: Any, labels: list[str], words: list[str]) -> None:
    """Of paths, and of lists by their texts."""
    touch("a/1_x.png", "b/2.png", "b/3.png")
    for name, text in images.items() if isinstance(images, dict) else ():
        Path(name).write_text(text)
    with refusal(RasterError, *words):
        pair_sources([*images], labels, KEYS)


@pytest.mark.usefixtures("files")
def test_a_list_gives_the_parts_that_are_asked_for_and_the_others_are_told() -> None:
    """To learn from: of split train, and of none; to be mapped: all."""
    Path("list.csv").write_text("image,split\na.tif,test\nb.tif,\nc.png,val\ndeep/d.tif,train\n")
    assert expand_sources(["list.csv"], "x") == ("b.tif", "deep/d.tif")
    assert expand_sources(["list.csv"], "x", SourceRules(parts=EVERY)) == ("a.tif", "b.tif", "c.png", "deep/d.tif")
    (line,) = left_out(["list.csv", "odd[1].tif", "deep"], "--images")
    assert line.startswith("--images: 2 images of list.csv of split test or val left out; ")
    assert "3 images of list.csv of split None or test or train" in left_out(["list.csv"], "x", HELD_OUT)[0]
    assert left_out(["list.csv"], "x", EVERY) == left_out(["deep"], "x") == []


def test_urls_as_gdal_spells_them() -> None:
    assert gdal_path("s3://bucket/a/b.tif") == "/vsis3/bucket/a/b.tif"
    assert gdal_path("gs://bucket/b.tif") == "/vsigs/bucket/b.tif"
    assert not is_remote("data/s3/local.tif")
