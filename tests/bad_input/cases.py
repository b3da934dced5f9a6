"""The table of broken inputs."""

from __future__ import annotations

from dataclasses import replace

from tests.bad_input.case import Case, predict, resume, train
from tests.bad_input.config_cases import FLAGS, VALUES
from tests.bad_input.input_cases import INPUTS
from tests.bad_input.materials import RESEALED
from tests.bad_input.output_cases import CASES as OUTPUT_CASES
from tests.bad_input.parallel_cases import BLOCKS, HALO_MODES, PIPELINES
from tests.bad_input.size_cases import SIZES

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
    train(
        "labels-of-three-bands",
        "--data.labels ROOT/three-band-labels.tif",
        "three-band-labels.tif",
        "bands",
        "3",
        "1 band",
    ),
    train("label-outside", "--data.labels ROOT/outside-labels.tif", "outside-labels.tif", "value 9", "row 5, col 7"),
    train("colours-without-colours", f"--data.classes '{COLOURS}'", "labels.tif", "colour"),
    train("no-label-counts", "--data.labels ROOT/void-labels.tif", "no pixel of data.labels is of a class", "255"),
    train("no-valid-pixel", "--data.images ROOT/blank.tif", "no valid pixel", "data.nodata"),
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
    resume(
        "of-other-labels", "--data.labels ROOT/second-labels.tif", "data.labels", "/labels.tif", "second-labels.tif"
    ),
    resume("with-latest-a-folder", "--run.output ROOT/broken/latest-folder", "checkpoints/latest", "it is a folder"),
    resume("of-another-optimizer", "--optimizer.name sgd", "optimizer.name", "adamw", "sgd"),
    resume(
        "into-another-order",
        "--train.resume ROOT/run/checkpoints/step-000001 --train.seed 5 --run.output ROOT/out",
        *("step-000001", "seed is 0", "5"),
    ),
    resume("never-in-a-used-folder", "--train.resume never", "run", "never"),
    resume("older-than-the-newest", "--train.resume ROOT/run/checkpoints/step-000001", "step-000001", "step-000002"),
    resume(
        "all-damaged",
        "--run.output ROOT/broken/flipped",
        "flipped",
        "model.safetensors",
        "checksum",
        "another run.output",
    ),
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


def _evaluate(name: str, typed: str, *words: str) -> Case:
    """A good score, but for `typed`."""
    return Case(name, "evaluate", f"--prediction ROOT/second-labels.tif --labels ROOT/labels.tif {typed}", words)


SCORES = (
    _evaluate("missing-prediction", "--prediction ROOT/nowhere.tif", "nowhere.tif", "does not exist"),
    _evaluate("text-for-a-map", "--prediction ROOT/text.tif", "text.tif", "GDAL"),
    _evaluate("map-of-other-size", "--prediction ROOT/small-labels.tif", "small-labels.tif", "48 x 48", "47 x 48"),
    _evaluate("map-of-other-crs", "--prediction ROOT/other-crs-labels.tif", "CRS", "32611", "32612"),
    _evaluate("label-outside", "--labels ROOT/outside-labels.tif --classes 3", "outside-labels.tif", "value 9"),
    _evaluate("prediction-outside", "--prediction ROOT/outside-labels.tif --classes 3", "9"),
    _evaluate("ignore-beyond", "--ignore-index 300", "--ignore-index is 300", "0 to 255"),
    _evaluate("plot-of-raster", "--plot ROOT/second.tif", "--plot", "second.tif", ".png"),
    _evaluate("classes-word", "--classes many", "--classes", "many", "number"),
    _evaluate("image-without-plot", "--image ROOT/image.tif", "--image", "--plot"),
    _evaluate("plot-below-a-file", "--plot ROOT/file/plot.png", "file", "is not a folder"),
    _evaluate("plot-is-the-labels", "--plot ROOT/labels.tif", "labels.tif", "input"),
    _evaluate("format", "--format xml", "--format", "xml", "json"),
)


def _plan(name: str, typed: str, *words: str) -> Case:
    """A good plan, but for `typed`."""
    return Case(name, "plan", f"--size 1000 {typed}", words)


PLANS = (
    Case("no-size", "plan", "--grid 8", ("--size", "--help")),
    _plan("grid-word", "--grid fine", "--grid", "fine", "auto"),
    _plan("grid-too-fine", "--grid 64", "64", "1000", "alignment of 16", "at most 63"),
    _plan("auto-without-memory", "--grid auto", "--grid", "auto", "--gpu-memory"),
    _plan("memory-too-small", "--grid auto --gpu-memory 1MiB", "bytes", "smaller network"),
    _plan("preset-contradicted", "--model small --levels 3", "--levels", "3", "small", "6"),
    _plan("plot-of-another-kind", "--plot ROOT/plan.txt", "plan.txt", ".png"),
    _plan("format", "--format xml", "--format", "xml", "json"),
)


def _scene(name: str, typed: str, *words: str) -> Case:
    """A good scene, but for `typed`."""
    return Case(name, "scene", f"--size 64 64 --image ROOT/scene.tif --labels ROOT/scene-labels.tif {typed}", words)


SCENES = (
    _scene("size-of-nothing", "--size 0 64", "0 x 64"),
    _scene("size-of-one", "--size 64", "--size", "2"),
    _scene("bands", "--bands 2", "bands", "2"),
    _scene("workers", "--workers 0", "workers", "0"),
    _scene("seed", "--seed x", "--seed", "x"),
    _scene("image-and-labels-alike", "--labels ROOT/scene.tif", "scene.tif", "two names"),
    _scene("image-below-a-file", "--image ROOT/file/scene.tif", "file"),
    _scene("labels-in-no-folder", "--labels ROOT/nowhere/scene.tif", "nowhere"),
    _scene("image-is-a-folder", "--image ROOT/folder", "folder"),
    Case("nothing-given", "scene", "", ("--size", "--image", "--labels")),
)


def _tile(name: str, typed: str, *words: str) -> Case:
    """A good store, but for `typed`."""
    good = "--images ROOT/image.tif --labels ROOT/labels.tif --grid 2 --levels 2 --output ROOT/new.h5"
    return Case(name, "tile", f"{good} {typed}", words)


STORES = (
    _tile("missing-image", "--images ROOT/nowhere.tif", "--images", "nowhere.tif", "does not exist"),
    _tile("glob-without-matches", "--images 'ROOT/*.jp2'", "--images", "*.jp2", "matches"),
    _tile("same-image-twice", "--images ROOT/image.tif ROOT/image.tif", "image.tif", "twice"),
    _tile("more-images-than-labels", "--images ROOT/image.tif ROOT/second.tif", "--images", "--labels", "2", "1"),
    _tile("grid-word", "--grid fine", "grid", "fine", "auto"),
    _tile("grid-too-fine", "--grid 25", "25", "48", "alignment of 2", "at most 24"),
    _tile("unknown-flag", "--colour red", "--colour", "--help"),
    _tile("output-in-no-folder", "--output ROOT/nowhere/new.h5", "nowhere", "make it first"),
    _tile("output-is-the-input", "--output ROOT/image.tif", "image.tif", "input", "another output"),
    _tile("output-is-another-store", "--output ROOT/good.h5 --grid 3", "good.h5", "2", "3"),
    train("cut-store", "--data.images ROOT/cut.h5 --data.labels []", "cut.h5"),
    train("store-cut-by-a-byte", "--data.images ROOT/cut-end.h5 --data.labels []", "cut-end.h5", "truncated"),
    train("no-store", "--data.images ROOT/other.h5 --data.labels []", "other.h5", "no tile store", "tiledseg tile"),
    train("no-such-image-of-a-store", "--data.images ROOT/good.h5#7 --data.labels ROOT/labels.tif", "good.h5#7"),
    train("store-of-another-grid", "--data.images ROOT/good.h5 --data.labels [] --tiling.grid 3", "good.h5", "2", "3"),
    train(
        "store-of-a-narrower-halo", "--data.images ROOT/good.h5 --data.labels [] --model.levels 3", "halo", "good.h5"
    ),
    predict("store-of-another-grid", "--image ROOT/good.h5 --tiling.grid 3", "good.h5", "[2, 2]", "[3, 3]"),
    train("store-beside-a-lone-raster", "--data.images [ROOT/good.h5,ROOT/second.tif]", "2 rasters", "has 1"),
    train("store-of-other-bands", "--data.images ROOT/good.h5 --data.bands [1]", "good.h5", "[1]", "[1, 2, 3]"),
)

DOCTORS = (
    Case("unknown-flag", "doctor", "--colour red", ("--colour", "--help")),
    Case("format", "doctor", "--format xml", ("--format", "xml", "json")),
    Case("transport", "doctor", "--transport udp", ("udp", "gloo")),
)

CASES = (
    *FLAGS,
    *HALO_MODES,
    *PIPELINES,
    *BLOCKS,
    *VALUES,
    *RASTERS,
    *INPUTS,
    *OUTPUTS,
    *OUTPUT_CASES,
    *RESUMES,
    *DAMAGES,
    *MAPS,
    *SCORES,
    *PLANS,
    *SCENES,
    *STORES,
    *DOCTORS,
    *SIZES,
)
