"""Broken flags, values and files of configuration; ways of spreading the work; numbers that no memory can hold."""

from __future__ import annotations

from dataclasses import replace

from tests.bad_input.case import evaluate, plan, predict, resume, scene, train

FLAGS = (
    train("unknown-flag", "--data.colour 3", "data.colour", "--help"),
    train("misspelt-flag", "--model.base_chanels 4", "model.base_chanels", "did you mean --model.base_channels?"),
    train("flag-without-its-group", "--lr 0.1", "--lr", "did you mean --optimizer.lr?"),
)

WINDOWS = "--train.tiles_per_step null --train.windows '{size: 16, per_step: 2}' --parallel.halo layer"

VALUES = (
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
)

_LAYER = "--train.tiles_per_step null --parallel.halo layer"
_EXCHANGE = "--train.tiles_per_step null --parallel.halo exchange"
_IDLE = "--parallel.idle_ranks true"  # of three ranks

HALO_MODES = (
    train("mode-with-a-batch-of-tiles", "--parallel.halo layer", "tiles_per_step", "2", "layer", "images_per_step"),
    train("mesh-of-more-ranks-than-the-job", f"{_EXCHANGE} --parallel.mesh [9,9]", "[9, 9]", "81", "start more ranks"),
    train("mesh-finer-than-the-grid", f"{_LAYER} --parallel.mesh [3,1]", "parallel.mesh", "3", "mesh"),
    train("more-images-than-there-are", f"{_LAYER} {_IDLE} --train.images_per_step 2", "images_per_step", "at most"),
    train("two-batches", "--train.images_per_step 2", "tiles_per_step", "images_per_step", "give one"),
    train("norm-that-exchange-changes", f"{_EXCHANGE} {_IDLE} --model.norm group", "model.norm", "group", "halo layer"),
    predict("mesh-of-more-ranks-than-the-job", "--parallel.halo layer --parallel.mesh [9,9]", "[9, 9]", "81"),
)

_BLOCKS = "--memory.blocks 2"
_OFFLOAD = "--memory.offload all --memory.store ROOT/folder"

BLOCKS = (
    train("recompute-beyond-the-budget", "--memory.recompute all --memory.budget 1kB", "recompute all"),
    predict("map-store-without-blocks", "--memory.store ROOT", "memory.store", "memory.blocks is none; leave it out"),
    train("offload-to-memory", "--memory.offload all", "memory.offload", "memory.store host", "local disk"),
    train(
        "offload-without-a-choice",
        "--memory.offload auto --memory.store ROOT/folder --memory.recompute all",
        "memory.offload is auto",
        "memory.recompute is all",
    ),
    train("blocks-and-overlap", f"{_LAYER} --parallel.overlap true {_BLOCKS}", "memory.blocks", "overlap true"),
    train("blocks-in-exchange", f"{_EXCHANGE} {_BLOCKS}", "memory.blocks", "parallel.halo exchange", "layer or read"),
    train("compiled-in-blocks", f"{_BLOCKS} --train.compile on", "train.compile", "memory.blocks", "leave it out"),
    train("compiled-and-recomputed", "--train.compile on --memory.recompute all", "train.compile", "memory.recompute"),
    train("blocks-and-fusion", f"{_LAYER} --parallel.fusion 2 {_BLOCKS}", "memory.blocks", "fusion 2", "leave one"),
    predict("store-that-is-not-there", f"{_BLOCKS} --memory.store ROOT/nowhere", "memory.store", "nowhere", "folder"),
    predict("blocks-with-views", f"{_BLOCKS} --tta turns", "--tta", "turns", "--memory.blocks", "leave one out"),
    train("compiled-layers", f"{_LAYER} {_IDLE} --train.compile on", "train.compile", "parallel.halo", "exchange"),
    train("blocks-of-two-tiles", f"{_BLOCKS} --train.tiles_per_batch 2", "tiles_per_batch", "memory.blocks"),
)

_PIPELINES = "--parallel.stages 3"  # the good network has 17 layers

PIPELINES = (
    train("more-stages-than-ranks", "--parallel.stages 9", "parallel.stages", "9", "ranks", "start 9"),
    train("balance-of-two", f"{_PIPELINES} --parallel.balance [6,7]", "parallel.balance", "2 parts", "3", "auto"),
    train("recompute-of-two", f"{_PIPELINES} --parallel.recompute [always,never]", "2 parts", "3", "one word for all"),
    train("mesh-times-stages", f"{_EXCHANGE} --parallel.mesh [2,1] {_PIPELINES}", "stages", "3", "ranks"),
    replace(
        train("balance-that-does-not-sum", f"{_PIPELINES} --parallel.balance [4,4,4]", "[4,4,4]", "12", "17"),
        least_ranks=3,
    ),
    replace(
        train(
            "skip-torn-from-its-rank",
            f"{_PIPELINES} --parallel.schedule folded --parallel.balance [5,2,3,3,4]",
            "folded",
            "encoder0.stash from stage",
            "move the cuts",
        ),
        least_ranks=3,
    ),
    replace(
        train("stage-too-large", f"{_PIPELINES} --parallel.balance modelled --model.base_channels 120000", "stage"),
        least_ranks=3,
    ),
    replace(
        train("given-stage-too-large", f"{_PIPELINES} --parallel.balance [6,6,5] --model.base_channels 120000", "GiB"),
        least_ranks=3,
    ),
    *(
        replace(
            each("ranks-that-match-no-mesh", f"--tiling.grid 2 {typed}", "own nothing", "start 2", "idle_ranks true"),
            name=f"ranks-that-match-no-{word}",
            least_ranks=3,
        )
        for each in (train, predict)
        for word, typed in (
            ("mesh", f"{_EXCHANGE if each is train else '--parallel.halo exchange'} --parallel.mesh [1,2]"),
            ("pipeline", "--parallel.stages 2"),
        )
    ),
)

HUGE = 10**30


SIZES = (
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
)

SETTINGS = (*FLAGS, *VALUES, *HALO_MODES, *BLOCKS, *PIPELINES, *SIZES)
