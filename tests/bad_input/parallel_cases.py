"""Broken ways of spreading the work: halo modes and pipelines."""

from __future__ import annotations

from dataclasses import replace

from tests.bad_input.case import predict, train

_LAYER = "--train.tiles_per_step null --parallel.halo layer"
_EXCHANGE = "--train.tiles_per_step null --parallel.halo exchange"
_IDLE = "--parallel.idle_ranks true"  # of three ranks

HALO_MODES = (
    train("mode-of-older-versions", "--parallel.halo scatter", "parallel.halo", "scatter", "use exchange"),
    train("mode-with-a-batch-of-tiles", "--parallel.halo layer", "tiles_per_step", "2", "layer", "images_per_step"),
    train("mesh-without-a-mode", "--parallel.mesh [2,1]", "parallel.mesh", "[2, 1]", "read", "exchange or layer"),
    train("mesh-of-more-ranks-than-the-job", f"{_EXCHANGE} --parallel.mesh [9,9]", "[9, 9]", "81", "start more ranks"),
    train("mesh-finer-than-the-grid", f"{_LAYER} --parallel.mesh [3,1]", "parallel.mesh", "3", "mesh"),
    train("fusion-without-a-mode", "--parallel.fusion 2", "parallel.fusion", "2", "read", "layer"),
    train("overlap-without-a-mode", "--parallel.overlap true", "parallel.overlap", "read", "layer"),
    train(
        "more-images-than-there-are", f"{_LAYER} {_IDLE} --train.images_per_step 2", "images_per_step", "2", "at most"
    ),
    train("two-batches", "--train.images_per_step 2", "tiles_per_step", "images_per_step", "give one"),
    train("norm-that-exchange-changes", f"{_EXCHANGE} {_IDLE} --model.norm group", "model.norm", "group", "halo layer"),
    predict("mesh-of-more-ranks-than-the-job", "--parallel.halo layer --parallel.mesh [9,9]", "[9, 9]", "81"),
)

_BLOCKS = "--memory.blocks 2"
_OFFLOAD = "--memory.offload all --memory.store ROOT/folder"

BLOCKS = (
    train(
        "recompute-beyond-the-budget", "--memory.recompute all --memory.budget 1kB", "memory.budget", "recompute all"
    ),
    train("recompute-in-blocks", f"{_BLOCKS} --memory.recompute all", "memory.recompute", "memory.blocks"),
    predict("map-store-without-blocks", "--memory.store ROOT", "--memory.store", "give --memory.blocks"),
    train("store-without-blocks", "--memory.blocks none --memory.store ROOT/folder", "memory.store", "memory.blocks"),
    train("offload-to-memory", "--memory.offload all", "memory.offload", "memory.store is host", "local disk"),
    train("offload-in-blocks", f"{_BLOCKS} {_OFFLOAD}", "memory.offload", "memory.blocks", "leave offload out"),
    train(
        "offload-to-no-disk", "--memory.offload all --memory.store /proc", "memory.store is /proc", "no folder to write"
    ),
    train("offload-beyond-the-budget", f"{_OFFLOAD} --memory.budget 1kB", "memory.budget", "memory.offload all"),
    train("offload-by-choice-to-memory", "--memory.offload auto", "memory.offload is auto", "memory.store is host"),
    train(
        "offload-without-a-choice",
        "--memory.offload auto --memory.store ROOT/folder --memory.recompute all",
        "memory.offload is auto",
        "memory.recompute is all",
    ),
    train("blocks-and-fusion", f"{_LAYER} --parallel.fusion 2 {_BLOCKS}", "memory.blocks", "fusion 2", "leave one"),
    train(
        "blocks-and-overlap",
        f"{_LAYER} --parallel.overlap true {_BLOCKS}",
        "memory.blocks",
        "overlap true",
        "leave one",
    ),
    train("blocks-in-exchange", f"{_EXCHANGE} {_BLOCKS}", "memory.blocks", "parallel.halo exchange", "layer or read"),
    predict("store-that-is-not-there", f"{_BLOCKS} --memory.store ROOT/nowhere", "memory.store", "nowhere", "folder"),
    predict("blocks-with-views", f"{_BLOCKS} --tta turns", "--tta", "turns", "--memory.blocks", "leave one out"),
    train("compiled-in-blocks", f"{_BLOCKS} --train.compile on", "train.compile", "memory.blocks", "leave it out"),
    train("compiled-layers", f"{_LAYER} {_IDLE} --train.compile on", "train.compile", "parallel.halo", "exchange"),
    train("compiled-and-recomputed", "--train.compile on --memory.recompute all", "train.compile", "memory.recompute"),
    train("blocks-of-two-tiles", f"{_BLOCKS} --train.tiles_per_batch 2", "tiles_per_batch", "memory.blocks"),
)

_PIPELINES = "--parallel.stages 3"  # the good network has 17 layers

PIPELINES = (
    train("more-stages-than-ranks", "--parallel.stages 9", "parallel.stages", "9", "ranks", "start 9"),
    train("schedule-of-older-versions", f"{_PIPELINES} --parallel.schedule eager", "parallel.schedule", "use 1f1b"),
    train("schedule-without-stages", "--parallel.schedule gpipe", "parallel.schedule", "gpipe", "parallel.stages is 1"),
    train("recompute-without-stages", "--parallel.recompute always", "parallel.recompute", "always", "stages is 1"),
    train("balance-of-two", f"{_PIPELINES} --parallel.balance [6,7]", "parallel.balance", "2 parts", "3", "auto"),
    train("balance-not-folded", f"{_PIPELINES} --parallel.schedule folded --parallel.balance [4,4,5]", "3 parts", "5"),
    train("recompute-of-stages", "--memory.recompute always", "recompute is always", "stages is 1"),
    train(
        "recompute-by-two-words",
        f"{_PIPELINES} --memory.recompute except_last --parallel.recompute always",
        *("memory.recompute is except_last", "parallel.recompute is always", "leave one"),
    ),
    train("memory-recompute-of-two", f"{_PIPELINES} --memory.recompute [always,never]", "recompute", "2 parts"),
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
        train(
            "stage-too-large",
            f"{_PIPELINES} --parallel.balance modelled --model.base_channels 120000",
            "stage",
            "bytes",
            "more stages",
        ),
        least_ranks=3,
    ),
    replace(
        train(
            "given-stage-too-large",
            f"{_PIPELINES} --parallel.balance [6,6,5] --model.base_channels 120000",
            "stage 1 of parallel.balance",
            "GiB",
            "move layers",
        ),
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
