"""The table of broken inputs."""

from __future__ import annotations

from dataclasses import replace

from tests.bad_input.case import Case, evaluate, export, plan, predict, resume, scene, tile, train
from tests.bad_input.materials import RESEALED
from tests.bad_input.setting_cases import SETTINGS

COLOURS = '[{name: a, value: "#ff0000"}, {name: b, value: "#00ff00"}]'
PERMUTED = "[{name: a, value: 1}, {name: b, value: 0}, {name: c, value: 2}]"

RASTERS = (
    train("no-images", "--data.images []", "data.images", "empty"),
    train("missing-image", "--data.images ROOT/nowhere.tif", "data.images", "nowhere.tif", "does not exist"),
    train("missing-labels", "--data.labels ROOT/nowhere.tif", "data.labels", "nowhere.tif", "does not exist"),
    train("no-labels", "--data.labels []", "data.labels", "empty"),
    train("glob-without-matches", "--data.images 'ROOT/*.jp2'", "data.images", "*.jp2", "matches"),
    train("image-is-a-folder", "--data.images ROOT/folder", "data.images", "folder"),
    train("same-image-twice", "--data.images [ROOT/image.tif,ROOT/image.tif]", "image.tif", "twice"),
    train("more-images-than-labels", "--data.images [ROOT/image.tif,ROOT/second.tif]", "2 rasters", "has 1"),
    train("list-of-nothing", "--data.images ROOT/empty.csv", "empty.csv, line 1", "image,label,split"),
    train("pattern-without-labels", "--data.labels ROOT/{stem}_L.png", "image.tif has no labels", "image_L.png"),
    train("validation-without-labels", "--data.val_images ROOT/second.tif", "data.val_images", "data.val_labels"),
    train(
        "validation-of-other-bands",
        "--data.val_images ROOT/two-bands.tif --data.val_labels ROOT/second-labels.tif",
        *("image.tif", "two-bands.tif", "3", "2"),
    ),
    train(
        "images-of-two-dtypes",
        "--data.images [ROOT/image.tif,ROOT/uint16.tif] --data.labels [ROOT/labels.tif,ROOT/second-labels.tif]",
        *("uint8", "uint16", "uint16.tif"),
    ),
    train("cut-in-the-header", "--data.images ROOT/cut-head.tif", "cut-head.tif"),
    train("cut-at-a-tenth", "--data.images ROOT/cut-tenth.tif", "cut-tenth.tif"),
    train("cut-in-the-middle", "--data.images ROOT/cut-half.tif", "cut-half.tif", "truncated"),
    train("cut-by-a-byte", "--data.images ROOT/cut-end.tif", "cut-end.tif", "truncated"),
    train("cut-png", "--data.images ROOT/cut.png", "cut.png", "truncated"),
    train("cut-labels", "--data.labels ROOT/cut-labels.tif", "cut-labels.tif", "truncated"),
    train("damaged-block", "--data.images ROOT/damaged.tif", "damaged.tif", "rows", "columns", "copy it again"),
    train("empty-file", "--data.images ROOT/empty.tif", "empty.tif", "GDAL"),
    train("text-file", "--data.images ROOT/text.tif", "text.tif", "GDAL"),
    train("complex-pixels", "--data.images ROOT/complex.tif", "complex.tif", "complex64"),
    train("float-labels", "--data.labels ROOT/float-labels.tif", "float-labels.tif", "float32", "whole numbers"),
    train("labels-of-other-size", "--data.labels ROOT/small-labels.tif", "small-labels.tif", "48 x 48", "47 x 48"),
    train("labels-of-other-crs", "--data.labels ROOT/other-crs-labels.tif", "CRS", "32611", "32612"),
    train("labels-shifted", "--data.labels ROOT/shifted-labels.tif", "transform", "500000", "500001"),
    train("labels-of-three-bands", "--data.labels ROOT/three-band-labels.tif", "three-band-labels.tif", "3", "1 band"),
    train("label-outside", "--data.labels ROOT/outside-labels.tif", "outside-labels.tif", "value 9", "row 5, col 7"),
    train("colours-without-colours", f"--data.classes '{COLOURS}'", "labels.tif", "colour"),
    train("no-label-counts", "--data.labels ROOT/void-labels.tif", "no pixel of data.labels is of a class", "255"),
    train("no-valid-pixel", "--data.images ROOT/blank.tif", "no valid pixel", "data.nodata"),
)

ASSETS = "--data.assets [red,nir]"
ITEMS = (
    train("items-without-assets", "--data.images ROOT/good.json", "good.json, feature 0", "red, nir", "data.assets"),
    train("assets-without-items", ASSETS, "data.assets", "no image is a STAC item"),
    train("items-no-json", f"--data.images ROOT/broken.json {ASSETS}", "broken.json, line 1 is no JSON"),
    train(
        "items-of-two-grids", f"--data.images ROOT/grids.json {ASSETS}", "band.tif", "half.tif", "48 x 48", "24 x 24"
    ),
    train("items-asset-gone", f"--data.images ROOT/gone.json {ASSETS}", "gone.json, feature 0", "nowhere.tif does not"),
    train("items-asset-unnamed", f"--data.images ROOT/fewer.json {ASSETS}", "(fewer) has no asset nir", "red"),
    train("items-of-elsewhere", f"--data.images ROOT/outside.json {ASSETS}", "image.tif", "outside", "data.references"),
    train("items-of-a-server", f"--data.images ROOT/remote.json {ASSETS}", "/vsicurl/", "data.references"),
    train(
        "items-without-date", f"--data.images ROOT/good.json {ASSETS} --data.times [a,b]", "feature 0 has no datetime"
    ),
    train("mosaic-of-two-grids", "--data.images ROOT/[hb]a[ln][fd].tif --data.mosaic true", "half.tif", "band.tif"),
    train("valid-of-no-image", "--data.valid ROOT/{stem}-clouds.tif", "image-clouds.tif", "data.valid"),
    train("valid-of-three-bands", "--data.valid ROOT/second.tif", "second.tif with 3 bands", "data.valid"),
    train("valid-band-outside", "--data.valid 4", "band 4", "bands 1 to 3"),
    train("valid-values-of-nothing", "--data.valid_values [1]", "data.valid_values", "data.valid"),
    predict("items-of-other-assets", "--image ROOT/fewer.json --assets [nir]", "has no asset nir"),
)

OUTPUTS = (
    train("output-empty", "--run.output ''", "run.output", "empty"),
    train("output-is-a-file", "--run.output ROOT/file", "run.output", "file"),
    train("output-below-a-file", "--run.output ROOT/file/run", "run.output", "file"),
    train("output-that-no-one-can-make", "--run.output /proc/tiledseg", "run.output", "/proc/tiledseg"),
)

RESUMES = (
    resume("missing", "--train.resume ROOT/nowhere", "nowhere", "no checkpoint"),
    resume("nothing-in-folder", "--train.resume ROOT/broken/no-checkpoint", "no-checkpoint", "checkpoint"),
    resume("from-a-file", "--train.resume ROOT/file", "file", "checkpoint"),
    resume("of-other-levels", "--model.levels 3", "levels is 2", "3"),
    resume("of-other-classes", "--data.classes 4", "classes is 3", "4"),
    resume("of-other-bands", "--data.bands [1,2]", "bands", "3", "2"),
    resume("of-permuted-classes", f"--data.classes '{PERMUTED}'", "data.classes is 3"),
    resume("of-bands-in-another-order", "--data.bands [3,2,1]", "data.bands is null there and [3, 2, 1]"),
    resume("of-other-nodata", "--data.nodata 0", "data.nodata is null there and 0"),
    resume("of-another-ignore-index", "--data.ignore_index 254", "data.ignore_index is 255 there and 254"),
    resume("without-normalisation", "--data.normalize false", "data.normalize is True there and False"),
    resume("of-other-labels", "--data.labels ROOT/second-labels.tif", "data.labels", "second-labels.tif"),
    resume("with-latest-a-folder", "--run.output ROOT/broken/latest-folder", "checkpoints/latest", "it is a folder"),
    resume("of-another-optimizer", "--optimizer.name sgd", "optimizer.name", "adamw", "sgd"),
    resume(
        "into-another-order",
        "--train.resume ROOT/run/checkpoints/step-000001 --train.seed 5 --run.output ROOT/out",
        *("step-000001", "seed is 0", "5"),
    ),
    resume("never-in-a-used-folder", "--train.resume never", "run", "never"),
    resume("older-than-the-newest", "--train.resume ROOT/run/checkpoints/step-000001", "step-000001", "step-000002"),
    resume("all-damaged", "--run.output ROOT/broken/flipped", "model.safetensors", "checksum", "another run.output"),
)

RESUMES += tuple(
    resume(name, f"--run.output ROOT/broken/{name}", name, "is no checkpoint of this program", words)
    for name, _, words in RESEALED
)

DAMAGES = tuple(
    predict(f"checkpoint-{name}", f"--checkpoint ROOT/broken/{name}", name, *words)
    for name, words in (
        ("no-model.safetensors", ("damaged", "model.safetensors is missing")),
        ("no-manifest.json", ("manifest.json",)),
        ("flipped", ("damaged", "model.safetensors", "checksum")),
        ("not-json", ("manifest.json",)),
        ("edited", ("manifest.json",)),
        ("format-99", ("99", "1")),
        *((name, ("is no checkpoint of this program", words)) for name, _, words in RESEALED),
        ("no-checkpoint", ("checkpoint",)),
        ("lost-latest", ("step-000099",)),
    )
)

MAPS = (
    predict("missing-checkpoint", "--checkpoint ROOT/nowhere", "nowhere", "no checkpoint"),
    predict("checkpoint-is-a-file", "--checkpoint ROOT/file", "file", "checkpoint"),
    predict("missing-image", "--image ROOT/nowhere.tif", "nowhere.tif", "does not exist"),
    predict("cut-image", "--image ROOT/cut-half.tif", "cut-half.tif", "truncated"),
    predict("image-of-other-bands", "--image ROOT/two-bands.tif", "two-bands.tif", "2 bands", "3"),
    predict("grid-too-fine", "--tiling.grid 25", "25", "48", "alignment of 2", "at most 24"),
    predict("grid-word", "--tiling.grid fine", "tiling.grid", "fine", "auto"),
    predict("unknown-flag", "--colour red", "--colour", "--help"),
    predict("output-of-another-format", "--output ROOT/m.JP2", "--output is '", "but a GeoTIFF is written there"),
    predict("shares-of-another-format", "--probabilities ROOT/p.jpg", "--probabilities is", "a GeoTIFF"),
    predict("polygons-of-no-class", "--polygons ROOT/new.gpkg --polygons-classes road", "has 'road'; give names"),
    predict("polygons-classes-alone", "--polygons-classes 0", "polygons-classes is 0, but --polygons is not given"),
    predict("output-is-a-folder", "--output ROOT/folder", "folder", "file name"),
    predict("output-in-no-folder", "--output ROOT/nowhere/map.tif", "nowhere", "make it first"),
    predict("output-is-the-input", "--output ROOT/image.tif", "image.tif", "input"),
    predict("probabilities-are-the-input", "--probabilities ROOT/image.tif", "image.tif", "input"),
    predict("probabilities-are-the-output", "--probabilities ROOT/map.tif", "map.tif", "two names"),
    replace(
        predict("damaged-block", "--image ROOT/damaged.tif", "damaged.tif", "rows", "columns", "copy it again"),
        by_one_rank=True,
    ),
    Case("nothing-given", "predict", "", ("--image", "--output")),
)


SCORES = (
    evaluate("missing-prediction", "--prediction ROOT/nowhere.tif", "nowhere.tif", "does not exist"),
    evaluate("text-for-a-map", "--prediction ROOT/text.tif", "text.tif", "GDAL"),
    evaluate("map-of-other-size", "--prediction ROOT/small-labels.tif", "small-labels.tif", "48 x 48", "47 x 48"),
    evaluate("map-of-other-crs", "--prediction ROOT/other-crs-labels.tif", "CRS", "32611", "32612"),
    evaluate("label-outside", "--labels ROOT/outside-labels.tif --classes 3", "outside-labels.tif", "value 9"),
    evaluate("prediction-outside", "--prediction ROOT/outside-labels.tif --classes 3", "9"),
    evaluate("ignore-beyond", "--ignore-index 300", "--ignore-index is 300", "0 to 255"),
    evaluate("plot-of-raster", "--plot ROOT/second.tif", "--plot", "second.tif", ".png"),
    evaluate("classes-word", "--classes many", "--classes", "many", "number"),
    evaluate("image-without-plot", "--image ROOT/image.tif", "--image", "--plot"),
    evaluate("plot-below-a-file", "--plot ROOT/file/plot.png", "file", "is not a folder"),
    evaluate("plot-is-the-labels", "--plot ROOT/labels.tif", "labels.tif", "input"),
    evaluate("ignore-inside-classes", "--classes 5 --ignore-index 4", "ignore_index 4"),
    evaluate("format", "--format xml", "--format", "xml", "json"),
)


SCENES = (
    scene("size-of-nothing", "--size 0 64", "0 x 64"),
    scene("size-of-one", "--size 64", "--size", "2"),
    scene("bands", "--bands 2", "bands", "2"),
    scene("workers", "--workers 0", "workers", "0"),
    scene("seed", "--seed x", "--seed", "x"),
    scene("image-and-labels-alike", "--labels ROOT/scene.tif", "scene.tif", "two names"),
    scene("image-below-a-file", "--image ROOT/file/scene.tif", "file"),
    scene("labels-in-no-folder", "--labels ROOT/nowhere/scene.tif", "nowhere"),
    scene("image-is-a-folder", "--image ROOT/folder", "folder"),
    Case("nothing-given", "scene", "", ("--size", "--image", "--labels")),
)


STORES = (
    predict("times-that-are-not-given", "--image ROOT/{time}.tif", "--image ", "{time}.tif", "--times is empty"),
    tile("times-that-are-not-given", "--images ROOT/{time}.tif", "--images ", "{time}.tif", "--times is empty"),
    tile("missing-image", "--images ROOT/nowhere.tif", "--images", "nowhere.tif", "does not exist"),
    tile("glob-without-matches", "--images 'ROOT/*.jp2'", "--images", "*.jp2", "matches"),
    tile("same-image-twice", "--images ROOT/image.tif ROOT/image.tif", "image.tif", "twice"),
    tile("more-images-than-labels", "--images ROOT/image.tif ROOT/second.tif", "--images", "--labels", "2", "1"),
    tile("grid-word", "--grid fine", "grid", "fine", "auto"),
    tile("grid-too-fine", "--grid 25", "25", "48", "alignment of 2", "at most 24"),
    tile("halo-too-narrow", "--halo 1", "halo 1 is less than"),
    tile("bands-too-many", "--bands [1,9]", "asks for band 9"),
    tile("labels-of-other-size", "--labels ROOT/small-labels.tif", "differ in size"),
    tile("classes-of-rasters", "--classes 5", "--classes is given, but no labels are polygons"),
    tile("unknown-flag", "--colour red", "--colour", "--help"),
    tile("output-in-no-folder", "--output ROOT/nowhere/new.h5", "nowhere", "make it first"),
    tile("output-is-the-input", "--output ROOT/image.tif", "image.tif", "input", "another output"),
    tile("output-is-there", "--output ROOT/good.h5", "good.h5 is there", "remove it"),
    train("cut-store", "--data.images ROOT/cut.h5 --data.labels []", "cut.h5"),
    train("store-cut-by-a-byte", "--data.images ROOT/cut-end.h5 --data.labels []", "cut-end.h5", "truncated"),
    train("no-store", "--data.images ROOT/other.h5 --data.labels []", "other.h5", "no tile store", "tiledseg tile"),
    train("no-such-image-of-a-store", "--data.images ROOT/good.h5#7 --data.labels ROOT/labels.tif", "good.h5#7"),
    train("store-of-another-grid", "--data.images ROOT/good.h5 --data.labels [] --tiling.grid 3", "good.h5", "2", "3"),
    train("store-of-a-narrower-halo", "--data.images ROOT/good.h5 --data.labels [] --model.levels 3", "good.h5"),
    predict("store-of-another-grid", "--image ROOT/good.h5 --tiling.grid 3", "good.h5", "[2, 2]", "[3, 3]"),
    train("store-beside-a-lone-raster", "--data.images [ROOT/good.h5,ROOT/second.tif]", "2 rasters", "has 1"),
    train("store-of-other-bands", "--data.images ROOT/good.h5 --data.bands [1]", "good.h5", "[1]", "[1, 2, 3]"),
)

DOCTORS = (
    Case("unknown-flag", "doctor", "--colour red", ("--colour", "--help")),
    Case("format", "doctor", "--format xml", ("--format", "xml", "json")),
    Case("transport", "doctor", "--transport udp", ("udp", "gloo")),
)

_REFUSED = ("cannot open", "data.references", "--references")


INPUTS = (
    train("vrt-for-an-image", "--data.images ROOT/vrt.tif", "vrt.tif", *_REFUSED),
    train("vrt-for-a-mask", "--data.images ROOT/masked.tif", "masked.tif.msk", "masked.tif", "no TIFF", "references"),
    predict("vrt", "--image ROOT/vrt.tif", "vrt.tif", *_REFUSED),
    tile("raw-vrt", "--images ROOT/raw-vrt.tif", "raw-vrt.tif", *_REFUSED),
    evaluate("vrt", "--prediction ROOT/vrt.tif", "vrt.tif", *_REFUSED),
    train("fifo-for-an-image", "--data.images ROOT/fifo", "data.images", "fifo", "is a FIFO", "regular file"),
    train("fifo-for-labels", "--data.labels ROOT/fifo", "data.labels", "fifo", "is a FIFO", "regular file"),
    train("device-for-an-image", "--data.images /dev/zero", "/dev/zero", "is a character device", "regular file"),
    train("link-to-a-fifo", "--data.images ROOT/link-to-fifo.tif", "link-to-fifo.tif", "is a FIFO", "regular file"),
    train("fifo-in-a-store-s-name", "--data.images 'ROOT/fifo#0' --data.labels []", "fifo#0", "does not exist"),
    train("fifo-beside-an-image", "--data.images ROOT/piped.tif", "piped.tif.aux.xml", "is a FIFO", "regular file"),
    predict("fifo-for-an-image", "--image ROOT/fifo", "fifo", "is a FIFO", "regular file"),
    tile("fifo-for-labels", "--labels ROOT/fifo", "--labels", "fifo", "is a FIFO", "regular file"),
    evaluate("device-to-show", "--image /dev/zero --plot ROOT/plot.png", "/dev/zero", "is a character device"),
    train("transform-of-nan", "--data.images ROOT/nowhere-on-earth.tif", "nowhere-on-earth.tif", "transform", "nan"),
    predict("transform-of-nan", "--image ROOT/nowhere-on-earth.tif", "nowhere-on-earth.tif", "transform", "nan"),
)

_AS_STORE = "--data.labels [] --data.images"

EDITED_STORES = (
    train(
        "store-with-a-flipped-pixel", f"{_AS_STORE} ROOT/flipped.h5", "flipped.h5#0", "tried 4 times", "copy it again"
    ),
    train("store-with-flipped-labels", f"{_AS_STORE} ROOT/flipped-labels.h5", "flipped-labels.h5#0:labels", "copy it"),
    train("store-of-a-changed-grid", f"{_AS_STORE} ROOT/regridded.h5", "regridded.h5", "tiles of (4, ", "cut it again"),
    train("store-linked-to-another", f"{_AS_STORE} ROOT/linked.h5", "linked.h5", "links", "cut it again"),
    train("store-of-an-older-version", f"{_AS_STORE} ROOT/old.h5", "old.h5", "version 2", "remove it and cut it again"),
    predict("store-of-a-changed-grid", "--image ROOT/regridded.h5", "regridded.h5", "tiles of (4, ", "cut it again"),
    evaluate("store-of-an-older-version", "--labels ROOT/old.h5", "old.h5", "version 2", "cut it again"),
)

REPLACED_MAPS = (
    predict("output-is-the-store", "--image ROOT/good.h5 --output ROOT/good.h5", "good.h5", "is the input", "another"),
    predict("output-is-a-link-to-the-input", "--output ROOT/link.tif", "link.tif", "is the input", "image.tif"),
    predict(
        "output-is-of-the-checkpoint",
        "--output ROOT/run/checkpoints/step-000002/model.safetensors",
        *("model.safetensors", "is the input"),
    ),
    predict("output-is-of-the-run", "--output ROOT/run/metrics.jsonl", "metrics.jsonl", "is of the run", "another"),
    predict("output-is-a-mask", "--output ROOT/second.tif.MSK", "--output", "second.tif.MSK", "GDAL reads", ".msk"),
    predict("output-is-latest", "--output ROOT/run/checkpoints/latest", "latest", "is the input"),
    predict("input-at-the-temporary-name", "--image ROOT/.own.tif.part --output ROOT/own.tif", "is the input"),
    predict("input-beside-the-output", "--image ROOT/mask.tif.msk --output ROOT/mask.tif", "is the input"),
    predict("output-is-a-device", "--output /dev/null", "/dev/null", "character device"),
    predict("output-dangles", "--output ROOT/dangling", "dangling", "nowhere/file", "not there"),
    predict("output-ends-in-a-slash", "--output ROOT/nd/", "nd/", "names a folder", "file name"),
    predict("output-empty", "--output ''", "--output", "empty"),
    predict("probabilities-are-the-output-another-way", "--probabilities ROOT/folder/../map.tif", "--probabilities"),
    predict("style-is-a-fifo", "--output ROOT/styled.tif", "styled.qml", "is a FIFO"),
    predict("polygons-of-another-kind", "--polygons ROOT/new.shp", "--polygons", "new.shp", ".gpkg"),
    predict("polygons-are-no-database", "--polygons ROOT/text.gpkg", "text.gpkg", "no GeoPackage", "choose another"),
    predict("polygons-beside-a-layer", "--polygons ROOT/parcels.gpkg", "parcels.gpkg", "layer mine", "lost"),
    predict("images-into-a-file", "--image ROOT/image.tif ROOT/second.tif", "map.tif", "2 rasters", "give a folder"),
    predict("images-into-no-folder", "--image ROOT/image.tif ROOT/second.tif --output ROOT/nd/", "give a folder"),
    predict("images-of-one-name", "--image ROOT/image.tif ROOT/image.png --output ROOT/folder", "two calls"),
    predict("image-twice", "--image ROOT/image.tif ROOT/image.tif --output ROOT/folder", "image.tif", "twice"),
    predict("area-of-another-kind", "--area ROOT/image.tif", "--area", "image.tif", ".gpkg"),
    predict("area-elsewhere", "--area ROOT/parcels.gpkg", "parcels.gpkg", "no polygon", "image.tif"),
)

REPLACED_OTHERS = (
    evaluate("plot-is-a-fifo", "--plot ROOT/fifo", "--plot", "is a FIFO"),
    evaluate("plot-ends-in-a-slash", "--plot ROOT/nd/", "nd/", "names a folder"),
    evaluate("plot-is-a-link", "--image ROOT/image.tif --plot ROOT/link.tif", "is the input"),
    plan("plot-is-a-fifo", "--plot ROOT/pipe.png", "pipe.png", "is a FIFO"),
    plan("plot-is-a-folder", "--plot ROOT/folder.png", "folder.png", "is a folder"),
    scene("image-and-labels-one-file", "--labels ROOT/folder/../scene.tif", "--image", "two names"),
    scene("image-is-a-device", "--image /dev/null", "/dev/null", "character device"),
    tile("output-is-the-config", "--config ROOT/good.yaml --output ROOT/good.yaml", "good.yaml"),
    tile("output-is-a-fifo", "--output ROOT/fifo", "fifo", "is a FIFO"),
    tile("output-ends-in-a-slash", "--output ROOT/nd/", "nd/", "names a folder"),
    tile("input-at-the-partial-name", "--images ROOT/.own.h5.part --output ROOT/own.h5", "own.h5"),
)

REPLACED_FOLDERS = (
    train("events-are-a-file", "--run.output ROOT/taken/events", "events", "is a file", "another run.output"),
    train("checkpoints-are-a-file", "--run.output ROOT/taken/checkpoints", "checkpoints", "is a file"),
    train("metrics-are-a-fifo", "--run.output ROOT/taken/metrics", "metrics.jsonl", "is a FIFO"),
    train("output-dangles", "--run.output ROOT/dangling", "run.output", "dangling"),
    train(
        "image-is-a-file-of-the-run",
        "--run.output ROOT/taken/image --data.images ROOT/taken/image/progress.png",
        *("progress.png", "is the input"),
    ),
    train(
        "image-among-the-checkpoints",
        "--run.output ROOT/taken/inside --data.images ROOT/taken/inside/checkpoints/image.tif",
        *("image.tif", "checkpoints", "move it away"),
    ),
    train("config-is-not-the-run's", "--run.output ROOT/taken/noted", "config.yaml", "not written by a run", "move it"),
    train("config-is-the-input", "--config ROOT/taken/noted/config.yaml --run.output ROOT/taken/noted", "is the input"),
)

EXPORTS = (
    export("nothing-given", "", "--output"),
    export("other-format", "--output ROOT/net.tflite", "net.tflite", ".onnx, .pt2, .json"),
    export("two-of-a-kind", "--output ROOT/a.onnx ROOT/b.onnx", "a.onnx", "b.onnx", "one kind"),
    export("missing-checkpoint", "--output ROOT/model.json --checkpoint ROOT/none", "none", "no checkpoint"),
    export("tile-of-no-alignment", "--output ROOT/new.pt2 --tile 7", "--tile is 7", "multiple of 2"),
    export("tile-within-the-halo", "--output ROOT/new.pt2 --tile 2", "--tile is 2", "halo"),
    export("tolerance-of-nothing", "--output ROOT/new.json --tolerance 1e-3", "--tolerance is 0.001", "no .onnx or"),
    export("resolution-of-another", "--output ROOT/new.pt2 --resolution 50", "--resolution is 50", "no .onnx"),
    export("build-of-ours", "--output ROOT/new.pt2 --build a.b:c", "--build is a.b:c", "leave it out"),
    export("output-is-of-the-checkpoint", "--output ROOT/link.json", "link.json", "is the input"),
    export("best-of-none", "--output ROOT/net2.pt2 --which best", "best"),
)

CASES = (
    *SETTINGS,
    *(
        *RASTERS,
        *ITEMS,
        *INPUTS,
        *EDITED_STORES,
        *OUTPUTS,
        *RESUMES,
        *DAMAGES,
        *MAPS,
        *SCORES,
        *SCENES,
        *STORES,
    ),
    *(*REPLACED_MAPS, *REPLACED_OTHERS, *REPLACED_FOLDERS, *DOCTORS, *EXPORTS),
)
