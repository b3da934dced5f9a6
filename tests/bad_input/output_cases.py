"""Outputs that would replace something, or that are no files."""

from __future__ import annotations

from tests.bad_input.case import Case, predict, train

_SCENE = "--size 64 64 --image ROOT/scene.tif --labels ROOT/scene-labels.tif"
_TILE = "--images ROOT/image.tif --labels ROOT/labels.tif --grid 2 --levels 2"
_SCORE = "--prediction ROOT/second-labels.tif --labels ROOT/labels.tif"

MAPS = (
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
    predict(
        "input-at-the-temporary-name",
        "--image ROOT/.own.tif.part --output ROOT/own.tif",
        *("own.tif", ".own.tif.part", "is the input"),
    ),
    predict(
        "input-beside-the-output",
        "--image ROOT/mask.tif.msk --output ROOT/mask.tif",
        *("mask.tif.msk", "is the input"),
    ),
    predict("output-is-a-device", "--output /dev/null", "/dev/null", "character device"),
    predict("output-dangles", "--output ROOT/dangling", "dangling", "nowhere/file", "not there"),
    predict("output-ends-in-a-slash", "--output ROOT/nd/", "nd/", "names a folder", "file name"),
    predict("output-empty", "--output ''", "--output", "empty"),
    predict(
        "probabilities-are-the-output-another-way",
        "--probabilities ROOT/folder/../map.tif",
        *("--probabilities", "--output", "one file", "two names"),
    ),
    predict("style-is-a-fifo", "--output ROOT/styled.tif", "styled.qml", "is a FIFO"),
    predict("polygons-of-another-kind", "--polygons ROOT/new.shp", "--polygons", "new.shp", ".gpkg"),
    predict("polygons-are-no-database", "--polygons ROOT/text.gpkg", "text.gpkg", "no GeoPackage", "choose another"),
    predict("polygons-beside-a-layer", "--polygons ROOT/parcels.gpkg", "parcels.gpkg", "layer mine", "lost"),
    predict("type-alone", "--probability-type uint8", "--probability-type", "--probabilities"),
    predict("images-into-a-file", "--image ROOT/image.tif ROOT/second.tif", "map.tif", "2 rasters", "give a folder"),
    predict(
        "images-into-no-folder", "--image ROOT/image.tif ROOT/second.tif --output ROOT/nd/", "nd/", "give a folder"
    ),
    predict(
        "images-of-one-name",
        "--image ROOT/image.tif ROOT/image.png --output ROOT/folder",
        *("image.tif", "image.png", "one file", "two calls"),
    ),
    predict("image-twice", "--image ROOT/image.tif ROOT/image.tif --output ROOT/folder", "image.tif", "twice"),
    predict("area-of-another-kind", "--area ROOT/image.tif", "--area", "image.tif", ".gpkg"),
    predict("area-elsewhere", "--area ROOT/parcels.gpkg", "parcels.gpkg", "no polygon", "image.tif"),
    predict("least-area-alone", "--polygons-minimum-area 5", "--polygons-minimum-area", "--polygons"),
)

OTHERS = (
    Case("plot-is-a-fifo", "evaluate", f"{_SCORE} --plot ROOT/fifo", ("--plot", "is a FIFO")),
    Case("plot-ends-in-a-slash", "evaluate", f"{_SCORE} --plot ROOT/nd/", ("nd/", "names a folder")),
    Case("plot-is-a-link", "evaluate", f"{_SCORE} --image ROOT/image.tif --plot ROOT/link.tif", ("is the input",)),
    Case("plot-is-a-fifo", "plan", "--size 1000 --plot ROOT/pipe.png", ("pipe.png", "is a FIFO")),
    Case("plot-is-a-folder", "plan", "--size 1000 --plot ROOT/folder.png", ("folder.png", "is a folder")),
    Case(
        "image-and-labels-one-file",
        "scene",
        f"{_SCENE} --labels ROOT/folder/../scene.tif",
        ("--image", "--labels", "one file", "two names"),
    ),
    Case("image-is-a-device", "scene", f"{_SCENE} --image /dev/null", ("/dev/null", "character device")),
    Case(
        "output-is-the-config",
        "tile",
        f"{_TILE} --config ROOT/good.yaml --output ROOT/good.yaml",
        ("good.yaml", "input"),
    ),
    Case("output-is-a-fifo", "tile", f"{_TILE} --output ROOT/fifo", ("fifo", "is a FIFO")),
    Case("output-ends-in-a-slash", "tile", f"{_TILE} --output ROOT/nd/", ("nd/", "names a folder")),
    Case(
        "input-at-the-partial-name",
        "tile",
        f"{_TILE} --images ROOT/.own.h5.part --output ROOT/own.h5",
        ("own.h5", ".own.h5.part", "is the input"),
    ),
)

FOLDERS = (
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
    train(
        "config-is-the-input",
        "--config ROOT/taken/noted/config.yaml --run.output ROOT/taken/noted",
        *("config.yaml", "is the input"),
    ),
)

CASES = (*MAPS, *OTHERS, *FOLDERS)
