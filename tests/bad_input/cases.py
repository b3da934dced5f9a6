"""The table of broken inputs: what is typed, and the words without which its error would not help."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One broken input of one command. `typed` is what follows the command, with ROOT for the folder of materials."""

    name: str
    command: str
    typed: str
    words: tuple[str, ...]
    by_one_rank: bool = False
    """Only the rank that reads the damaged place can know of it; a launcher then ends the others."""
    least_ranks: int = 1
    """A job of fewer is refused for that already."""

    def arguments(self, root: Path) -> list[str]:
        return [word.replace("ROOT", str(root)) for word in shlex.split(self.typed)]

    def __str__(self) -> str:
        return f"{self.command}-{self.name}"


def _train(name: str, typed: str, *words: str) -> Case:
    """A good run, but for `typed`, into a folder that is not there."""
    return Case(name, "train", f"--config ROOT/good.yaml --run.output ROOT/out {typed}", words)


def _resume(name: str, typed: str, *words: str) -> Case:
    """The good run again, in the folder that it has left."""
    return Case(f"resume-{name}", "train", f"--config ROOT/good.yaml {typed}", words)


def _predict(name: str, typed: str, *words: str) -> Case:
    """A good map, but for `typed`: the last of an option counts."""
    good = "--checkpoint ROOT/run --image ROOT/image.tif --output ROOT/map.tif --tiling.grid 2 --verbosity 0"
    return Case(name, "predict", f"{good} {typed}", words)


FLAGS = (
    _train("unknown-flag", "--data.colour 3", "data.colour", "--help"),
    _train("unknown-group-flag", "--optimiser.lr 1", "optimiser.lr", "--help"),
    _train("flag-without-value", "--train.epochs", "train.epochs", "--help"),
    _train("wrong-type", "--model.levels many", "model.levels", "many", "whole number"),
    _train("fraction-for-a-number", "--train.epochs 1.5", "train.epochs", "1.5", "whole number"),
    _train("wrong-truth", "--parallel.exact perhaps", "parallel.exact", "perhaps", "true or false"),
    _train("word-for-a-list", "--data.bands red", "data.bands", "red", "[a,b]"),
    _train("missing-config", "--config ROOT/nowhere.yaml", "nowhere.yaml", "give a YAML file"),
    _train("config-is-a-folder", "--config ROOT/folder", "folder", "give a YAML file"),
    _train("unknown-key", "--config ROOT/unknown-key.yaml", "unknown-key.yaml", "data.imagse", "val_images"),
    _train("unknown-group", "--config ROOT/unknown-group.yaml", "unknown-group.yaml", "optimiser", "optimizer"),
    _train("wrong-type-in-file", "--config ROOT/wrong-type.yaml", "train.epochs", "[1, 2]", "whole number"),
    _train("malformed-yaml", "--config ROOT/malformed.yaml", "malformed.yaml, line 3, column 9", "mend"),
    _train("tab-in-yaml", "--config ROOT/tabs.yaml", "tabs.yaml, line 2", "mend"),
    _train("yaml-is-a-list", "--config ROOT/list.yaml", "list.yaml", "list", "data, tiling"),
    _train("yaml-is-binary", "--config ROOT/binary.yaml", "binary.yaml", "not text"),
    _train("yaml-without-keys", "--config ROOT/hollow.yaml", "hollow.yaml", "train holds nothing"),
    _train("yaml-is-empty", "--config ROOT/empty.yaml", "empty.yaml", "nothing"),
)

_LAYER = "--train.tiles_per_step null --parallel.halo layer"
_EXCHANGE = "--train.tiles_per_step null --parallel.halo exchange"

HALO_MODES = (
    _train("mode", "--parallel.halo telepathy", "parallel.halo", "telepathy", "read, exchange, layer"),
    _train("mode-with-a-batch-of-tiles", "--parallel.halo layer", "tiles_per_step", "2", "layer", "images_per_step"),
    _train("mesh-without-a-mode", "--parallel.mesh [2,1]", "parallel.mesh", "[2, 1]", "read", "exchange or layer"),
    _train("mesh-word", f"{_LAYER} --parallel.mesh wide", "parallel.mesh", "wide", "[R, C]"),
    _train("mesh-of-three", f"{_LAYER} --parallel.mesh [1,1,1]", "parallel.mesh", "[1, 1, 1]", "[R, C]"),
    _train("mesh-of-none", f"{_LAYER} --parallel.mesh [0,1]", "parallel.mesh", "[0, 1]", "[R, C]"),
    _train("mesh-of-more-ranks-than-the-job", f"{_EXCHANGE} --parallel.mesh [9,9]", "[9, 9]", "81", "start more ranks"),
    _train("mesh-finer-than-the-grid", f"{_LAYER} --parallel.mesh [3,1]", "parallel.mesh", "3", "mesh"),
    _train("fusion-without-a-mode", "--parallel.fusion 2", "parallel.fusion", "2", "read", "layer"),
    _train("fusion-in-exchange", f"{_EXCHANGE} --parallel.fusion 2", "parallel.fusion", "2", "exchange", "layer"),
    _train("fusion-of-none", f"{_LAYER} --parallel.fusion 0", "parallel.fusion", "0", "auto", "from 1"),
    _train("fusion-word", f"{_LAYER} --parallel.fusion all", "parallel.fusion", "all", "auto"),
    _train("overlap-without-a-mode", "--parallel.overlap true", "parallel.overlap", "read", "layer"),
    _train("images-of-none", f"{_LAYER} --train.images_per_step 0", "train.images_per_step", "0", "at least 1"),
    _train("more-images-than-there-are", f"{_LAYER} --train.images_per_step 2", "images_per_step", "2", "at most"),
    _train("two-batches", "--train.images_per_step 2", "tiles_per_step", "images_per_step", "give one"),
    _train("norm-that-exchange-changes", f"{_EXCHANGE} --model.norm group", "model.norm", "group", "halo layer"),
    _predict("mode", "--parallel.halo telepathy", "parallel.halo", "telepathy", "read, exchange, layer"),
    _predict("mesh-word", "--parallel.halo layer --parallel.mesh wide", "parallel.mesh", "wide", "[R, C]"),
    _predict("mesh-without-a-mode", "--parallel.mesh [1,1]", "parallel.mesh", "[1, 1]", "exchange or layer"),
    _predict("mesh-of-more-ranks-than-the-job", "--parallel.halo layer --parallel.mesh [9,9]", "[9, 9]", "81"),
    _predict("fusion-word", "--parallel.halo layer --parallel.fusion all", "parallel.fusion", "all", "auto"),
    _predict("overlap-without-a-mode", "--parallel.overlap true", "parallel.overlap", "read", "layer"),
)

_PIPELINES = "--parallel.stages 3"  # the good network has 17 layers

PIPELINES = (
    _train("no-stages", "--parallel.stages 0", "parallel.stages", "0", "at least 1"),
    _train("more-stages-than-ranks", "--parallel.stages 9", "parallel.stages", "9", "ranks", "start 9"),
    _train(
        "schedule", f"{_PIPELINES} --parallel.schedule zigzag", "parallel.schedule", "zigzag", "1f1b, gpipe, folded"
    ),
    _train(
        "schedule-without-stages", "--parallel.schedule gpipe", "parallel.schedule", "gpipe", "parallel.stages is 1"
    ),
    _train("balance-without-stages", "--parallel.balance [6,7]", "parallel.balance", "[6, 7]", "parallel.stages is 1"),
    _train("recompute-without-stages", "--parallel.recompute always", "parallel.recompute", "always", "stages is 1"),
    _train("micro-batches-without-stages", "--parallel.micro_batches 2", "parallel.micro_batches", "2", "stages is 1"),
    _train("balance-word", f"{_PIPELINES} --parallel.balance even", "parallel.balance", "even", "auto", "[14,24,30"),
    _train("balance-of-none", f"{_PIPELINES} --parallel.balance [0,6,7]", "parallel.balance", "[0, 6, 7]", "auto"),
    _train("balance-of-two", f"{_PIPELINES} --parallel.balance [6,7]", "parallel.balance", "2 parts", "3", "auto"),
    _train("balance-not-folded", f"{_PIPELINES} --parallel.schedule folded --parallel.balance [4,4,5]", "3 parts", "5"),
    _train("recompute-word", f"{_PIPELINES} --parallel.recompute often", "parallel.recompute", "often", "except_last"),
    _train("recompute-of-two", f"{_PIPELINES} --parallel.recompute [always,never]", "2 parts", "3", "one word for all"),
    _train("no-micro-batches", f"{_PIPELINES} --parallel.micro_batches 0", "parallel.micro_batches", "0", "at least 1"),
    _train("mesh-times-stages", f"{_EXCHANGE} --parallel.mesh [2,1] {_PIPELINES}", "stages", "3", "ranks"),
    replace(
        _train("balance-that-does-not-sum", f"{_PIPELINES} --parallel.balance [4,4,4]", "[4,4,4]", "12", "17"),
        least_ranks=3,
    ),
    replace(
        _train(
            "skip-torn-from-its-rank",
            f"{_PIPELINES} --parallel.schedule folded --parallel.balance [5,2,3,3,4]",
            "folded",
            "skip0 from stage",
            "move the cuts",
        ),
        least_ranks=3,
    ),
    replace(
        _train(
            "stage-too-large",
            f"{_PIPELINES} --parallel.balance modelled --model.base_channels 120000",
            "stage",
            "bytes",
            "more stages",
        ),
        least_ranks=3,
    ),
    replace(
        _train(
            "given-stage-too-large",
            f"{_PIPELINES} --parallel.balance [6,6,5] --model.base_channels 120000",
            "stage 1 of parallel.balance",
            "GiB",
            "move layers",
        ),
        least_ranks=3,
    ),
    _predict("more-stages-than-ranks", "--parallel.stages 9", "parallel.stages", "9", "ranks", "start 9"),
    _predict("balance-word", "--parallel.stages 2 --parallel.balance even", "parallel.balance", "even", "auto"),
)

VALUES = (
    _train("optimizer", "--optimizer.name lion", "optimizer.name", "lion", "adamw, sgd"),
    _train("policy", "--optimizer.policy exponential", "optimizer.policy", "exponential", "cosine"),
    _train("rate", "--optimizer.lr -0.1", "optimizer.lr", "-0.1", "above 0"),
    _train("rate-nan", "--optimizer.lr nan", "optimizer.lr", "nan", "number"),
    _train("rate-infinite", "--optimizer.lr inf", "optimizer.lr", "inf", "number"),
    _train("momentum", "--optimizer.momentum 1.5", "optimizer.momentum", "1.5", "[0, 1)"),
    _train("weight-decay", "--optimizer.weight_decay -1", "optimizer.weight_decay", "-1", "at least 0"),
    _train("precision", "--train.precision fp8", "train.precision", "fp8", "bf16"),
    _train("epochs", "--train.epochs 0", "train.epochs", "0", "at least 1"),
    _train("checkpoint-every", "--train.checkpoint_every 0", "train.checkpoint_every", "at least 1"),
    _train("seed", "--train.seed -1", "train.seed", "-1", "at least 0"),
    _train("batch-of-none", "--train.tiles_per_step 0", "train.tiles_per_step", "0", "at least 1"),
    _train("batch-larger-than-data", "--train.tiles_per_step 5", "train.tiles_per_step", "5", "4 tiles", "at most 4"),
    _train("batch-with-auto-grid", "--tiling.grid auto", "tiles_per_step", "auto", "give a grid"),
    _train("grid-of-none", "--tiling.grid 0", "tiling.grid", "0", "at least 1"),
    _train("grid-of-three", "--tiling.grid [2,2,2]", "tiling.grid", "[2, 2, 2]", "[rows, cols]"),
    _train("grid-word", "--tiling.grid fine", "tiling.grid", "fine", "auto"),
    _train("grid-too-fine", "--tiling.grid 25", "25", "48", "alignment of 2", "at most 24"),
    _train("halo-negative", "--tiling.halo -1", "tiling.halo", "-1", "auto"),
    _train("halo-too-small", "--tiling.halo 2", "halo 2", "5", "auto"),
    _train("halo-word", "--tiling.halo wide", "tiling.halo", "wide", "auto"),
    _train("model-name", "--model.name resnet", "model.name", "resnet", "unet"),
    _train("levels", "--model.levels 0", "model.levels", "0", "at least 1"),
    _train("levels-many", "--model.levels 13", "model.levels", "13", "at most 12"),
    _train("kernel", "--model.kernel 4", "model.kernel", "4", "odd"),
    _train("channels", "--model.base_channels 0", "model.base_channels", "0", "at least 1"),
    _train("padding", "--model.padding reflect", "model.padding", "reflect", "same, valid"),
    _train("norm", "--model.norm layer", "model.norm", "layer", "pixel"),
    _train("upsampling", "--model.upsampling cubic", "model.upsampling", "cubic", "bilinear"),
    _train("dropout", "--model.dropout 1", "model.dropout", "1", "[0, 1)"),
    _train("preset-contradicted", "--model.name small --model.levels 3", "model.levels", "3", "small", "6"),
    _train("norm-that-tiles-change", "--model.norm instance", "model.norm", "instance", "parallel.exact false"),
    _train("batch-norm-that-tiles-change", "--model.norm batch", "model.norm", "batch", "parallel.exact false"),
    _train("transport", "--parallel.transport udp", "transport", "udp", "gloo"),
    _train("verbosity", "--run.verbosity 7", "run.verbosity", "7", "0, 1 or 2"),
    _train("classes-one", "--data.classes 1", "data.classes", "1", "2 to 255"),
    _train("classes-many", "--data.classes 300", "data.classes", "300", "2 to 255"),
    _train("classes-with-a-gap", "--data.classes '{0: 0, 1: 2, 2: 2}'", "classes", "class 1 is missing"),
    _train("classes-mixed", "--data.classes '{1: 0, \"#ff0000\": 1}'", "classes", "mixes"),
    _train("classes-key", "--data.classes '{red: 0, green: 1}'", "classes", "red", "#ff0000"),
    _train("ignore-inside-classes", "--data.ignore_index 1", "ignore_index 1", "0 to 2"),
    _train("ignore-too-large", "--data.ignore_index 256", "data.ignore_index", "256", "255"),
    _train("bands-none", "--data.bands []", "data.bands", "[]", "from 1"),
    _train("bands-from-zero", "--data.bands [0,1]", "data.bands", "[0, 1]", "from 1"),
    _train("bands-twice", "--data.bands [1,1]", "data.bands", "[1, 1]"),
    _train("bands-too-many", "--data.bands [1,9]", "band 9", "image.tif", "1 to 3"),
    _train("nodata-not-storable", "--data.nodata -9999", "data.nodata", "-9999", "uint8"),
)

RASTERS = (
    _train("no-images", "--data.images []", "data.images", "empty"),
    _train("missing-image", "--data.images ROOT/nowhere.tif", "data.images", "nowhere.tif", "does not exist"),
    _train("missing-labels", "--data.labels ROOT/nowhere.tif", "data.labels", "nowhere.tif", "does not exist"),
    _train("no-labels", "--data.labels []", "data.labels", "empty"),
    _train("glob-without-matches", "--data.images 'ROOT/*.jp2'", "data.images", "*.jp2", "matches"),
    _train("image-is-a-folder", "--data.images ROOT/folder", "data.images", "folder"),
    _train("same-image-twice", "--data.images [ROOT/image.tif,ROOT/image.tif]", "image.tif", "twice"),
    _train("more-images-than-labels", "--data.images [ROOT/image.tif,ROOT/second.tif]", "2 rasters", "has 1"),
    _train("validation-without-labels", "--data.val_images ROOT/second.tif", "data.val_images", "data.val_labels"),
    _train(
        "validation-of-other-bands",
        "--data.val_images ROOT/two-bands.tif --data.val_labels ROOT/second-labels.tif",
        *("image.tif", "two-bands.tif", "3", "2"),
    ),
    _train(
        "images-of-two-dtypes",
        "--data.images [ROOT/image.tif,ROOT/uint16.tif] --data.labels [ROOT/labels.tif,ROOT/second-labels.tif]",
        *("uint8", "uint16", "uint16.tif"),
    ),
    _train("cut-in-the-header", "--data.images ROOT/cut-head.tif", "cut-head.tif"),
    _train("cut-at-a-tenth", "--data.images ROOT/cut-tenth.tif", "cut-tenth.tif"),
    _train("cut-in-the-middle", "--data.images ROOT/cut-half.tif", "cut-half.tif", "truncated"),
    _train("cut-by-a-byte", "--data.images ROOT/cut-end.tif", "cut-end.tif", "truncated"),
    _train("cut-png", "--data.images ROOT/cut.png", "cut.png", "truncated"),
    _train("cut-labels", "--data.labels ROOT/cut-labels.tif", "cut-labels.tif", "truncated"),
    _train("damaged-block", "--data.images ROOT/damaged.tif", "damaged.tif", "rows", "columns", "copy it again"),
    _train("empty-file", "--data.images ROOT/empty.tif", "empty.tif", "GDAL"),
    _train("text-file", "--data.images ROOT/text.tif", "text.tif", "GDAL"),
    _train("complex-pixels", "--data.images ROOT/complex.tif", "complex.tif", "complex64"),
    _train("float-labels", "--data.labels ROOT/float-labels.tif", "float-labels.tif", "float32", "whole numbers"),
    _train("labels-of-other-size", "--data.labels ROOT/small-labels.tif", "small-labels.tif", "48 x 48", "47 x 48"),
    _train("labels-of-other-crs", "--data.labels ROOT/other-crs-labels.tif", "CRS", "32611", "32612"),
    _train("labels-shifted", "--data.labels ROOT/shifted-labels.tif", "transform", "500000", "500001"),
    _train(
        "labels-of-three-bands",
        "--data.labels ROOT/three-band-labels.tif",
        "three-band-labels.tif",
        "bands",
        "3",
        "1 band",
    ),
    _train("label-outside", "--data.labels ROOT/outside-labels.tif", "outside-labels.tif", "value 9", "row 5, col 7"),
    _train("colours-without-colours", '--data.classes \'{"#ff0000": 0, "#00ff00": 1}\'', "labels.tif", "colour"),
    _train("no-valid-pixel", "--data.images ROOT/blank.tif", "no valid pixel", "data.nodata"),
)

OUTPUTS = (
    _train("output-empty", "--run.output ''", "run.output", "empty"),
    _train("output-is-a-file", "--run.output ROOT/file", "run.output", "file"),
    _train("output-below-a-file", "--run.output ROOT/file/run", "run.output", "file"),
    _train("output-that-no-one-can-make", "--run.output /proc/tiledseg", "run.output", "/proc/tiledseg"),
)

RESUMES = (
    _resume("missing", "--train.resume ROOT/nowhere", "nowhere", "no checkpoint"),
    _resume("nothing-in-folder", "--train.resume ROOT/broken/no-checkpoint", "no-checkpoint", "checkpoint"),
    _resume("from-a-file", "--train.resume ROOT/file", "file", "checkpoint"),
    _resume("of-other-levels", "--model.levels 3", "levels is 2", "3"),
    _resume("of-other-classes", "--data.classes 4", "classes is 3", "4"),
    _resume("of-other-bands", "--data.bands [1,2]", "bands", "3", "2"),
    _resume("of-another-optimizer", "--optimizer.name sgd", "optimizer.name", "adamw", "sgd"),
    _resume(
        "into-another-order",
        "--train.resume ROOT/run/checkpoints/step-000001 --train.seed 5 --run.output ROOT/out",
        *("step-000001", "seed is 0", "5"),
    ),
    _resume("never-in-a-used-folder", "--train.resume never", "run", "never"),
    _resume("older-than-the-newest", "--train.resume ROOT/run/checkpoints/step-000001", "step-000001", "step-000002"),
    _resume(
        "all-damaged",
        "--run.output ROOT/broken/flipped",
        "flipped",
        "model.safetensors",
        "checksum",
        "another run.output",
    ),
)

DAMAGES = tuple(
    _predict(f"checkpoint-{name}", f"--checkpoint ROOT/broken/{name}", name, *words)
    for name, words in (
        ("no-model.safetensors", ("damaged", "model.safetensors is missing")),
        ("no-optimizer.safetensors", ("damaged", "optimizer.safetensors is missing")),
        ("no-manifest.json", ("manifest.json",)),
        ("flipped", ("damaged", "model.safetensors", "checksum")),
        ("flipped-optimizer", ("damaged", "optimizer.safetensors", "checksum")),
        ("cut-model", ("damaged", "model.safetensors")),
        ("not-json", ("manifest.json",)),
        ("json-list", ("manifest.json",)),
        ("cut-manifest", ("manifest.json",)),
        ("edited", ("manifest.json",)),
        ("format-99", ("99", "1")),
        ("flat-checksums", ("manifest.json",)),
        ("no-state", ("manifest.json",)),
        ("no-checkpoint", ("checkpoint",)),
        ("lost-latest", ("step-000099",)),
    )
)

MAPS = (
    _predict("missing-checkpoint", "--checkpoint ROOT/nowhere", "nowhere", "no checkpoint"),
    _predict("checkpoint-is-a-file", "--checkpoint ROOT/file", "file", "checkpoint"),
    _predict("missing-image", "--image ROOT/nowhere.tif", "nowhere.tif", "does not exist"),
    _predict("cut-image", "--image ROOT/cut-half.tif", "cut-half.tif", "truncated"),
    _predict("image-is-a-folder", "--image ROOT/folder", "folder"),
    _predict("image-of-other-bands", "--image ROOT/two-bands.tif", "two-bands.tif", "2 bands", "3"),
    _predict("grid-too-fine", "--tiling.grid 25", "25", "48", "alignment of 2", "at most 24"),
    _predict("grid-word", "--tiling.grid fine", "tiling.grid", "fine", "auto"),
    _predict("grid-of-none", "--tiling.grid 0", "tiling.grid", "0", "at least 1"),
    _predict("workers", "--workers 0", "--workers", "0", "at least 1"),
    _predict("precision", "--precision fp8", "--precision", "fp8", "bf16"),
    _predict("unknown-flag", "--colour red", "--colour", "--help"),
    _predict("transport", "--parallel.transport udp", "transport", "udp", "gloo"),
    _predict("output-is-a-folder", "--output ROOT/folder", "folder", "file name"),
    _predict("output-below-a-file", "--output ROOT/file/map.tif", "file", "is not a folder"),
    _predict("output-in-no-folder", "--output ROOT/nowhere/map.tif", "nowhere", "make it first"),
    _predict("output-is-the-input", "--output ROOT/image.tif", "image.tif", "input"),
    _predict("probabilities-are-the-input", "--probabilities ROOT/image.tif", "image.tif", "input"),
    _predict("probabilities-are-the-output", "--probabilities ROOT/map.tif", "map.tif", "two names"),
    replace(
        _predict("damaged-block", "--image ROOT/damaged.tif", "damaged.tif", "rows", "columns", "copy it again"),
        by_one_rank=True,
    ),
    Case("nothing-given", "predict", "", ("--checkpoint", "--image", "--output")),
)


def _evaluate(name: str, typed: str, *words: str) -> Case:
    """A good score, but for `typed`."""
    return Case(name, "evaluate", f"--prediction ROOT/second-labels.tif --labels ROOT/labels.tif {typed}", words)


SCORES = (
    _evaluate("missing-prediction", "--prediction ROOT/nowhere.tif", "nowhere.tif", "does not exist"),
    _evaluate("missing-labels", "--labels ROOT/nowhere.tif", "nowhere.tif", "does not exist"),
    _evaluate("cut-labels", "--labels ROOT/cut-labels.tif", "cut-labels.tif", "truncated"),
    _evaluate("text-for-a-map", "--prediction ROOT/text.tif", "text.tif", "GDAL"),
    _evaluate("map-of-other-size", "--prediction ROOT/small-labels.tif", "small-labels.tif", "48 x 48", "47 x 48"),
    _evaluate("map-of-other-crs", "--prediction ROOT/other-crs-labels.tif", "CRS", "32611", "32612"),
    _evaluate("map-shifted", "--prediction ROOT/shifted-labels.tif", "transform", "500000", "500001"),
    _evaluate("map-of-fractions", "--prediction ROOT/float-labels.tif", "float-labels.tif", "float32"),
    _evaluate("map-of-three-bands", "--prediction ROOT/three-band-labels.tif", "three-band-labels.tif", "3"),
    _evaluate("label-outside", "--labels ROOT/outside-labels.tif --classes 3", "outside-labels.tif", "value 9"),
    _evaluate("prediction-outside", "--prediction ROOT/outside-labels.tif --classes 3", "9"),
    _evaluate("classes-word", "--classes many", "--classes", "many", "number"),
    _evaluate("classes-one", "--classes 1", "1", "2 to 255"),
    _evaluate("ignore-inside-classes", "--classes 3 --ignore-index 1", "ignore_index 1", "0 to 2"),
    _evaluate("image-without-plot", "--image ROOT/image.tif", "--image", "--plot"),
    _evaluate("plot-below-a-file", "--plot ROOT/file/plot.png", "file", "is not a folder"),
    _evaluate("plot-is-a-folder", "--plot ROOT/folder", "folder"),
    _evaluate("plot-is-the-labels", "--plot ROOT/labels.tif", "labels.tif", "input"),
    _evaluate("format", "--format xml", "--format", "xml", "json"),
)


def _plan(name: str, typed: str, *words: str) -> Case:
    """A good plan, but for `typed`."""
    return Case(name, "plan", f"--size 1000 {typed}", words)


PLANS = (
    Case("no-size", "plan", "--grid 8", ("--size", "--help")),
    _plan("size-of-nothing", "--size 0", "0", "at least 1"),
    _plan("size-negative", "--size -5 10", "-5", "at least 1"),
    _plan("size-of-three", "--size 1 2 3", "--size", "3"),
    _plan("size-word", "--size large", "--size", "large"),
    _plan("grid-of-none", "--grid 0", "0", "at least 1"),
    _plan("grid-word", "--grid fine", "--grid", "fine", "auto"),
    _plan("grid-too-fine", "--grid 64", "64", "1000", "alignment of 16", "at most 63"),
    _plan("auto-without-memory", "--grid auto", "--grid", "auto", "--gpu-memory"),
    _plan("memory-word", "--gpu-memory plenty", "plenty", "16GiB"),
    _plan("memory-too-small", "--grid auto --gpu-memory 1MiB", "bytes", "smaller network"),
    _plan("levels", "--levels 0", "levels", "0", "at least 1"),
    _plan("kernel", "--kernel 4", "kernel", "4", "odd"),
    _plan("padding", "--padding reflect", "--padding", "reflect", "same"),
    _plan("preset-contradicted", "--model small --levels 3", "--levels", "3", "small", "6"),
    _plan("classes", "--classes 1", "classes", "1", "at least 2"),
    _plan("bands", "--bands 0", "bands", "0", "at least 1"),
    _plan("gpus", "--gpus 0", "--gpus", "0", "at least 1"),
    _plan("images", "--images -1", "--images", "-1", "at least 1"),
    _plan("plot-of-another-kind", "--plot ROOT/plan.txt", "plan.txt", ".png"),
    _plan("plot-below-a-file", "--plot ROOT/file/plan.png", "file/plan.png"),
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
    _tile("cut-image", "--images ROOT/cut-half.tif", "cut-half.tif", "truncated"),
    _tile("labels-of-other-size", "--labels ROOT/small-labels.tif", "small-labels.tif", "48 x 48", "47 x 48"),
    _tile("grid-auto", "--grid auto", "auto", "--grid"),
    _tile("grid-word", "--grid fine", "--grid", "fine", "whole numbers"),
    _tile("grid-too-fine", "--grid 25", "25", "48", "alignment of 2", "at most 24"),
    _tile("halo-too-small", "--halo 3", "halo 3", "auto"),
    _tile("halo-word", "--halo wide", "--halo", "wide", "whole numbers"),
    _tile("bands-too-many", "--bands [1,9]", "band 9", "image.tif", "1 to 3"),
    _tile("levels", "--levels 0", "levels", "0", "at least 1"),
    _tile("missing-config", "--config ROOT/nowhere.yaml", "nowhere.yaml"),
    _tile("unknown-flag", "--colour red", "--colour", "--help"),
    _tile("transport", "--parallel.transport udp", "transport", "udp", "gloo"),
    _tile("output-below-a-file", "--output ROOT/file/new.h5", "file", "folder"),
    _tile("output-in-no-folder", "--output ROOT/nowhere/new.h5", "nowhere", "make it first"),
    _tile("output-is-a-folder", "--output ROOT/folder", "folder"),
    _tile("output-is-the-input", "--output ROOT/image.tif", "image.tif", "another --output"),
    _tile("output-is-another-store", "--output ROOT/good.h5 --grid 3", "good.h5", "2", "3"),
    _train("cut-store", "--data.images ROOT/cut.h5 --data.labels []", "cut.h5"),
    _train("store-cut-by-a-byte", "--data.images ROOT/cut-end.h5 --data.labels []", "cut-end.h5", "truncated"),
    _train("no-store", "--data.images ROOT/other.h5 --data.labels []", "other.h5", "no tile store", "data.labels"),
    _train("no-such-image-of-a-store", "--data.images ROOT/good.h5#7 --data.labels ROOT/labels.tif", "good.h5#7"),
    _train("store-of-another-grid", "--data.images ROOT/good.h5 --data.labels [] --tiling.grid 3", "good.h5", "2", "3"),
    _train(
        "store-of-a-narrower-halo", "--data.images ROOT/good.h5 --data.labels [] --model.levels 3", "halo", "good.h5"
    ),
    _predict("store-of-another-grid", "--image ROOT/good.h5 --tiling.grid 3", "good.h5", "[2, 2]", "[3, 3]"),
    _train("store-beside-a-lone-raster", "--data.images [ROOT/good.h5,ROOT/second.tif]", "2 rasters", "has 1"),
    _train("store-of-other-bands", "--data.images ROOT/good.h5 --data.bands [1]", "good.h5", "[1]", "[1, 2, 3]"),
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
    *VALUES,
    *RASTERS,
    *OUTPUTS,
    *RESUMES,
    *DAMAGES,
    *MAPS,
    *SCORES,
    *PLANS,
    *SCENES,
    *STORES,
    *DOCTORS,
)
