"""The table of broken inputs: what is typed, and the words without which its error would not help."""

import importlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One broken input of one command. `typed` is what follows the command, with ROOT for the folder of materials."""

    name: str
    command: str
    typed: str
    words: tuple[str, ...]
    least_ranks: int = 1
    """A job of fewer is refused for that already."""

    def run(self, root: Path) -> int:
        """Run the command; return its exit code."""
        main = importlib.import_module(f"tiledseg.{self.command}").main
        return main(self.arguments(root))

    def arguments(self, root: Path) -> list[str]:
        return [word.replace("ROOT", str(root)) for word in shlex.split(self.typed)]

    def __str__(self) -> str:
        return f"{self.command}-{self.name}"


def _like(command: str, good: str, before: str = "", least_ranks: int = 1) -> Callable[..., Case]:
    """A function of a name, what is typed, and words: a good command but for `typed`; the last of an option counts."""
    return lambda name, typed, *words: Case(before + name, command, f"{good} {typed}", words, least_ranks)


GOOD_RUN = "--config ROOT/good.yaml --run.output ROOT/out"  # a folder that is not there
GOOD_MAP = "--checkpoint ROOT/run --image ROOT/image.tif --output ROOT/map.tif --tiling.grid 2 --verbosity 0"
train, train_on_three = _like("train", GOOD_RUN), _like("train", GOOD_RUN, least_ranks=3)
predict, predict_on_three = _like("predict", GOOD_MAP), _like("predict", GOOD_MAP, least_ranks=3)
resume = _like("train", "--config ROOT/good.yaml", "resume-")  # in the folder that the good run has left
evaluate = _like("evaluate", "--prediction ROOT/second-labels.tif --labels ROOT/labels.tif")
plan = _like("plan", "--size 1000")
scene = _like("scene", "--size 64 64 --image ROOT/scene.tif --labels ROOT/scene-labels.tif")
tile = _like("tile", "--images ROOT/image.tif --labels ROOT/labels.tif --grid 2 --levels 2 --output ROOT/new.h5")
cut = _like("tile", "--images ROOT/image.tif --labels ROOT/labels.tif --grid 2 --format zarr --output ROOT/new.zarr")
export = _like("export", "--checkpoint ROOT/run")
WINDOWS = "--train.tiles_per_step null --train.windows '{size: 16, per_step: 2}' --parallel.halo layer"
LAYER = "--train.tiles_per_step null --parallel.halo layer"
EXCHANGE = "--train.tiles_per_step null --parallel.halo exchange"
IDLE, IDLE_RANK = "--parallel.idle_ranks true", ("own nothing", "start 2", "idle_ranks true")  # of three ranks
BLOCKS = "--memory.blocks 2"
PIPELINES = "--parallel.stages 3"
HUGE = 10**30
AS_STORE = "--data.labels [] --data.images"
NOTHING = ("no valid pixel in any image: all are nodata, masked or NaN; check --nodata, --v",)
REFUSED = ("cannot open", "data.references", "--references")

CASES = (
    # Flags.
    train("unknown-flag", "--data.colour 3", "data.colour", "--help"),
    train("misspelt-flag", "--model.base_chanels 4", "model.base_chanels", "did you mean --model.base_channels?"),
    train("flag-without-its-group", "--lr 0.1", "--lr", "did you mean --optimizer.lr?"),
    # Values of one key, or of two that do not fit.
    train("output-too-long", f"--run.output ROOT/{'x' * 300}", "run.output", "File name too long", "another folder"),
    resume("events-a-file", "--run.output ROOT/broken/events-file", "events", "is a file", "move it away"),
    train("best-without-validation", "--train.best loss", "train.best", "loss", "data.val_images"),
    train("windows-in-layer", WINDOWS, "layer", "has halo exact", "parallel.halo read"),
    train(
        "augment-each-shared",
        "--train.augment [turn] --train.augment_each tile --parallel.halo layer",
        *("augment_each", "parallel.halo read"),
    ),
    train("batch-with-auto-grid", "--tiling.grid auto", "tiles_per_step", "auto", "give a grid"),
    train("grid-too-fine", "--tiling.grid 25", "25", "48", "alignment of 2", "at most 24"),
    train("norm-that-tiles-change", "--model.norm instance", "model.norm", "instance", "parallel.exact false"),
    train("no-norm-to-freeze", "--model.freeze_norm true", "model.freeze_norm is true", "U-Net", "no batch norm"),
    train("classes-mixed", "--data.classes '[{name: a, value: 1}, {name: b, value: \"#ff0000\"}]'", "mixes"),
    train("classes-two-of-a-name", "--data.classes '[{name: a}, {name: a}]'", "two classes named a"),
    # Ways of spreading the work.
    train("mode-with-a-batch-of-tiles", "--parallel.halo layer", "tiles_per_step", "2", "layer", "images_per_step"),
    train("mesh-of-more-ranks-than-the-job", f"{EXCHANGE} --parallel.mesh [9,9]", "[9, 9]", "81", "start more ranks"),
    train("mesh-finer-than-the-grid", f"{LAYER} --parallel.mesh [3,1]", "parallel.mesh", "3", "mesh"),
    train("more-images-than-there-are", f"{LAYER} {IDLE} --train.images_per_step 2", "images_per_step", "at most"),
    train("two-batches", "--train.images_per_step 2", "tiles_per_step", "images_per_step", "give one"),
    train("norm-that-exchange-changes", f"{EXCHANGE} {IDLE} --model.norm group", "model.norm", "group", "halo layer"),
    predict("mesh-of-more-ranks-than-the-job", "--parallel.halo layer --parallel.mesh [9,9]", "[9, 9]", "81"),
    # Ways of sparing memory.
    train("recompute-beyond-the-budget", "--memory.recompute all --memory.budget 1kB", "recompute all"),
    predict("map-store-without-blocks", "--memory.store ROOT", "memory.store", "memory.blocks is none; leave it out"),
    train("offload-to-memory", "--memory.offload all", "memory.offload", "memory.store host", "local disk"),
    train(
        "offload-without-a-choice",
        "--memory.offload auto --memory.store ROOT/folder --memory.recompute all",
        "memory.offload is auto",
        "memory.recompute is all",
    ),
    train("blocks-and-overlap", f"{LAYER} --parallel.overlap true {BLOCKS}", "memory.blocks", "overlap true"),
    train("blocks-in-exchange", f"{EXCHANGE} {BLOCKS}", "memory.blocks", "parallel.halo exchange", "layer or read"),
    train("compiled-in-blocks", f"{BLOCKS} --train.compile on", "train.compile", "memory.blocks", "leave it out"),
    train("compiled-and-recomputed", "--train.compile on --memory.recompute all", "train.compile", "memory.recompute"),
    train("blocks-and-fusion", f"{LAYER} --parallel.fusion 2 {BLOCKS}", "memory.blocks", "fusion 2", "leave one"),
    predict("store-that-is-not-there", f"{BLOCKS} --memory.store ROOT/nowhere", "memory.store", "nowhere", "folder"),
    predict("blocks-with-views", f"{BLOCKS} --tta turns", "--tta", "turns", "--memory.blocks", "leave one out"),
    train("compiled-layers", f"{LAYER} {IDLE} --train.compile on", "train.compile", "parallel.halo", "exchange"),
    train("blocks-of-two-tiles", f"{BLOCKS} --train.tiles_per_batch 2", "tiles_per_batch", "memory.blocks"),
    # Stages; the good network has 17 layers.
    train("more-stages-than-ranks", "--parallel.stages 9", "parallel.stages", "9", "ranks", "start 9"),
    train("balance-of-two", f"{PIPELINES} --parallel.balance [6,7]", "parallel.balance", "2 parts", "3", "auto"),
    train("recompute-of-two", f"{PIPELINES} --parallel.recompute [always,never]", "2 parts", "3", "one word for all"),
    train("mesh-times-stages", f"{EXCHANGE} --parallel.mesh [2,1] {PIPELINES}", "stages", "3", "ranks"),
    train_on_three("balance-that-does-not-sum", f"{PIPELINES} --parallel.balance [4,4,4]", "[4,4,4]", "12", "17"),
    train_on_three(
        "skip-torn-from-its-rank",
        f"{PIPELINES} --parallel.schedule folded --parallel.balance [5,2,3,3,4]",
        *("folded", "encoder0.stash from stage", "move the cuts"),
    ),
    train_on_three("stage-too-large", f"{PIPELINES} --parallel.balance modelled --model.base_channels 120000", "stage"),
    train_on_three(
        "given-stage-too-large", f"{PIPELINES} --parallel.balance [6,6,5] --model.base_channels 120000", "GiB"
    ),
    train_on_three("ranks-that-match-no-mesh", f"{EXCHANGE} --tiling.grid 2 --parallel.mesh [1,2]", *IDLE_RANK),
    train_on_three("ranks-that-match-no-pipeline", "--tiling.grid 2 --parallel.stages 2", *IDLE_RANK),
    predict_on_three("ranks-that-match-no-mesh", "--parallel.halo exchange --parallel.mesh [1,2]", *IDLE_RANK),
    predict_on_three("ranks-that-match-no-pipeline", "--parallel.stages 2", *IDLE_RANK),
    # Numbers that no memory can hold.
    *(plan(flag, f"--{flag} {HUGE}", f"--{flag}", str(HUGE), "at most") for flag in ("size", "images", "gpus", "mesh")),
    *(plan(flag, f"--{flag} {HUGE}", flag, str(HUGE), "at most") for flag in ("bands", "classes", "kernel", "levels")),
    plan("huge-grid", "--size 100000 --grid 1000", "--grid", "1000000 tiles", "32768 at most"),
    plan(
        "huge-auto", "--size 2147483647 --grid auto --gpu-memory 16GiB", "2147483647", "too many grids", "give a grid"
    ),
    plan("many-stages", "--stages 33", "--stages is 33", "at most 32"),
    plan("many-micro-batches", "--stages 2 --micro-batches 257", "--micro-batches is 257", "at most 256"),
    plan("huge-balance", f"--stages 2 --balance [{HUGE},1]", "--balance", str(HUGE)),
    plan("huge-digits", f"--size {'9' * 5000}", "--size", "invalid int value"),
    scene("huge-size", f"--size {HUGE} 1", str(HUGE), "2000000"),
    evaluate("huge-raw-value", f'--classes \'[{{"name": "a", "value": {HUGE}}}]\'', str(HUGE), "64 bits"),
    evaluate("huge-nesting", f"--classes '{'[' * 50000}'", "nests lists and maps", "16 deep"),
    train("huge-network", "--model.base_channels 1048576", "model", "GB", "fewer"),
    # Rasters that are broken, or do not fit their partners.
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
    train(
        "polygons-elsewhere",
        "--data.labels ROOT/parcels.gpkg --data.classes 2 --data.background 0",
        "parcels.gpkg",
        "no polygon in",
    ),
    train("no-valid-pixel", "--data.images ROOT/blank.tif", "no valid pixel", "data.nodata"),
    # Files that name others, or are no regular files.
    train("vrt-for-an-image", "--data.images ROOT/vrt.tif", "vrt.tif", *REFUSED),
    train("vrt-for-a-mask", "--data.images ROOT/masked.tif", "masked.tif.msk", "masked.tif", "no TIFF", "references"),
    predict("vrt", "--image ROOT/vrt.tif", "vrt.tif", *REFUSED),
    tile("raw-vrt", "--images ROOT/raw-vrt.tif", "raw-vrt.tif", *REFUSED),
    evaluate("vrt", "--prediction ROOT/vrt.tif", "vrt.tif", *REFUSED),
    train("fifo-for-an-image", "--data.images ROOT/fifo", "data.images", "fifo", "is a FIFO", "regular file"),
    train("fifo-beside-an-image", "--data.images ROOT/piped.tif", "piped.tif.aux.xml", "is a FIFO", "regular file"),
    # Stores that somebody changed.
    train(
        "store-with-a-flipped-pixel", f"{AS_STORE} ROOT/flipped.h5", "flipped.h5#0", "tried 4 times", "copy it again"
    ),
    train("store-of-an-older-version", f"{AS_STORE} ROOT/old.h5", "old.h5", "version 2", "remove it and cut it again"),
    evaluate("store-of-an-older-version", "--labels ROOT/old.h5", "old.h5", "version 2", "cut it again"),
    # Runs that cannot go on.
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
    # Damaged checkpoints.
    predict("checkpoint-flipped", "--checkpoint ROOT/broken/flipped", "damaged", "model.safetensors", "checksum"),
    predict("checkpoint-of-a-later-format", "--checkpoint ROOT/broken/format-99", "99", "1"),
    # Maps.
    predict("missing-checkpoint", "--checkpoint ROOT/nowhere", "nowhere", "no checkpoint"),
    predict("image-of-other-bands", "--image ROOT/two-bands.tif", "two-bands.tif", "2 bands", "3"),
    predict("means-no-list", "--mean '{\"100\": 1}'", "--mean", '{"100": 1}'),
    predict("means-one-number", "--mean 5", "--mean: invalid", "5"),
    predict("unknown-flag", "--colour red", "--colour", "--help"),
    predict("output-of-another-format", "--output ROOT/m.JP2", "--output is '", "ends in .tif"),
    predict("zarr-of-another-name", "--format zarr", "map.tif", "give a file name that ends in .zarr"),
    predict("map-named-zarr", "--output ROOT/m.zarr", "give a file name that ends in .tif"),
    predict("compressed-gtiff", "--format gtiff --compress zstd", "--compress is zstd", "use --format cog"),
    predict("polygons-of-no-class", "--polygons ROOT/new.gpkg --polygons-classes road", "has 'road'; give names"),
    predict("polygons-classes-alone", "--polygons-classes 0", "polygons-classes is 0, but --polygons is not given"),
    predict("output-is-the-input", "--output ROOT/image.tif", "image.tif", "input"),
    predict("probabilities-are-the-input", "--probabilities ROOT/image.tif", "image.tif", "input"),
    predict("damaged-block", "--image ROOT/damaged.tif", "damaged.tif", "rows", "columns", "copy it again"),
    Case("nothing-given", "predict", "", ("--image", "--output")),
    # Scores.
    evaluate("missing-prediction", "--prediction ROOT/nowhere.tif", "nowhere.tif", "does not exist"),
    evaluate("nothing-valid", "--prediction ROOT/void-labels.tif --plot ROOT/p.png", "no pixel is valid in both", "; "),
    evaluate("map-of-other-size", "--prediction ROOT/small-labels.tif", "small-labels.tif", "48 x 48", "47 x 48"),
    evaluate("prediction-outside", "--prediction ROOT/outside-labels.tif --classes 3", "9"),
    evaluate("image-without-plot", "--image ROOT/image.tif", "--image", "--plot"),
    evaluate("ignore-inside-classes", "--classes 5 --ignore-index 4", "ignore_index 4"),
    # Scenes.
    scene("size-of-nothing", "--size 0 64", "0 x 64"),
    scene("bands", "--bands 2", "bands", "2"),
    scene("seed", "--seed -1", "seed -1", "0 to"),
    Case("nothing-given", "scene", "", ("--size", "--image", "--labels")),
    # Tile stores.
    predict("times-that-are-not-given", "--image ROOT/{time}.tif", "--image ", "{time}.tif", "--times is empty"),
    tile("missing-image", "--images ROOT/nowhere.tif", "--images", "nowhere.tif", "does not exist"),
    tile("band-that-is-not-there", "--bands [9]", "--bands asks for band 9"),
    tile("bands-twice", "--bands [1,1]", "--bands is [1, 1]"),
    tile("nodata-beyond-the-dtype", "--nodata 300", "--nodata is 300"),
    tile("mask-of-no-band", "--valid 9", "--valid asks for band 9, but ", "has bands 1 to 3"),
    tile("mask-that-is-missing", "--valid ROOT/none.tif", "which --valid asks for"),
    tile("mask-of-two-bands", "--valid ROOT/two-bands.tif", "two-bands.tif with 2 bands"),
    tile("mask-without-place", "--valid ROOT/bare.tif", "bare.tif has no CRS or transform, which --valid needs"),
    tile("mask-of-nothing", "--valid ROOT/nothing.tif", *NOTHING),
    cut("mask-of-nothing-for-zarr", "--valid ROOT/nothing.tif", *NOTHING),
    tile("store-that-is-none", "--images ROOT/bad.zarr", "cannot open ", "bad.zarr: "),
    tile("assets-of-no-item", "--assets [red]", "--assets is ['red'], but no image is a STAC item"),
    tile("background-of-rasters", "--background tree", "--background is given, but no labels are polygons"),
    tile("hdf5-named-zarr", "--output ROOT/t.zarr", "--output is '", "t.zarr'"),
    tile("hdf5-named-as-a-folder", "--output ROOT/t.zarr/", "--output is '", "t.zarr/'"),
    cut("zarr-named-h5", "--output ROOT/t.h5", "--output is '", "t.h5'", "ends in .zarr"),
    cut("zarr-without-a-name", "--output=", "--output is ''"),
    cut("zarr-at-a-url", "--output s3://bucket/t.zarr", "--output is s3://bucket/t.zarr, but stores are written"),
    cut("zarr-with-halos", "--levels 3", "--levels is 3, but --format zarr keeps no halos"),
    Case("warp-without-labels", "tile", "--images ROOT/image.tif --grid 2 --warp --output ROOT/new.h5", ("--warp is",)),
    tile("classes-of-rasters", "--classes 5", "--classes is given, but no labels are polygons"),
    tile("output-is-the-input", "--output ROOT/image.tif", "image.tif", "input", "another output"),
    tile("output-is-there", "--output ROOT/good.h5", "good.h5 is there", "remove it"),
    train("store-of-another-grid", "--data.images ROOT/good.h5 --data.labels [] --tiling.grid 3", "good.h5", "2", "3"),
    train("store-beside-a-lone-raster", "--data.images [ROOT/good.h5,ROOT/second.tif]", "2 rasters", "has 1"),
    # Outputs that are inputs, or that nobody may write.
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
    evaluate("plot-is-a-link", "--image ROOT/image.tif --plot ROOT/link.tif", "is the input"),
    plan("plot-is-a-fifo", "--plot ROOT/pipe.png", "pipe.png", "is a FIFO"),
    scene("image-and-labels-one-file", "--labels ROOT/folder/../scene.tif", "--image", "two names"),
    tile("output-is-the-config", "--config ROOT/good.yaml --output ROOT/good.yaml", "good.yaml"),
    # Folders of runs with files of others.
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
    # The doctor.
    Case("unknown-flag", "doctor", "--colour red", ("--colour", "--help")),
    Case("format", "doctor", "--format xml", ("--format", "xml", "json")),
    Case("transport", "doctor", "--transport udp", ("udp", "gloo")),
    # Exports.
    export("nothing-given", "", "--output"),
    export("other-format", "--output ROOT/net.tflite", "net.tflite", ".onnx, .pt2, .json"),
    export("two-of-a-kind", "--output ROOT/a.onnx ROOT/b.onnx", "a.onnx", "b.onnx", "one kind"),
    export("tile-of-no-alignment", "--output ROOT/new.pt2 --tile 7", "--tile is 7", "multiple of 2"),
    export("tile-within-the-halo", "--output ROOT/new.pt2 --tile 2", "--tile is 2", "halo"),
    export("resolution-of-another", "--output ROOT/new.pt2 --resolution 50", "--resolution is 50", "no .onnx"),
    export("build-of-ours", "--output ROOT/new.pt2 --build a.b:c", "--build is a.b:c", "leave it out"),
    export("output-is-of-the-checkpoint", "--output ROOT/link.json", "link.json", "is the input"),
)
