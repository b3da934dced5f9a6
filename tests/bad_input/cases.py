"""The table of broken inputs."""

from __future__ import annotations

from tests.bad_input.case import Case, evaluate, export, plan, predict, resume, scene, tile, train
from tests.bad_input.setting_cases import SETTINGS

RASTERS = (
    train("missing-image", "--data.images ROOT/nowhere.tif", "data.images", "nowhere.tif", "does not exist"),
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
    train("float-labels", "--data.labels ROOT/float-labels.tif", "float-labels.tif", "float32", "whole numbers"),
    train("cut-in-the-middle", "--data.images ROOT/cut-half.tif", "cut-half.tif", "truncated"),
    train("damaged-block", "--data.images ROOT/damaged.tif", "damaged.tif", "rows", "columns", "copy it again"),
    train("text-file", "--data.images ROOT/text.tif", "text.tif", "GDAL"),
    train("labels-of-other-crs", "--data.labels ROOT/other-crs-labels.tif", "CRS", "32611", "32612"),
    train("label-outside", "--data.labels ROOT/outside-labels.tif", "outside-labels.tif", "value 9", "row 5, col 7"),
    train("no-label-counts", "--data.labels ROOT/void-labels.tif", "no pixel of data.labels is of a class", "255"),
    train("no-valid-pixel", "--data.images ROOT/blank.tif", "no valid pixel", "data.nodata"),
)

RESUMES = (
    resume("missing", "--train.resume ROOT/nowhere", "nowhere", "no checkpoint"),
    resume("from-a-file", "--train.resume ROOT/file", "file", "checkpoint"),
    resume("of-other-levels", "--model.levels 3", "levels is 2", "3"),
    resume("of-other-labels", "--data.labels ROOT/second-labels.tif", "data.labels", "second-labels.tif"),
    resume("with-latest-a-folder", "--run.output ROOT/broken/latest-folder", "checkpoints/latest", "it is a folder"),
    resume(
        "into-another-order",
        "--train.resume ROOT/run/checkpoints/step-000001 --train.seed 5 --run.output ROOT/out",
        *("step-000001", "seed is 0", "5"),
    ),
    resume("never-in-a-used-folder", "--train.resume never", "run", "never"),
    resume("older-than-the-newest", "--train.resume ROOT/run/checkpoints/step-000001", "step-000001", "step-000002"),
    resume("all-damaged", "--run.output ROOT/broken/flipped", "model.safetensors", "checksum", "another run.output"),
)

DAMAGES = (
    predict("checkpoint-flipped", "--checkpoint ROOT/broken/flipped", "damaged", "model.safetensors", "checksum"),
    predict("checkpoint-of-a-later-format", "--checkpoint ROOT/broken/format-99", "99", "1"),
)

MAPS = (
    predict("missing-checkpoint", "--checkpoint ROOT/nowhere", "nowhere", "no checkpoint"),
    predict("image-of-other-bands", "--image ROOT/two-bands.tif", "two-bands.tif", "2 bands", "3"),
    predict("means-no-list", "--mean '{\"100\": 1}'", "--mean", '{"100": 1}'),
    predict("means-one-number", "--mean 5", "--mean: invalid", "5"),
    predict("unknown-flag", "--colour red", "--colour", "--help"),
    predict("output-of-another-format", "--output ROOT/m.JP2", "--output is '", "ends in .tif"),
    predict("compressed-gtiff", "--format gtiff --compress zstd", "--compress is zstd", "use --format cog"),
    predict("polygons-of-no-class", "--polygons ROOT/new.gpkg --polygons-classes road", "has 'road'; give names"),
    predict("polygons-classes-alone", "--polygons-classes 0", "polygons-classes is 0, but --polygons is not given"),
    predict("output-is-the-input", "--output ROOT/image.tif", "image.tif", "input"),
    predict("probabilities-are-the-input", "--probabilities ROOT/image.tif", "image.tif", "input"),
    predict("damaged-block", "--image ROOT/damaged.tif", "damaged.tif", "rows", "columns", "copy it again"),
    Case("nothing-given", "predict", "", ("--image", "--output")),
)


SCORES = (
    evaluate("missing-prediction", "--prediction ROOT/nowhere.tif", "nowhere.tif", "does not exist"),
    evaluate("map-of-other-size", "--prediction ROOT/small-labels.tif", "small-labels.tif", "48 x 48", "47 x 48"),
    evaluate("prediction-outside", "--prediction ROOT/outside-labels.tif --classes 3", "9"),
    evaluate("image-without-plot", "--image ROOT/image.tif", "--image", "--plot"),
    evaluate("ignore-inside-classes", "--classes 5 --ignore-index 4", "ignore_index 4"),
)


SCENES = (
    scene("size-of-nothing", "--size 0 64", "0 x 64"),
    scene("bands", "--bands 2", "bands", "2"),
    scene("seed", "--seed -1", "seed -1", "0 to"),
    Case("nothing-given", "scene", "", ("--size", "--image", "--labels")),
)


STORES = (
    predict("times-that-are-not-given", "--image ROOT/{time}.tif", "--image ", "{time}.tif", "--times is empty"),
    tile("missing-image", "--images ROOT/nowhere.tif", "--images", "nowhere.tif", "does not exist"),
    tile("classes-of-rasters", "--classes 5", "--classes is given, but no labels are polygons"),
    tile("output-is-the-input", "--output ROOT/image.tif", "image.tif", "input", "another output"),
    tile("output-is-there", "--output ROOT/good.h5", "good.h5 is there", "remove it"),
    train("store-of-another-grid", "--data.images ROOT/good.h5 --data.labels [] --tiling.grid 3", "good.h5", "2", "3"),
    train("store-beside-a-lone-raster", "--data.images [ROOT/good.h5,ROOT/second.tif]", "2 rasters", "has 1"),
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
    train("fifo-beside-an-image", "--data.images ROOT/piped.tif", "piped.tif.aux.xml", "is a FIFO", "regular file"),
)

_AS_STORE = "--data.labels [] --data.images"

EDITED_STORES = (
    train(
        "store-with-a-flipped-pixel", f"{_AS_STORE} ROOT/flipped.h5", "flipped.h5#0", "tried 4 times", "copy it again"
    ),
    train("store-of-an-older-version", f"{_AS_STORE} ROOT/old.h5", "old.h5", "version 2", "remove it and cut it again"),
    evaluate("store-of-an-older-version", "--labels ROOT/old.h5", "old.h5", "version 2", "cut it again"),
)

REPLACED_MAPS = (
    predict("output-is-the-store", "--image ROOT/good.h5 --output ROOT/good.h5", "good.h5", "is the input", "another"),
    predict(
        "output-is-of-the-checkpoint",
        "--output ROOT/run/checkpoints/step-000002/model.safetensors",
        *("model.safetensors", "is the input"),
    ),
    predict("output-is-of-the-run", "--output ROOT/run/metrics.jsonl", "metrics.jsonl", "is of the run", "another"),
    predict("output-is-a-mask", "--output ROOT/second.tif.MSK", "--output", "second.tif.MSK", "GDAL reads", ".msk"),
    predict("input-beside-the-output", "--image ROOT/mask.tif.msk --output ROOT/mask.tif", "is the input"),
    predict("style-is-a-fifo", "--output ROOT/styled.tif", "styled.qml", "is a FIFO"),
    predict("polygons-of-another-kind", "--polygons ROOT/new.shp", "--polygons", "new.shp", ".gpkg"),
    predict("images-into-a-file", "--image ROOT/image.tif ROOT/second.tif", "map.tif", "2 rasters", "give a folder"),
    predict("images-of-one-name", "--image ROOT/image.tif ROOT/image.png --output ROOT/folder", "two calls"),
    predict("area-elsewhere", "--area ROOT/parcels.gpkg", "parcels.gpkg", "no polygon", "image.tif"),
)

REPLACED_OTHERS = (
    evaluate("plot-is-a-link", "--image ROOT/image.tif --plot ROOT/link.tif", "is the input"),
    plan("plot-is-a-fifo", "--plot ROOT/pipe.png", "pipe.png", "is a FIFO"),
    scene("image-and-labels-one-file", "--labels ROOT/folder/../scene.tif", "--image", "two names"),
    tile("output-is-the-config", "--config ROOT/good.yaml --output ROOT/good.yaml", "good.yaml"),
)

REPLACED_FOLDERS = (
    train("events-are-a-file", "--run.output ROOT/taken/events", "events", "is a file", "another run.output"),
    train("metrics-are-a-fifo", "--run.output ROOT/taken/metrics", "metrics.jsonl", "is a FIFO"),
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
    export("tile-of-no-alignment", "--output ROOT/new.pt2 --tile 7", "--tile is 7", "multiple of 2"),
    export("tile-within-the-halo", "--output ROOT/new.pt2 --tile 2", "--tile is 2", "halo"),
    export("resolution-of-another", "--output ROOT/new.pt2 --resolution 50", "--resolution is 50", "no .onnx"),
    export("build-of-ours", "--output ROOT/new.pt2 --build a.b:c", "--build is a.b:c", "leave it out"),
    export("output-is-of-the-checkpoint", "--output ROOT/link.json", "link.json", "is the input"),
)

CASES = (*SETTINGS, *RASTERS, *INPUTS, *EDITED_STORES, *RESUMES, *DAMAGES, *MAPS, *SCORES, *SCENES)
CASES += (*STORES, *REPLACED_MAPS, *REPLACED_OTHERS, *REPLACED_FOLDERS, *DOCTORS, *EXPORTS)
