"""Images that are made of several files: STAC items, tile indexes, mosaics, rasters of several times, and masks."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio.raw
import pytest
import shapely

from tests.answers import refusal
from tests.raster import range_server
from tests.raster.range_server import running
from tests.small_files import touch, write_raster
from tiledseg import TileDataset
from tiledseg.config.data import DataConfig
from tiledseg.errors import ConfigError, RasterError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.composed import (
    BANDS,
    MOSAIC,
    TIMES,
    VALID,
    Composed,
    joined_label,
    joined_paths,
    label_of,
    parse_raster,
    stem_of,
)
from tiledseg.raster.finding import check_assets, expand_sources, pair_sources
from tiledseg.raster.lists import HELD_OUT, SourceRules, has_validation, left_out
from tiledseg.raster.reader import open_raster
from tiledseg.raster.statistics import finish, partial_sums

pytestmark = pytest.mark.usefixtures("folder")
KEYS = "data.images", "data.labels"
ASSETS = SourceRules(assets=("nir", "red"))


def item(name: str, folder: str = ".", **more: Any) -> dict[str, Any]:
    """A STAC item with three assets beside it."""
    assets = {band: {"href": f"{folder}/{name}-{band}.tif", "type": "image/tiff"} for band in ("red", "nir", "scl")}
    touch(*(f"set/{folder}/{name}-{band}.tif" for band in assets))
    whole = {"type": "Feature", "stac_version": "1.0.0", "id": name, "geometry": None, "links": []}
    return {**whole, "properties": {"datetime": "2024-05-01T10:00:00Z"}, "assets": assets, **more}


def write(name: str, *items: Any) -> str:
    Path("set").mkdir(exist_ok=True)
    document = items[0] if len(items) == 1 else {"type": "FeatureCollection", "features": items}
    Path("set", name).write_text(json.dumps(document))
    return f"set/{name}"


def stack(name: str, *files: str) -> Composed:
    return Composed(f"set/items.json#{name}", BANDS, tuple(f"set/{file}" for file in files))


def test_assets_of_an_item_are_bands() -> None:
    wanted = [stack("a", "a-nir.tif", "a-red.tif"), stack("b", "deep/b-nir.tif", "deep/b-red.tif")]
    touch("gt/a.tif", "gt/b.tif", "set/a-truth.tif")
    path = write("items.json", item("a"), item("b", "./deep"))
    assert [parse_raster(one) for one in expand_sources([path], KEYS[0], rules=ASSETS)] == wanted
    images, labels = pair_sources([path], ["gt/{stem}.tif"], KEYS, rules=ASSETS)
    assert (labels, [label_of(image) for image in images]) == (
        ("gt/a.tif", "gt/b.tif"),
        ["set/items.json#a", "set/items.json#b"],
    )
    one = item("a", properties={"label": "a-truth.tif", "split": "val", "datetime": None})
    path = write("items.json", one)  # a single Feature
    assert has_validation([path])
    assert "1 image of set/items.json of split val" in left_out([path], KEYS[0])[0]
    assert pair_sources([path], [], KEYS, ASSETS._replace(parts=HELD_OUT)) == ((str(wanted[0]),), ("set/a-truth.tif",))
    with pytest.raises(RasterError, match="lists no image of split train"):
        pair_sources([path], [], KEYS, ASSETS)


SEASON = SourceRules(("red", "nir"), True, "scl", (4.0,), ("2024-04", "2024-06"))


@pytest.mark.parametrize(
    ("own", "run", "names", "wanted"),
    [
        (SourceRules(mosaic=None), SEASON, ["map.json"], SEASON),
        (SourceRules(mosaic=False), SEASON, ["map.json"], SEASON._replace(mosaic=False)),
        (SourceRules(("nir",), None, "qa", (), ("a", "b")), SEASON, ["x.json"], (("nir",), True, "qa", (), ("a", "b"))),
        (SourceRules(mosaic=None, valid="none"), SEASON, ["all.tif"], SEASON._replace(valid=None, values=(), times=())),
        (SourceRules(valid="none"), SEASON, ["map.json"], (SEASON.assets, False, None, (), SEASON.times)),
        (SourceRules(values=(5.0,)), SEASON, ["map.json"], SEASON._replace(mosaic=False, values=(5.0,))),
        (SourceRules(), SourceRules(times=("a", "b"), valid="{stem}.png"), ["x_{time}.tif"], None),
        (SourceRules(), SourceRules(times=("a", "b"), valid=3), ["x.csv", "y.json"], SourceRules(valid=3)),
    ],
)
def test_a_map_takes_its_images_as_those_of_the_training(
    own: SourceRules, run: SourceRules, names: list[str], wanted: Any
) -> None:
    assert own.like(run, names) == SourceRules(*(wanted or run))


def test_a_mask_of_the_one_image_of_a_run_is_no_other_image_s() -> None:
    run = SourceRules(valid="clouds.tif")
    with pytest.raises(ConfigError, match=r"mask is clouds.tif, of one image; give --valid anew, or --valid none"):
        SourceRules().like(run, ["b.tif"])
    with pytest.raises(ConfigError, match=r"mask is scl, an asset of items; give --valid anew"):
        SourceRules().like(SEASON, ["all.tif"])
    assert SourceRules(valid="b-clouds.tif").like(run, ["b.tif"]).valid == "b-clouds.tif"
    with pytest.raises(ConfigError, match="--valid-values is given, but no --valid"):
        SourceRules(values=(1.0,)).like(SourceRules(), ["b.tif"])


def test_masks_are_of_each_time_or_of_a_whole_mosaic() -> None:
    """`{time}` names a mask for each raster of a series; a mask without a field is that of the one mosaic."""
    touch("s2/a_04.tif", "s2/a_06.tif", "clouds/a-04.tif", "clouds/a-06.tif", "clouds.tif", "m/1.tif", "m/2.tif")
    series = SourceRules(valid="clouds/{stem}-{time}.tif", values=(4.0,), times=("04", "06"))
    (path,) = expand_sources(["s2/*_{04,06}.tif"], KEYS[0], rules=series)
    image = parse_raster(path)
    assert image is not None
    assert image.kind == TIMES
    parts = tuple(
        Composed(f"s2/a_{t}.tif", VALID, (f"s2/a_{t}.tif", f"clouds/a-{t}.tif"), None, (4.0,)) for t in series.times
    )
    assert image.parts == parts
    assert stem_of(path) == "a", "masks of each time leave an image its name"
    (path,) = expand_sources(["s2/*_{04,06}.tif"], KEYS[0], rules=SourceRules(valid=3))
    assert parse_raster(path).parts == tuple(
        Composed(f"s2/a_{t}.tif", VALID, (f"s2/a_{t}.tif",), 3) for t in ("04", "06")
    )
    with pytest.raises(RasterError, match=r"data.valid is clouds/.*, but s2/a_04.tif has no \{time\}"):
        expand_sources(["s2/a_04.tif"], KEYS[0], rules=series)
    (path,) = expand_sources(["m"], KEYS[0], rules=SourceRules(mosaic=True, valid="clouds.tif"))
    pieces = Composed("m", MOSAIC, ("m/1.tif", "m/2.tif"))
    assert parse_raster(path) == Composed("m", VALID, (pieces, "clouds.tif"))
    with pytest.raises(RasterError, match=r"data.valid is clouds.tif for 2 images"):
        expand_sources(["m", "s2"], KEYS[0], rules=SourceRules(mosaic=True, valid="clouds.tif"))


def test_an_id_leads_to_no_other_folder() -> None:
    touch("secret/a.tif", "set/gt/b.tif")
    path = write("items.json", item("a", id="../secret/a"))
    with pytest.raises(
        RasterError, match=r"items.json#../secret/a is named ../secret/a, which leads to another folder"
    ):
        pair_sources([path], ["set/{stem}.tif"], KEYS, rules=ASSETS)


def changed(asset: Any) -> dict[str, Any]:
    one = item("a")
    one["assets"]["red"] = asset
    return one


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (item, ["set/items.json, feature 0 is a STAC item with the assets red, nir, scl", "data.assets"]),
        (lambda name: changed(None), ["feature 0 (a) has no asset red of data.assets", "its assets are nir, scl"]),
        (lambda name: changed({"href": 3}), ["feature 0 has the asset red with href 3", "path or URL"]),
        (lambda name: changed({"href": "gone.tif"}), ["feature 0: set/gone.tif does not exist"]),
        (lambda name: changed({"href": "/etc/passwd"}), ["feature 0 names /etc/passwd", "outside", "--references"]),
        (lambda name: changed({"href": "../up.tif"}), ["names up.tif", "outside its folder", "--references"]),
        (lambda name: changed({"href": "file:///etc/passwd"}), ["names /etc/passwd", "outside its folder"]),
        (lambda name: changed({"href": "https://evil.example/a.tif"}), ["names https://evil", "--references"]),
        (lambda name: changed({"href": "/vsicurl/https://evil.example/a.tif"}), ["/vsicurl/", "--references"]),
        (lambda name: changed({"href": "/vsizip/a.zip/a.tif"}), ["/vsizip/", "--references"]),
        (lambda name: changed({"href": "WMS:evil"}), ["WMS:evil"]),
        (lambda name: changed({"href": str(Composed("x", BANDS, ("/etc/passwd",)))}), ["composed:"]),
        (lambda name: item("a", properties={"split": 7}), ["feature 0 has split 7", "text"]),
        (lambda name: [], ["set/items.json is no FeatureCollection"]),
        (lambda name: {"type": "FeatureCollection", "features": []}, ["lists no image"]),
    ],
)
def test_items_that_cannot_be(document: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("items.json", document("a"))
    composing = SourceRules() if document is item else ASSETS
    with refusal(RasterError, *words):
        expand_sources([path], KEYS[0], rules=composing)
    monkeypatch.chdir("set")
    with pytest.raises(RasterError):
        expand_sources(["items.json"], KEYS[0], rules=composing)


def test_files_elsewhere_need_references() -> None:
    touch("up.tif", "set/here.tif")
    hrefs = {"../up.tif": "up.tif", "https://example.org/a.tif": "https://example.org/a.tif"}
    for href, path in {**hrefs, f"file://{Path.cwd()}/up.tif": f"{Path.cwd()}/up.tif"}.items():
        (found,) = expand_sources(
            [write("items.json", changed({"href": href}))], KEYS[0], ASSETS._replace(references=True)
        )
        composed = parse_raster(found)
        assert composed is not None
        assert composed.parts[1] == path
    href = f"file://{Path.cwd()}/set/here.tif"  # inside the item's folder it may be
    assert expand_sources([write("items.json", changed({"href": href}))], KEYS[0], rules=ASSETS)


def test_assets_of_no_item_are_refused() -> None:
    touch("a.tif")
    with pytest.raises(ConfigError, match=r"data.assets is \['red'\], but no image is a STAC item"):
        check_assets(["red"], expand_sources(["a.tif"], KEYS[0], rules=SourceRules(("red",))))
    check_assets(["red"], [str(Composed("v", VALID, (stack("a", "a.tif"), "b.tif")))])


@pytest.mark.parametrize("kind", ["gti.gpkg", "gti.fgb", "parquet"])
def test_rows_of_a_tile_index_are_images(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    touch("set/a.tif", "set/b.tif", "set/c.tif", "set/lb.tif", "set/lc.tif")
    places, labels, splits = ["a.tif", "./b.tif", "c.tif"], [None, "lb.tif", "lc.tif"], ["test", "", "val"]
    path = f"set/index.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"location": places, "label": labels, "split": splits}), path)
    else:
        shapes = shapely.to_wkb([shapely.box(0, 0, 1, 1)] * 3)
        fields = [np.array(column, object) for column in (places, labels, splits, ["x"] * 3)]
        names = ["location", "label", "split", "other"]
        pyogrio.raw.write(path, shapes, fields, names, crs="EPSG:32633", geometry_type="Polygon")
    assert pair_sources([path], [], KEYS) == (("set/./b.tif",), ("set/lb.tif",))
    assert pair_sources([path], [], KEYS, SourceRules(parts=HELD_OUT)) == (("set/c.tif",), ("set/lc.tif",))
    assert has_validation([path])
    damage = {"gti.gpkg": b"SQLite format 3\0" + bytes(900)}.get(kind, b"<VRTDataset>" + bytes(80))
    Path(path).write_bytes(damage)
    with refusal(RasterError, f"index.{kind}"):
        expand_sources([path], KEYS[0])
    assert not recwarn.list


def test_rasters_of_an_entry_are_a_mosaic() -> None:
    touch("a/1.tif", "a/2.tif", "b/3.tif", "gt/1.png", "gt/2.png", "gt/3.png", "whole.tif")
    mosaic = SourceRules(mosaic=True)
    wanted = str(Composed("a/*.tif", MOSAIC, ("a/1.tif", "a/2.tif"))), "b/3.tif"
    truth = str(Composed("a/*.tif", MOSAIC, ("gt/1.png", "gt/2.png"))), "gt/3.png"
    assert pair_sources(["a/*.tif", "b"], ["gt/{stem}.png"], KEYS, rules=mosaic) == (wanted, truth)
    assert pair_sources(["a/*.tif"], ["whole.tif"], KEYS, rules=mosaic) == (wanted[:1], ("whole.tif",))
    first = str(Composed("gt/[12].png", MOSAIC, ("gt/1.png", "gt/2.png")))
    assert pair_sources(["a/*.tif"], ["gt/[12].png"], KEYS, rules=mosaic) == (wanted[:1], (first,))
    assert [stem_of(path) for path in wanted] == ["1", "3"]
    with pytest.raises(RasterError, match="twice"):
        expand_sources(["a/*.tif", "a/2.tif"], KEYS[0], rules=mosaic)
    path = write("items.json", item("a"), item("b"))
    (found,) = expand_sources([path], KEYS[0], rules=ASSETS._replace(mosaic=True))
    parts = stack("a", "a-nir.tif", "a-red.tif"), stack("b", "b-nir.tif", "b-red.tif")
    assert parse_raster(found) == Composed(path, MOSAIC, parts)


def dated(tile: str, date: str, **more: Any) -> dict[str, Any]:
    return item(f"{tile}-{date}", properties={"datetime": f"{date}T10:00:00Z", "grid:code": tile, **more})


def test_items_of_one_place_are_times() -> None:
    dates = ("2024-06-20", "2024-04-01", "2024-09-15")
    path = write("items.json", *(dated(tile, date) for tile in ("T1", "T2") for date in dates))
    timed = ASSETS._replace(times=("2024-04", "2024-06-20"))
    wanted = [
        Composed(
            f"set/items.json#{tile}",
            TIMES,
            tuple(stack(f"{tile}-{date}", f"{tile}-{date}-nir.tif", f"{tile}-{date}-red.tif") for date in dates[1::-1]),
        )
        for tile in ("T1", "T2")
    ]
    found = expand_sources([path], KEYS[0], rules=timed)
    assert [parse_raster(one) for one in found] == wanted
    assert [stem_of(one) for one in found] == ["T1", "T2"]
    data = DataConfig(path, times=["2024-04", "2024-06"], assets=["nir"])
    assert data.joined(data.images, KEYS[0]) == [path]
    write("items.json", dated("T1", dates[0]), dated("T1", dates[1]), dated("T2", dates[0]))
    with pytest.raises(RasterError, match=r"T2-2024-06-20 .* its counterpart of data.times 2024-04, which is missing"):
        expand_sources([path], KEYS[0], rules=timed)
    write("items.json", dated("T1", dates[0]), dated("T1", dates[1]), dated("T3", dates[2]))
    with pytest.raises(RasterError, match=r"feature 2 has a place without items of data.times"):
        expand_sources([path], KEYS[0], rules=timed)
    write("items.json", dated("T1", dates[0]), dated("T1", dates[1]))
    with pytest.raises(RasterError, match=r"feature 1 and set/items.json, feature 0 are both of data.times 2024;"):
        expand_sources([path], KEYS[0], rules=ASSETS._replace(times=("2024", "2025")))
    with pytest.raises(RasterError, match=r"feature 0 is of data.times 2024-06 and 2024-06-20; give"):
        expand_sources([path], KEYS[0], rules=ASSETS._replace(times=("2024-06", "2024-06-20")))
    write("items.json", dated("T1", dates[0]), dated("T1", dates[1], datetime=None))
    with pytest.raises(RasterError, match=r"feature 1 has no datetime, and data.times is given"):
        expand_sources([path], KEYS[0], rules=timed)
    touch("set/a.tif")
    write("items.json", {"type": "Feature", "properties": {"image": "a.tif"}})
    with pytest.raises(RasterError, match="feature 0 has no grid:code and bbox: it is no STAC item"):
        expand_sources([path], KEYS[0], rules=timed)


def test_rows_of_geoparquet_are_items_and_their_boxes_places() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, rows = "set/items.parquet", []
    for place, date in itertools.product((10, 20), ("2024-04-02", "2024-06-05")):
        box = {"xmin": place, "ymin": 0, "xmax": place + 10, "ymax": 10}
        rows.append({"id": f"{place}-{date}", "assets": dated("", date)["assets"], "bbox": box, "datetime": date})
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    composing = ASSETS._replace(times=("2024-04", "2024-06"))
    found = expand_sources([path], KEYS[0], rules=composing)
    assert [label_of(one) for one in found] == ["set/items.parquet#10,0,20,10", "set/items.parquet#20,0,30,10"]
    first = Composed(f"{path}#10-2024-04-02", BANDS, ("set/-2024-04-02-nir.tif", "set/-2024-04-02-red.tif"))
    assert parse_raster(expand_sources([path], KEYS[0], rules=ASSETS._replace(mosaic=True))[0]).parts[0] == first
    rows[1]["assets"] = {**rows[1]["assets"], "nir": None}
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(RasterError, match=r"row 1 \(10-2024-06-05\) has no asset nir .*its assets are red, scl"):
        expand_sources([path], KEYS[0], rules=ASSETS)
    odd = write("odd.json", {**dated("", "2024-04-02"), "bbox": 5})
    with pytest.raises(RasterError, match="has no grid:code and bbox"):
        expand_sources([odd], KEYS[0], rules=composing)


def test_validity_is_found_as_labels_are() -> None:
    touch("i/1.tif", "i/2.tif", "clouds/1.tif", "clouds/2.tif", "one.tif")
    images, names = ("i/1.tif", "i/2.tif"), ("clouds/1.tif", "clouds/2.tif")
    masked = tuple(str(Composed(one, VALID, (one, mask))) for one, mask in zip(images, names, strict=True))
    for valid in ("clouds", "clouds/{stem}.tif", "clouds/{1}.tif"):
        assert expand_sources(["i/*.tif"], KEYS[0], rules=SourceRules(valid=valid)) == masked
    by_band = tuple(str(Composed(one, VALID, (one,), 5, (1.0,))) for one in images)
    assert expand_sources(["i"], KEYS[0], rules=SourceRules(valid=5, values=(1.0,))) == by_band
    assert expand_sources(["i/1.tif"], KEYS[0], rules=SourceRules(valid="one.tif"))
    with pytest.raises(RasterError, match=r"data.valid is one.tif for 2 images of data.images; give a pattern"):
        expand_sources(["i"], KEYS[0], rules=SourceRules(valid="one.tif"))
    with pytest.raises(RasterError, match=r"i/1.tif has no .*none/1.tif, which data.valid asks for"):
        expand_sources(["i"], KEYS[0], rules=SourceRules(valid="none/{stem}.tif"))
    (found,) = expand_sources([write("items.json", item("a"))], KEYS[0], rules=ASSETS._replace(valid="scl"))
    wanted = stack("a", "a-nir.tif", "a-red.tif")
    assert parse_raster(found) == Composed(wanted.label, VALID, (wanted, "set/a-scl.tif"))
    mosaic = SourceRules(mosaic=True, valid="clouds")
    assert expand_sources(["i"], KEYS[0], rules=mosaic) == (
        str(Composed("i", MOSAIC, tuple(map(parse_raster, masked)))),
    )


def test_an_asset_that_reads_other_files_is_refused(folder: Path) -> None:
    """Each asset goes through the formats that are allowed, whatever its name and its type say."""
    one = item("a")
    write_raster(folder / "set" / "a-nir.tif", np.ones((1, 4, 4), np.uint8))
    secret = write_raster(folder / "secret.tif", np.ones((1, 4, 4), np.uint8))
    (folder / "set" / "a-red.tif").write_text(
        '<VRTDataset rasterXSize="4" rasterYSize="4"><VRTRasterBand dataType="Byte" band="1"><SimpleSource>'
        f"<SourceFilename>{secret}</SourceFilename></SimpleSource></VRTRasterBand></VRTDataset>"
    )
    (found,) = expand_sources([write("items.json", one)], KEYS[0], rules=ASSETS)
    with pytest.raises(RasterError, match=r"set/a-red.tif.*--references"):
        open_raster(found)


def test_assets_of_a_web_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles with halos, by readers of two bands: each block of an asset is asked for once; nobody is asked before the
    user has trusted the list."""
    monkeypatch.setenv("no_proxy", "*")
    pixels_CHW = np.random.default_rng(0).integers(0, 1 << 16, (2, 256, 320)).astype(np.uint16)
    Path("sent").touch()
    with running(range_server.__file__, str(tmp_path)) as address:
        assets = {}
        for band, pixels in zip(("red", "nir"), pixels_CHW, strict=True):
            write_raster(Path(f"{band}.tif"), pixels[None])
            assets[band] = {"href": f"http://{address}/{band}.tif"}
        path = write("items.json", {**item("a"), "assets": assets})
        with pytest.raises(RasterError, match=r"names http://.*red.tif, .*is no path of a file; .*--references"):
            expand_sources([path], KEYS[0], rules=SourceRules(("red", "nir")))
        assert not Path("sent").read_text()
        (image,) = expand_sources([path], KEYS[0], rules=SourceRules(("red", "nir"), references=True))
        dataset = TileDataset([path], halo=8, grid=(2, 2), assets=["red", "nir"], references=True)
        with open_raster(image, references=True) as reader:
            assert np.array_equal(reader.read(Box.of_shape((256, 320)))[0], pixels_CHW)
        for at in range(len(dataset)):
            core = dataset.where(at)[1].core
            rows, cols = dataset.where(at)[1].core_in_output.slices
            assert np.array_equal(dataset[at]["image"].numpy()[:, rows, cols], pixels_CHW[:, *core.slices])
    sent = [line.split() for line in Path("sent").read_text().splitlines()]
    for band in assets:
        asked = sum(int(size) for name, size in sent if name == f"{band}.tif")
        assert Path(f"{band}.tif").stat().st_size <= asked < 1.3 * Path(f"{band}.tif").stat().st_size + 3 * 16384


DATES = ["0401", "0620", "0915"]


def series_of(paths: Sequence[str]) -> str:
    """The name of the rasters of several times."""
    return str(Composed(joined_label(paths), TIMES, tuple(paths)))


def series(folder: Path, name: str, nodata: int | None = None) -> np.ndarray:
    """Write a raster of 2 bands a time, and labels; return all bands."""
    rng = np.random.default_rng(len(name))
    every = rng.integers(1, 200, (3, 2, 9, 13)).astype(np.int16)
    for time, pixels_CHW in zip(DATES, every, strict=True):
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
    assert label_of(series_of(paths)) == name
    assert stem_of(series_of(paths)) == stem
    assert joined_paths(name) == paths
    assert joined_paths(paths[0]) == ()


def test_bands_of_each_time_come_one_after_the_other(tmp_path: Path) -> None:
    pixels_CHW = series(tmp_path, "a", nodata=7)
    pixels_CHW[3, 2, 5] = 7  # no data at one time
    write_raster(tmp_path / "a_0620.tif", pixels_CHW[2:4], nodata=7)
    path = series_of([f"{tmp_path}/a_{time}.tif" for time in DATES])
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


def test_wildcards_and_lists_find_the_rasters_of_all_times(tmp_path: Path) -> None:
    series(tmp_path, "a")
    series(tmp_path, "bb")
    data = DataConfig(images="*_{time}.tif", times=DATES)
    patterns = data.joined(data.images, "data.images")
    images = tuple(series_of([f"{name}_{time}.tif" for time in DATES]) for name in ("a", "bb"))
    wanted = images, ("a_labels.tif", "bb_labels.tif")
    for labels in ("{1}_labels.tif", "{stem}_labels.tif"):
        assert pair_sources(patterns, [labels], KEYS) == wanted
    for time in DATES:
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
        ("a.tif", DATES, "a.tif has no {time}, but data.times is given"),
        ("*_{time}.tif", ["0401"], "give two texts or more"),
        ("*_{time}.tif", ["0401", "0401"], "different"),
        ("*_{time}.tif", ["0401", "a,b"], "without commas"),
    ],
)
def test_times_that_cannot_be_are_refused(images: str, times: list[str], words: str) -> None:
    with refusal(ConfigError, words):
        DataConfig(images=images, times=times).check()


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
