"""The law for whole runs: one rank's losses, scores, weights and pictures, whatever the ranks share and how often they
stop.

A row of the table is a run (`what`), and ways of spreading it over ranks, one after the other (`hows`): with two ways,
the run is stopped half way and goes on in the other. `plain`: what one rank needs for it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import rasterio
import torch
from safetensors.torch import load_file

from tests.conftest import SIZE
from tests.foreign.modules import build_measured
from tests.law.cases import one_rank
from tests.law.runs import IMAGES, changed, check_same_run, configuration, copied, losses, run, summary
from tests.law.test_steps import marks
from tests.opens import opens
from tiledseg.architecture.presets import PRESETS
from tiledseg.architecture.unet import UNet
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.checkpoint.saved_state import LossScale
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, ModelConfig, OptimizerConfig
from tiledseg.errors import ConfigError, TiledsegError
from tiledseg.execution.agreement import check_finite
from tiledseg.models.network import build_modules
from tiledseg.training.optimizer import build_optimizer

pytestmark = pytest.mark.usefixtures("small_views", "without_plots")
Keys = dict[str, Any]


class Row(NamedTuple):
    ranks: tuple[int, ...]
    what: Keys
    hows: tuple[Keys, ...]
    plain: Keys = {}  # noqa: RUF012
    bound: float = 1e-10


def halo(mode: str, **more: Any) -> Keys:
    return {"parallel.halo": mode, **{f"parallel.{key}": value for key, value in more.items()}}


def stages(count: int, schedule: str = "1f1b", **more: Any) -> Keys:
    given = {"stages": count, "schedule": schedule, "balance": "modelled", **more}
    return {f"parallel.{key}": value for key, value in given.items()}


# A policy counts the steps of the whole run: at a constant rate two halves are one run.
CONSTANT: Keys = {"optimizer.policy": "constant", "optimizer.warmup_steps": 0}
SEVERAL: Keys = {"data.images": IMAGES, "data.labels": IMAGES, "train.images_per_step": 2, "optimizer.name": "sgd"}
LOSSES = {
    "cross_entropy": {"smoothing": 0.1}, "focal": 0.5, "dice": 1.0, "boundary": {"weight": 0.1, "radius": 5},
}  # fmt: skip
KEPT: Keys = {"train.class_weights": "median_frequency", "train.ema": 0.9, "train.best": "mean_f1"}
VALUES: list[Any] = [{"brightness": 0.3}, {"contrast": 0.3}, {"noise": 0.2}, {"drop_bands": 0.3}]
CHANGES: list[Any] = ["reflect", "turn", {"translate": 7}, {"scale": [0.8, 1.25]}, {"rotate": 40}, *VALUES]
POLYGONS: Keys = {
    "data.classes": [{"name": "ground"}, {"name": "roof"}, {"name": "pond"}],
    "data.labels": "labels.gpkg", "data.label_attribute": "kind", "data.background": "ground", "data.area": "area.gpkg",
    "data.val_images": [], "data.val_labels": [], "data.split": {"blocks": [3, 2], "gap": 3},
}  # fmt: skip
WINDOWS: Keys = {"train.windows": {"size": 32, "per_step": 3}, "train.augment": CHANGES}
SMALL: Keys = {**WINDOWS, "train.windows": {"size": 32, "per_step": 3, "halo": "none"}}
# A module of one input size, trained on windows and validated by crops.
CROPS: Keys = {
    "model": ModelConfig(build="tests.law.fixed_size:FixedSize", window=12, overlap=0.4, blend="cosine"),
    "tiling.grid": "auto",
    "train.windows": {"size": 12, "per_step": 3, "halo": "none"},
    "train.epochs": 2,
    "train.validate_every": 1,
}
SOMEBODY: Keys = {"model": ModelConfig(build="tests.foreign.modules:build", arguments={"width": 3})}
NORMED: Keys = {"model": ModelConfig(build="tests.foreign.modules:build", arguments={"width": 3, "norm": True})}
STILL: Keys = {"model": ModelConfig("unet", build="tests.foreign.modules:build_measured", arguments={"width": 3})}
EARLY: Keys = {"train.epochs": 12, "train.validate_every": 1, "train.early_stop": 2, "optimizer.name": "sgd"} | CONSTANT
FP16: Keys = {"train.precision": "fp16", "data.val_images": [], "data.val_labels": []} | CONSTANT
FP16 |= {"model": ModelConfig(levels=2, base_channels=4, dropout=0.2), "train.validate_every": 9}
WHOLE: Keys = {"tiling.grid": 1}
ALONE: Keys = halo("layer", mesh=[1, 1])

ROWS: dict[str, Row] = {
    "thirty steps": Row(
        (3,),
        {"train.epochs": 15, "train.tiles_per_step": 5, "train.validate_every": 5, "optimizer.name": "sgd"},
        ({"data.workers": 3, "train.tiles_per_batch": 2},),
    ),
    "exchange": Row(
        (2,), {"train.augment": CHANGES, "model.norm": "pixel", "optimizer.name": "sgd"}, (halo("exchange"),)
    ),
    "polygons": Row((2,), {**POLYGONS, "train.tiles_per_step": 4}, ({},)),
    "polygons in layer": Row((4,), {**POLYGONS, **CONSTANT}, (halo("layer"), halo("exchange") | {"tiling.halo": 24})),
    "statistics of a step": Row(
        (4,),
        {**SEVERAL, **CONSTANT, **KEPT, "train.loss": LOSSES, "model.norm": "batch"},
        (halo("layer", idle_ranks=True), halo("layer", mesh=[1, 1], idle_ranks=True) | {"tiling.grid": 4}),
        ALONE,
    ),
    "images in blocks": Row(
        (3,),
        {**SEVERAL, **CONSTANT, "model.norm": "batch", "train.augment": VALUES},
        (WHOLE | {"memory.blocks": 2}, halo("layer", mesh=[1, 1], idle_ranks=True)),
        ALONE,
    ),
    "statistics in float32": Row(
        (2,), {**SEVERAL, "model.norm": "batch", "train.precision": "fp32"}, (ALONE,), ALONE, 1e-5
    ),
    "fused": Row(
        (4,),
        {**CONSTANT, "model.norm": "instance", "optimizer.name": "sgd"},
        (halo("layer", fusion=3, overlap=True), halo("layer") | {"tiling.grid": [4, 3]}),
        WHOLE,
    ),
    "factors": Row(
        (4,),
        {
            **CONSTANT,
            **KEPT,
            "optimizer.lr_factors": {"encoder*": 0.1, "*.bias": 2.0},
            "optimizer.decay_norms": False,
            "optimizer.weight_decay": 0.1,
        },
        (stages(2), halo("layer") | {"tiling.grid": 4, "tiling.halo": 24}),
    ),
    "gpipe": Row(
        (3,), {**CONSTANT, "train.loss": LOSSES}, (stages(3, "gpipe", recompute="except_last"), {"tiling.grid": 2})
    ),
    "folded": Row((2,), {**CONSTANT, "train.ema": 0.9}, (stages(2, "folded"), {"tiling.grid": 2})),
    "rounds": Row((2,), {}, (stages(2, micro_batches=2, recompute="always"),)),
    "stages of exchange": Row((4,), {}, (stages(2, "gpipe", halo="exchange", mesh=[2, 1]),)),
    "stages of layer": Row((4,), CONSTANT, (stages(2, halo="layer", mesh=[2, 1], recompute=["always", "never"]), {})),
    "six stages": Row((6,), CONSTANT, (stages(6, "folded"), stages(3, idle_ranks=True))),
    "preset": Row(
        (6,),
        {**SEVERAL, **WHOLE, "model": ModelConfig(name="small", base_channels=1), "train.images_per_step": 3},
        (stages(6, halo="layer", mesh=[1, 1], balance=list(PRESETS["small"].balance)),),
    ),
    "windows": Row((4,), {**WINDOWS, "train.balance_classes": 0.5}, ({},)),
    "windows in stages": Row((4,), {**WINDOWS, "train.loss": {"cross_entropy": 1.0, "dice": 1.0}}, (stages(2),)),
    "small windows": Row((3,), {**SMALL, "train.skip_empty": True}, ({},)),
    "small windows with statistics": Row(
        (2,),
        {**SMALL, "model.norm": "batch", "optimizer.name": "sgd"},
        (halo("layer", idle_ranks=True),),
        ALONE,
    ),
    "windows of ratios": Row(
        (3,),
        {**WINDOWS, "train.windows": {"size": 16, "per_step": 2 * SIZE - 1}, "train.loss": LOSSES},
        ({"train.tiles_per_batch": 3},),
    ),
    "crops": Row((2,), CROPS, ({},), bound=1e-9),
    "tiles by class": Row(
        (4,),
        {
            "train.tiles_per_step": 3,
            "train.skip_empty": True,
            "train.balance_classes": 0.5,
            "train.epochs": 2,
            "train.augment_each": "tile",
            "train.augment": ["reflect", "turn", {"translate": 9}, {"noise": 0.1}],
            "train.validate_every": 2,
        },
        ({},),
    ),
    "somebody's": Row((2,), SOMEBODY | CONSTANT, (halo("exchange"), halo("layer"))),
    "somebody's norms": Row((2,), NORMED | {"optimizer.name": "sgd"}, (halo("layer"),), ALONE),
    "still statistics": Row((2,), STILL | {"model.freeze_norm": True, "tiling.grid": 3}, ({},), WHOLE),
    "early end": Row((2,), EARLY | {"train.best": "loss", "optimizer.lr": 1e-30}, (halo("layer"),)),
    "early end by a score": Row(
        (4,), EARLY | {"train.best": "mean_iou", "optimizer.lr": 0.3}, (stages(2, idle_ranks=True),), bound=1e-9
    ),
    "bfloat16": Row(
        (3,), {"train.precision": "bf16", "optimizer.name": "sgd"}, (stages(3, recompute="always"),), bound=1e-5
    ),
    "half precision": Row(
        (2,), FP16 | {"train.epochs": 6}, (halo("exchange", mesh=[1, 2]), stages(2, "gpipe"), {}), bound=2e-3
    ),
    "half precision in stages": Row((2,), FP16, (stages(2, recompute="always"), stages(2, "folded")), bound=2e-3),
    "half precision in blocks": Row((2,), FP16 | WHOLE | {"train.epochs": 3}, ({"memory.blocks": 2},), bound=5e-3),
}


def of(shared: Path, name: str, keys: Keys) -> Config:
    """The configuration with paths in the shared folder."""
    keys = dict(keys)
    for key in ("images", "labels", "val_images", "val_labels", "area"):
        value, word = keys.get(f"data.{key}"), key.removesuffix("s") if key == "images" else key
        if isinstance(value, int):
            ends = ["", *(f"-{number}" for number in range(1, value))]
            keys[f"data.{key}"] = [str(shared / f"{word}{end}.tif") for end in ends]
        elif isinstance(value, str):
            keys[f"data.{key}"] = str(shared / value) if key == "area" else [str(shared / value)]
    return configuration(shared, name, keys)


def in_ways(shared: Path, name: str, row: Row, mesh: Mesh) -> list[dict[str, Any]]:
    """The run over the ranks: each way goes on where the one before it has stopped."""
    config = of(shared, name, row.what)
    for number, how in enumerate(row.hows, start=1):
        epochs = config.train.epochs * number // len(row.hows)
        lines = run(changed(config, {**how, "train.epochs": epochs}), mesh)
    return lines


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of a run in half precision overflow, the others not."""
    monkeypatch.setattr("tiledseg.training.trainer.LossScale", lambda: LossScale(2.0**20))


@pytest.mark.mpi
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(row.ranks)) for name, row in ROWS.items()])
def test_a_run_is_that_of_one_rank(
    name: str, shared: Path, meshes: dict[str, Mesh], request: pytest.FixtureRequest
) -> None:
    row = ROWS[name]
    if SIZE not in row.ranks:
        pytest.skip(f"not for {SIZE} ranks")
    if name in ("half precision", "half precision in stages"):
        request.getfixturevalue("scale")
    mesh = meshes["mpi" if len(name) % 2 else "gloo"]
    if name == "crops" and mesh.device.type == "cuda" and not torch.backends.cuda.is_built():
        pytest.skip("torch's CPU build has no generator of a GPU, pretended or not")
    plain = f"{name} alone"
    wanted = mesh.on_root(lambda: run(changed(of(shared, plain, row.what), row.plain), one_rank()))
    found = in_ways(shared, name, row, mesh)
    check_same_run(shared / name, shared / plain, row.bound)
    if len(losses(wanted)) == 30:
        assert losses(wanted)[-1] < 0.95 * losses(wanted)[0], "the network learns, so the comparison says something"
    if name == "still statistics":
        weights = load_file(find_checkpoint(shared / name).path / "model.safetensors")
        assert sorted(weights) == sorted(build_measured(4, 3, 3).state_dict()), "names are the author's"
        assert int(weights["stem.norm.num_batches_tracked"]) == 0
    if "early" in name:
        assert summary(shared / plain)["stopped_early"]
    if name in ("half precision", "half precision in stages"):
        assert [line["skipped"] for line in wanted] == [True, True, *([False] * (len(wanted) - 2))]
        assert [line["loss_scale"] for line in wanted[:3]] == [2.0**20, 2.0**19, 2.0**18]
        scales = [find_checkpoint(shared / each).saved.loss_scale for each in (name, plain)]
        assert scales == [LossScale(2.0**18, len(wanted) - 2)] * 2
    check_stages(found, row.hows[-1].get("parallel.stages", 1))


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ROWS["half precision"].hows, ids=str)
def test_a_stopped_run_in_half_precision_goes_on_exactly(
    how: Keys, shared: Path, meshes: dict[str, Mesh], scale: None
) -> None:
    """Over the same ranks: whole steps overflow before the stop; the scale and the weights have the same bits after."""
    for name, ends in (("through", (6,)), ("stopped", (3, 6))):
        for epochs in ends:
            run(of(shared, f"{name} {how}", FP16 | how | {"train.epochs": epochs}), meshes["gloo"])
    check_same_run(shared / f"stopped {how}", shared / f"through {how}", 0.0)


def check_stages(lines: list[dict[str, Any]], count: int) -> None:
    for line in lines[-1:] if count > 1 else ():
        if "loss" in line:
            assert len(line["stage_seconds"]) == count
            assert all(seconds > 0 for seconds in line["stage_seconds"])
            assert 0 <= line["bubble_share"] < 1
            assert line["pipeline_bytes"] > 0 < line["pipeline_messages"]


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_class_weights_are_counted_once(shared: Path, meshes: dict[str, Mesh]) -> None:
    """Count the one image by hand: pixels that are valid in the image too. A run that goes on does not look again."""
    config = of(shared, "weights", {**CONSTANT, "train.class_weights": "median_frequency", "train.epochs": 2})
    run(changed(config, {"train.epochs": 1}), meshes["gloo"])
    run(config, meshes["gloo"])
    with rasterio.open(shared / "image.tif") as image, rasterio.open(shared / "labels.tif") as labels:
        seen = labels.read(1)[(image.read_masks() > 0).any(0)]
    shares = [float(np.mean(seen == k)) for k in range(3)]
    expected = [sorted(shares)[1] / share for share in shares]
    assert find_checkpoint(shared / "weights").saved.class_weights == pytest.approx(expected, rel=1e-14)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_run_that_got_more_images_is_that_of_one_rank(shared: Path, meshes: dict[str, Mesh]) -> None:
    """One image for two epochs, then two for four, by a cosine: losses, rates and the end."""
    mesh = meshes["gloo"]

    def grown(name: str, on: Mesh) -> list[dict]:
        run(of(shared, name, {"train.epochs": 2, "train.validate_every": 9}), on)
        return run(of(shared, name, {"data.images": 2, "data.labels": 2, "train.epochs": 4}), on)

    mesh.on_root(lambda: grown("grown alone", one_rank()))
    assert len(losses(grown("grown", mesh))) == 6
    check_same_run(shared / "grown", shared / "grown alone", 1e-10)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_checkpoint_is_read_as_often_as_by_one_rank(shared: Path, meshes: dict[str, Mesh]) -> None:
    """Each of its files, by all ranks together; the losses are those of a run never stopped, to the last bit. What the
    law leaves free may change, and is recorded."""
    mesh, keys = meshes["gloo"], {**CONSTANT, "train.ema": 0.9, "train.keep_checkpoints": 9}

    def averaged(name: str, epochs: int) -> Config:
        return of(shared, name, {**keys, "train.epochs": epochs})

    run(averaged("read", 2), mesh)
    copied(shared / "read", "read alone", mesh)
    checkpoint, found = Path("checkpoints", "step-000002"), []
    by_one = mesh.on_root(
        lambda: opens(shared / "read alone" / checkpoint, lambda: run(averaged("read alone", 3), one_rank()))
    )
    counted = mesh.communicator.gather_objects(
        opens(shared / "read" / checkpoint, lambda: found.extend(run(averaged("read", 3), mesh)))
    )
    assert sum(counted, Counter()) == by_one
    assert min(by_one[f"{name}.safetensors"] for name in ("model", "optimizer", "average")) >= 1
    assert losses(found) == losses(run(averaged("read through", 3), mesh))
    onward = changed(averaged("read", 4), {"data.workers": 3, "tiling.grid": 4, "tiling.halo": 24})
    run(onward, mesh)
    recorded = find_checkpoint(shared / "read").saved.resumed
    assert [entry.step for entry in recorded] == [2, 3]
    assert {"data.workers", "tiling.grid", "tiling.halo"} <= recorded[-1].changed.keys()


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_all_ranks_agree_that_one_of_them_is_not_finite(meshes: dict[str, Mesh]) -> None:
    """Else that one would stop, and the others wait for it."""
    mesh = meshes["gloo"]
    network = build_modules(UNet(levels=1, base_channels=2), 0)
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    check_finite(network, optimizer, mesh, 4)
    if mesh.rank == mesh.size - 1:
        with torch.no_grad():
            next(network.parameters()).view(-1)[0] = float("inf")
    with pytest.raises(TiledsegError, match="is not finite after step 5; its checkpoint is not written"):
        check_finite(network, optimizer, mesh, 5)


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2, 3)
def test_weights_that_differ_between_ranks_are_refused_on_all(shared: Path, meshes: dict[str, Mesh]) -> None:
    config = of(shared, "differing", {"model": ModelConfig(build="tests.foreign.modules:by_rank")})
    with pytest.raises(ConfigError, match=r"rank 1 has other weights than rank 0, from .*by_rank"):
        run(config, meshes["gloo"])
    meshes["gloo"].communicator.barrier()
    assert not (shared / "differing" / "checkpoints").exists()


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", [{}, halo("exchange"), halo("layer"), stages(2)], ids=str)
def test_a_network_that_is_not_its_graph_ends_on_all_ranks(how: Keys, shared: Path, meshes: dict[str, Mesh]) -> None:
    """Not where the check is switched off."""
    sly = {
        "model": ModelConfig(build="tests.foreign.modules:in_training"),
        "train.epochs": 1,
        "train.validate_every": 1,
    }
    config = of(shared, f"sly {how}", sly | how)
    with pytest.raises(ConfigError, match="SmallOnly computes in training what its graph does not"):
        run(config, meshes["gloo"])
    meshes["gloo"].communicator.barrier()
    if not how:
        assert len(losses(run(changed(config, {"model.verify": False}), meshes["gloo"]))) == 1
