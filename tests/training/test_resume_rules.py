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
from tiledseg.training.preparation import prepare
from tiledseg.training.resuming import NAMES_RUN, OTHER_RUN, RULES, begin, flat

OTHERS: dict[str, Any] = {
    "data.classes": [{"name": "a", "value": 0}, {"name": "b", "value": 1}, {"name": "c", "values": [2, 7]}],
    "data.bands": [3, 2, 1],
    "data.workers": 3,
    "tiling.grid": 3,
    "tiling.halo": 12,
    "model.norm": "pixel",
    "parallel.halo": "layer",
    "optimizer.name": "sgd",
    "optimizer.lr_factors": {"encoder*": 0.5},
    "optimizer.policy": {"name": "step", "size": 2},
    "train.epochs": 7,
    "train.tiles_per_step": 2,
    "train.images_per_step": 2,
    "train.loss": {"cross_entropy": 1.0, "dice": 0.5},
    "train.class_weights": {"1": 4.0},
    "train.seed": 9,
    "train.resume": "elsewhere",
    "train.skip_empty": True,
}
"""Other values of keys of every rule. What differs between the keys of a rule stands in its table alone."""


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
    preparation = replace(prepare(serial, 1 << 30, 1), user_config=config, config=config)
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
    """A key that no row names may change."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "resume.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    rules = [(key.strip("`"), rule) for keys, rule, _ in rows for key in keys.split(", ")]
    assert sorted(rules) == sorted((key, rule_of(key)) for key in RULES)
    assert RULES.keys() < set(KEYS)


@pytest.mark.parametrize("place", ["middle", "edge"])
def test_nothing_changed_is_nothing_recorded(material: Material, checkpoints: dict[str, Path], place: str) -> None:
    assert changed_by(material, checkpoints[place], config_of(material, material.root / "run")) == {}


@pytest.mark.parametrize("place", ["middle", "edge"])
@pytest.mark.parametrize("key", OTHERS)
def test_another_value(material: Material, checkpoints: dict[str, Path], key: str, place: str) -> None:
    config = config_of(material, material.root / "run")
    before = flat(config.record())[key]
    group, _, name = key.partition(".")
    setattr(getattr(config, group), name, OTHERS[key])
    assert flat(config.record())[key] != before
    if rule_of(key) == OTHER_RUN or (rule_of(key) == "between epochs" and place == "middle"):
        with pytest.raises(CheckpointError) as caught:
            changed_by(material, checkpoints[place], config)
        assert name in str(caught.value)
        known = "none" if key == "model.norm" else before  # what auto is there
        assert f"{'null' if known is None else known} there" in str(caught.value)
    else:
        wanted = {} if rule_of(key) == NAMES_RUN else {key: {"from": before, "to": OTHERS[key]}}
        assert changed_by(material, checkpoints[place], config) == wanted


def test_the_same_in_other_words(material: Material, checkpoints: dict[str, Path]) -> None:
    """Classes as records that say what the number said, a grid as two numbers; other names of classes change nothing
    that the weights have learned, names in another order do."""
    config = config_of(material, material.root / "run")
    config.data.classes = [{"name": f"class {k}", "value": k} for k in range(3)]
    assert changed_by(material, checkpoints["middle"], config) == {}
    config.tiling.grid = [2, 2]
    assert changed_by(material, checkpoints["middle"], config) == {"tiling.grid": {"from": 2, "to": [2, 2]}}
    config.data.classes = [{"name": name} for name in ("field", "road", "tree")]
    assert changed_by(material, checkpoints["middle"], config).keys() == {"data.classes", "tiling.grid"}
    config.data.classes = [{"name": name, "value": k} for k, name in enumerate(("class 0", "class 2", "class 1"))]
    with pytest.raises(CheckpointError, match=r"data\.classes"):
        changed_by(material, checkpoints["middle"], config)


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


@pytest.mark.parametrize(("there", "here"), [("fp64", "fp32"), ("fp32", "fp16"), ("fp16", "fp64")])
def test_another_precision_is_converted(material: Material, tmp_path: Path, there: str, here: str) -> None:
    config = config_of(material, tmp_path / "run", precision=there)
    config.data.val_images, config.data.val_labels = [], []
    assert run(config) == 0
    config.train = replace(config.train, epochs=2, precision=here)
    assert run(config) == 0
    assert find_checkpoint(tmp_path / "run").saved.step == 6
