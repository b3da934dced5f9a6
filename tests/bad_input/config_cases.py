"""Broken flags, files of configuration and values."""

from __future__ import annotations

from tests.bad_input.case import resume, train

FLAGS = (
    train("unknown-flag", "--data.colour 3", "data.colour", "--help"),
    train("misspelt-flag", "--model.base_chanels 4", "model.base_chanels", "did you mean --model.base_channels?"),
    train("unknown-group-flag", "--optimiser.lr 1", "optimiser.lr", "--help"),
    train("flag-without-value", "--train.epochs", "train.epochs", "--help"),
    train("wrong-type", "--model.levels many", "model.levels", "many", "whole number"),
    train("missing-config", "--config ROOT/nowhere.yaml", "nowhere.yaml", "give a YAML file"),
    train("config-is-a-folder", "--config ROOT/folder", "folder", "give a YAML file"),
    train("unknown-key", "--config ROOT/unknown-key.yaml", "unknown-key.yaml", "data.imagse", "val_images"),
    train("unknown-group", "--config ROOT/unknown-group.yaml", "unknown-group.yaml", "optimiser", "optimizer"),
    train("malformed-yaml", "--config ROOT/malformed.yaml", "malformed.yaml, line 3, column 9", "mend"),
    train("tab-in-yaml", "--config ROOT/tabs.yaml", "tabs.yaml, line 2", "mend"),
    train("yaml-is-a-list", "--config ROOT/list.yaml", "list.yaml", "list", "data, tiling"),
    train("yaml-is-binary", "--config ROOT/binary.yaml", "binary.yaml", "not text"),
    train("yaml-without-keys", "--config ROOT/hollow.yaml", "hollow.yaml", "train holds nothing"),
    train("yaml-is-empty", "--config ROOT/empty.yaml", "empty.yaml", "nothing"),
)

WINDOWS = "--train.tiles_per_step null --train.sampling windows --train.window 16 --train.windows_per_step 2"

VALUES = (
    train("group-norm", "--model.norm group --model.base_channels 6", "level 1 has 12 channels", "8 groups", "give 1,"),
    train("output-too-long", f"--run.output ROOT/{'x' * 300}", "run.output", "File name too long", "another folder"),
    resume("events-a-file", "--run.output ROOT/broken/events-file", "events", "is a file", "move it away"),
    resume("metrics-damaged", "--run.output ROOT/broken/metrics", "metrics.jsonl, line 2", "move the file away"),
    train("decay-of-nothing", "--optimizer.decay_norms false", "decay_norms is false", "weight_decay is 0"),
    train("loss-old-key", "--train.focal_gamma 1", "older version", "train.loss {name: focal, gamma: VALUE}"),
    train("policy-old-key", "--optimizer.step_size 1", "older version", "optimizer.policy {name: step, size: VALUE}"),
    train("policy-field", "--optimizer.policy '{name: step, power: 1}'", "optimizer.policy", "step has no field"),
    train("loss-field", "--train.loss '{name: dice, gamma: 1}'", "train.loss", "no field 'gamma'", "weight"),
    train("best-without-validation", "--train.best loss", "train.best", "loss", "data.val_images"),
    train("early-stop-by-nothing", "--train.early_stop 3", "train.early_stop", "3", "train.best", "mean_iou"),
    train("weights-few", "--train.class_weights [1,2]", "train.class_weights", "2 weights for 3 classes", "one a"),
    train("weights-class", "--train.class_weights '{4: 1}'", "train.class_weights", "4", "0 to 2"),
    train("skip-empty-of-images", "--train.tiles_per_step null --train.skip_empty true", "skip_empty", "whole images"),
    train("balance-of-images", "--train.tiles_per_step null --train.balance_classes 0.5", "is 0.5", "tiles_per_step"),
    train("window-of-tiles", "--train.window 16", "train.sampling is tiles and train.window 16", "leave it out"),
    train("windows-of-no-size", "--train.sampling windows", "windows and train.window not given", "give train.window"),
    train("windows-and-tiles", f"{WINDOWS} --train.tiles_per_step 2", "tiles_per_step is 2", "windows", "leave it out"),
    train("window-too-large", f"{WINDOWS} --train.window 49", "train.window is 49", "48 px", "at most 48"),
    train("window-halo-of-tiles", "--train.window_halo none", "window_halo is none", "train.sampling windows"),
    train("windows-each-tile", f"{WINDOWS} --train.augment_each tile", "augment_each is tile", "leave it out"),
    train("windows-in-layer", f"{WINDOWS} --parallel.halo layer", "layer", "window_halo exact", "parallel.halo read"),
    train(
        "windows-norm",
        f"{WINDOWS} --model.norm batch",
        "a part of the image",
        "window_halo none with parallel.halo layer or memory.blocks",
    ),
    train(
        "small-windows-norm",
        f"{WINDOWS} --train.window_halo none --model.norm batch",
        *("model.norm is batch", "2 images at once", "parallel.halo layer or memory.blocks, without stages"),
    ),
    train(
        "small-windows-norm-validated-in-tiles",
        f"{WINDOWS} --train.window_halo none --model.norm instance --data.val_images ROOT/image.tif "
        "--data.val_labels ROOT/labels.tif",
        *("of the validation", "model.norm is instance", "tiling.grid 1"),
    ),
    train("augment-each-of-nothing", "--train.augment_each tile", "augment_each is tile", "train.augment is empty"),
    train(
        "augment-each-shared",
        "--train.augment [turn] --train.augment_each tile --parallel.halo layer",
        *("augment_each", "parallel.halo read"),
    ),
    train("batch-larger-than-data", "--train.tiles_per_step 5", "train.tiles_per_step", "5", "4 tiles", "at most 4"),
    train("batch-with-auto-grid", "--tiling.grid auto", "tiles_per_step", "auto", "give a grid"),
    train("grid-too-fine", "--tiling.grid 25", "25", "48", "alignment of 2", "at most 24"),
    train("halo-too-small", "--tiling.halo 2", "halo 2", "5", "auto"),
    train("preset-contradicted", "--model.name small --model.levels 3", "model.levels", "3", "small", "6"),
    train("norm-that-tiles-change", "--model.norm instance", "model.norm", "instance", "parallel.exact false"),
    train("batch-norm-that-tiles-change", "--model.norm batch", "model.norm", "batch", "parallel.exact false"),
    train("no-norm-to-freeze", "--model.freeze_norm true", "model.freeze_norm is true", "U-Net", "no batch norm"),
    train(
        "norm-of-one-pixel",
        "--data.images ROOT/tiny.tif --data.labels ROOT/tiny-labels.tif --tiling.grid 1 --model.norm instance "
        "--train.tiles_per_step 1",
        *("model.norm is instance", "2 x 2 px", "1 pixel", "fewer model.levels"),
    ),
    train("transport", "--parallel.transport udp", "transport", "udp", "gloo"),
    train("classes-as-a-map", "--data.classes '{0: 0, 1: 1}'", "classes", "give a list of records"),
    train("classes-mixed", "--data.classes '[{name: a, value: 1}, {name: b, value: \"#ff0000\"}]'", "mixes"),
    train("classes-two-of-a-name", "--data.classes '[{name: a}, {name: a}]'", "two classes named a"),
    train("classes-from-nowhere", "--data.classes ROOT/none.csv", "none.csv", "No such file"),
    train("classes-from-a-raster", "--data.classes ROOT/image.tif", "image.tif", ".csv"),
    train("ignore-inside-classes", "--data.ignore_index 1", "ignore_index 1", "0 to 2"),
    train("bands-too-many", "--data.bands [1,9]", "band 9", "image.tif", "1 to 3"),
    train("nodata-not-storable", "--data.nodata -9999", "data.nodata", "-9999", "uint8"),
)
