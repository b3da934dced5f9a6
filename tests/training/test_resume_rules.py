"""Each key of the configuration where a run goes on: as the table says, between epochs and in the middle of one."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.crash.runs import Material
from tests.training.test_start import config_of, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.config.run import Config
from tiledseg.errors import CheckpointError
from tiledseg.training.preparing.preparation import prepare
from tiledseg.training.resuming import NAMES_RUN, OTHER_RUN, RULES, begin, flat

OTHERS: dict[str, Any] = {
    "data.classes": [{"name": "a", "value": 0}, {"name": "b", "value": 1}, {"name": "c", "values": [2, 7]}],
    "data.warp": True,
    "data.ignore_index": 254,
    "data.nodata": 0.0,
    "data.bands": [3, 2, 1],
    "data.references": True,
    "data.normalize": False,
    "data.workers": 3,
    "data.prefetch": 5,
    "tiling.grid": 3,
    "tiling.halo": 12,
    "model.levels": 3,
    "model.convs_per_level": 2,
    "model.kernel": 5,
    "model.base_channels": 5,
    "model.padding": "valid",
    "model.norm": "pixel",
    "model.upsampling": "nearest",
    "model.dropout": 0.5,
    "parallel.exact": False,
    "parallel.halo": "layer",
    "parallel.mesh": [1, 1],
    "parallel.fusion": 2,
    "parallel.overlap": True,
    "parallel.stages": 2,
    "parallel.balance": [9, 8],
    "parallel.schedule": "gpipe",
    "parallel.micro_batches": 2,
    "parallel.recompute": "always",
    "parallel.idle_ranks": True,
    "parallel.transport": "gloo",
    "parallel.deadline": 60.0,
    "parallel.machine": "summit",
    "parallel.auto": ["tiling.grid"],
    "memory.budget": "16GiB",
    "memory.recompute": "compact",
    "memory.blocks": 2,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.5,
    "optimizer.scale_lr": "linear",
    "optimizer.lr_factors": {"encoder*": 0.5},
    "optimizer.weight_decay": 0.5,
    "optimizer.decay_norms": False,
    "optimizer.policy": {"name": "step", "size": 2},
    "optimizer.warmup_steps": 9,
    "optimizer.clip_norm": 1.0,
    "train.epochs": 7,
    "train.tiles_per_step": 2,
    "train.images_per_step": 2,
    "train.loss": {"cross_entropy": 1.0, "dice": 0.5},
    "train.ema": 0.9,
    "train.largest_loss": 50.0,
    "train.best": "mean_iou",
    "train.class_weights": {"1": 4.0},
    "train.tiles_per_batch": 2,
    "train.compile": True,
    "train.precision": "bf16",
    "train.seed": 9,
    "train.checkpoint_every": 7,
    "train.keep_checkpoints": 1,
    "train.validate_every": 2,
    "train.resume": "elsewhere",
    "train.deterministic": False,
    "train.skip_empty": True,
    "train.balance_classes": 0.5,
    "train.augment": [{"noise": 0.1}],
    "train.augment_each": "tile",
    "run.output": "elsewhere",
    "run.verbosity": 2,
    "run.panels": 0,
}
BESIDE: dict[str, tuple[str, Any]] = {
    "train.augment_each": ("train.augment", [{"noise": 0.1}]),
}
"""What a key needs, without which it would be ignored."""
ELSEWHERE = {"data.images", "data.labels", "data.val_images", "data.val_labels", "model.name"}
ELSEWHERE |= {"data.label_layer", "data.label_attribute", "data.background", "data.warp_images", "data.area"}
ELSEWHERE |= {
    f"data.{key}" for key in ("split", "split_share", "split_gap", "split_seed")
}  # tests/training/test_area_runs.py
ELSEWHERE |= {f"model.{key}" for key in ("freeze_norm", "encoder", "pretrained", "image_mean", "edge_band")}
ELSEWHERE |= {f"model.{key}" for key in ("build", "arguments", "verify")}
ELSEWHERE |= {f"train.{key}" for key in ("early_stop",)}
ELSEWHERE |= {"optimizer.momentum"}  # of sgd: test_momentum_starts_anew
ELSEWHERE |= {"memory.store", "memory.offload"}  # of no use without each other: tests/test_train.py, test_offloading
ELSEWHERE |= {f"train.{key}" for key in ("sampling", "window", "windows_per_step", "window_halo")}
"""Keys that do not change alone: in `test_resume_sources`, `test_first_weights`, `test_build`, `test_windows`,
`test_verify`."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.make(tmp_path_factory.mktemp("rules"))


@pytest.fixture(scope="module")
def checkpoints(material: Material) -> dict[str, Path]:
    """One in the middle of an epoch, one at its end."""
    folder = material.root / "run"
    assert run(config_of(material, folder)) == 0
    return {"middle": folder / "checkpoints" / "step-000002", "edge": folder / "checkpoints" / "step-000003"}


def changed_by(material: Material, checkpoint: Path, config: Config) -> dict[str, Any]:
    """What going on with this configuration records."""
    serial = replace(config, parallel=Config().parallel)  # one rank cannot have all that these keys ask for
    if config.train.images_per_step > 1:  # and not both of these keys at once
        serial.train = replace(config.train, tiles_per_step=None)
    preparation = replace(prepare(serial, 1 << 30, 1), asked=config, config=config)
    beginning = begin(find_checkpoint(checkpoint), preparation)
    if not beginning.resumed:
        return {}
    assert len(beginning.resumed) == 1
    assert beginning.resumed[0].step == int(checkpoint.name[-6:])
    assert all(key in beginning.warnings[0] for key in beginning.resumed[0].changed)
    return beginning.resumed[0].changed


KEYS = [f"{group.name}.{f.name}" for group in fields(Config) for f in fields(group.default_factory)]  # type: ignore


def rule_of(key: str) -> str:
    """Return the rule of a key as docs/reference/resume.md names it."""
    rule = RULES.get(key, "may change")
    return rule if rule in (OTHER_RUN, NAMES_RUN, "may change") else "between epochs"


def test_the_documentation_has_the_rule_of_every_key_and_why() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "resume.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    rules = [(key.strip("`"), rule) for keys, rule, _ in rows for key in keys.split(", ")]
    assert sorted(rules) == sorted((key, rule_of(key)) for key in KEYS)
    assert RULES.keys() < set(KEYS)


def test_every_key_is_tried() -> None:
    assert OTHERS.keys() | ELSEWHERE == set(KEYS)
    assert not OTHERS.keys() & ELSEWHERE


@pytest.mark.parametrize("place", ["middle", "edge"])
def test_nothing_changed_is_nothing_recorded(material: Material, checkpoints: dict[str, Path], place: str) -> None:
    assert changed_by(material, checkpoints[place], config_of(material, material.root / "run")) == {}


@pytest.mark.parametrize("place", ["middle", "edge"])
@pytest.mark.parametrize("key", OTHERS)
def test_another_value(material: Material, checkpoints: dict[str, Path], key: str, place: str) -> None:
    config = config_of(material, material.root / "run")
    before = flat(config.record())[key]
    beside = dict([BESIDE[key]]) if key in BESIDE else {}
    first = {other: flat(config.record())[other] for other in beside}
    for changed, value in {**beside, key: OTHERS[key]}.items():
        group, _, name = changed.partition(".")
        setattr(getattr(config, group), name, value)
    assert flat(config.record())[key] != before
    if rule_of(key) == OTHER_RUN or (rule_of(key) == "between epochs" and place == "middle"):
        with pytest.raises(CheckpointError) as caught:
            changed_by(material, checkpoints[place], config)
        assert name in str(caught.value)
        known = {"model.norm": "none", "model.upsampling": "transposed"}.get(key, before)  # what auto is there
        assert str(known if known is not None else "null") in str(caught.value)
        assert "in this run" in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        wanted = {} if rule_of(key) == NAMES_RUN else {key: {"from": before, "to": flat(config.record())[key]}}
        wanted |= {other: {"from": first[other], "to": value} for other, value in beside.items()}
        assert changed_by(material, checkpoints[place], config) == wanted


def test_the_same_in_other_words(material: Material, checkpoints: dict[str, Path]) -> None:
    """Classes as records that say what the number said, a grid as two numbers, a nodata value that is no number."""
    config = config_of(material, material.root / "run")
    config.data.classes = [{"name": f"class {k}", "value": k} for k in range(3)]
    assert changed_by(material, checkpoints["middle"], config) == {}
    config.tiling.grid = [2, 2]
    assert changed_by(material, checkpoints["middle"], config) == {"tiling.grid": {"from": 2, "to": [2, 2]}}


def test_classes_are_named_while_a_run_goes_on(material: Material, checkpoints: dict[str, Path]) -> None:
    """Names and colours change nothing that the weights have learned; names in another order do."""
    config = config_of(material, material.root / "run")
    config.data.classes = [{"name": name} for name in ("field", "road", "tree")]
    assert changed_by(material, checkpoints["middle"], config).keys() == {"data.classes"}
    config.data.classes = [{"name": name, "value": k} for k, name in enumerate(("class 0", "class 2", "class 1"))]
    with pytest.raises(CheckpointError, match=r"data\.classes"):
        changed_by(material, checkpoints["middle"], config)


def test_other_images_to_validate_on(material: Material, checkpoints: dict[str, Path]) -> None:
    config = config_of(material, material.root / "run")
    config.data.val_images, config.data.val_labels = [], []
    assert changed_by(material, checkpoints["middle"], config).keys() == {"data.val_images", "data.val_labels"}


@pytest.mark.parametrize(("there", "here"), [(0.9, 0.0), (0.0, 0.9)])
def test_momentum_starts_anew(material: Material, tmp_path: Path, there: float, here: float) -> None:
    """Neither an old buffer comes back later, nor is one asked for that is not there."""
    config = config_of(material, tmp_path / "run")
    config.optimizer = replace(config.optimizer, name="sgd", momentum=there)
    assert run(config) == 0
    config.train.epochs = 2
    config.optimizer = replace(config.optimizer, momentum=here)
    assert run(config) == 0
    newest = find_checkpoint(tmp_path / "run")
    held = load_file(newest.path / "optimizer.safetensors")
    assert {name.partition(".")[2] for name in held} == ({"momentum_buffer"} if here else set())
    assert [entry.changed["optimizer.momentum"] for entry in newest.saved.resumed] == [{"from": there, "to": here}]


@pytest.mark.parametrize(
    ("there", "here"), [("fp64", "fp32"), ("fp32", "fp64"), ("fp32", "bf16"), ("fp32", "fp16"), ("fp16", "fp64")]
)
def test_another_precision_is_converted(material: Material, tmp_path: Path, there: str, here: str) -> None:
    config = config_of(material, tmp_path / "run", precision=there)
    config.data.val_images, config.data.val_labels = [], []
    assert run(config) == 0
    config.train = replace(config.train, epochs=2, precision=here)
    assert run(config) == 0
    assert find_checkpoint(tmp_path / "run").saved.step == 6
