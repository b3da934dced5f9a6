"""The configuration, which checks itself group by group: values of keys, and keys that need others."""

import math
import re
import shlex
from dataclasses import Field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.answers import refusal, refuse
from tests.bad_input.materials import good_config
from tests.small_files import tree, write_raster, write_yaml
from tiledseg.commands.options import (
    GROUPS,
    KEYS,
    parse_config,
)
from tiledseg.config.checks import check_values, range_of
from tiledseg.config.run import Config, ModelConfig, ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.planning.walk.mode_cost import fusion_word
from tiledseg.train import main


def test_the_words_of_a_fusion() -> None:
    """What `plan` prints is what a run takes: its job scripts too."""
    assert ParallelConfig(halo="layer", fusion="auto").fusion_depth() is None
    whole = ParallelConfig(halo="layer", fusion="whole")
    whole.check()
    assert fusion_word(whole.fusion_depth() or 0) == "whole"


def test_the_defaults_need_images_only() -> None:
    checked()
    with pytest.raises(ConfigError, match=r"data\.images is empty"):
        Config().check()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("data.classes", (1, 0, -1, 256)),
        ("data.bands", ([], [0], [1, 1], [-3])),
        ("tiling.grid", (0, -2, [1], [1, 2, 3], [0, 1], "coarse", "4")),
        ("tiling.halo", (-1, "wide", 1.5)),
        ("parallel.halo", ("", "none")),
        ("memory.budget", (0, -1, "", "much", "0GiB", "1e9", 2**63, 1.5)),
        ("optimizer.policy", ("linear", {}, {"name": "cosine", "power": 1.0}, {"name": "step", "size": 1.5})),
        ("optimizer.policy", ({"name": "step", "size": 0}, {"name": "step", "gamma": 0.0})),
        ("optimizer.policy", ({"name": "step", "gamma": -1.0}, {"name": "polynomial", "power": 0.0})),
        ("train.loss", ("lovasz", {}, {"dice": 0.0}, {"dice": 1.0, "hinge": 1.0})),
        ("train.loss", ({"name": "focal", "gamma": -1.0}, {"focal": {"alpha": 1}}, {"name": "hinge"}, {"name": 3})),
        ("train.loss", ({"tversky": {"alpha": -1.0}}, {"tversky": {"beta": 0.0}}, {"dice": {"weight": 0.0}})),
        ("train.loss", ({"boundary": {"radius": 0}}, {"boundary": {"radius": 65}}, {"edges": {"radius": 1.5}})),
        ("train.loss", ({"cross_entropy": {"smoothing": -0.1}}, {"cross_entropy": {"smoothing": 1.0}})),
        ("train.class_weights", ("median", [-1.0, 2.0], {"1": 1e9})),
        ("run.output", ("",)),
    ],
)
def test_values_that_cannot_be(key: str, values: tuple[Any, ...]) -> None:
    group, name = key.split(".")
    for value in values:
        config = checked()
        config.tiling.grid = 2
        setattr(getattr(config, group), name, value)
        with refusal(ConfigError, key, str(value)) as caught:
            config.check()
        assert re.search("; give |is empty", str(caught.value))


STORE, WINDOWS = "--memory.store /scratch", "--train.windows '{size: 4, per_step: 2}'"


def checked(*arguments: str) -> Config:
    config = parse_config([*arguments, "--data.images=a.tif", "--data.labels=b.tif"], "train", "")
    config.check()
    return config


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--parallel auto", "unrecognized arguments: --parallel"),
        ("--train.epoch 3", "unrecognized arguments: --train.epoch 3; did you mean --train.epochs? (see train --help)"),
        ("--train.epochs", "argument --train.epochs: expected one argument (see train --help)"),
        ("--train.epochs x", "train.epochs is x; give a whole number or auto (see train --help)"),
        ("--config", "argument --config: expected one argument (see train --help)"),
        ("stray", "unrecognized arguments: stray (see train --help)"),
        ("--parallel.auto [parallel.halo]", "there is parallel.auto, of an older version: leave it out"),
        ("--optimizer.momentum 0.5", "optimizer.name is adamw; leave it out, or give optimizer.name sgd"),
        (f"{WINDOWS.replace('size: 4, ', '')}", "train.windows: size is not given; give a value"),
        (f"{WINDOWS.replace('4', 'a')}", "train.windows: size is a; give a whole number"),
        (
            f"{WINDOWS.replace('size', 'side')}",
            "train.windows has the unknown key 'side'; give some of size, per_step, halo",
        ),
        (f"{WINDOWS} --train.augment [turn] --train.augment_each tile", "train.windows are given, each of which has"),
        ("--memory.store ''", "memory.store is empty; give host, or a folder on a local disk"),
        ("--data.valid a.tif --data.val_images b.tif --data.val_labels c.tif", "name the rasters of both by a pattern"),
        ("--model.levels 010", "--model.levels is 010, which YAML takes for 8"),
        (f"{STORE} --parallel.halo exchange", "memory.store is /scratch, but with exchange"),
        (f"{STORE} --parallel.stages 2", "nothing would be stored there"),
        (f"{STORE} --parallel.halo layer --parallel.fusion 2", "nothing would be stored there"),
    ],
)
def test_what_cannot_be_is_one_line(line: str, words: str) -> None:
    checked("--optimizer.momentum=0.5", "--optimizer.name=sgd", *STORE.split())
    with refusal(ConfigError, words):
        checked(*shlex.split(line))


NEEDY = """--data.valid_values [1]
--parallel.mesh [2,1]
--parallel.fusion 2
--parallel.overlap true
--parallel.stages 1 --parallel.balance [3,4]
--parallel.schedule gpipe
--parallel.micro_batches 4
--parallel.recompute always
--parallel.idle_ranks true
--memory.blocks 2 --memory.recompute all
--memory.blocks 2 --memory.offload all
--memory.blocks none --memory.store /scratch
--model.build a:b --model.name segnet
--model.window 8 --model.freeze_norm true
--model.series 3
--model.overlap 0.3
--model.blend mean
--model.ends mirrored
--optimizer.momentum 0.5
--optimizer.decay_norms false
--train.early_stop 3
--train.skip_empty true
--train.balance_classes 0.5
--train.augment_each tile
--train.windows '{size: 4, per_step: 2}' --train.tiles_per_step 2
--train.windows '{size: 4, per_step: 2}' --train.images_per_step 2""".splitlines()


@pytest.mark.parametrize("line", NEEDY)
def test_a_key_that_another_leaves_without_effect_is_refused(line: str) -> None:
    key, group = line.split()[-2][2:], line.split()[-2][2:].partition(".")[0]
    with pytest.raises(ConfigError, match=rf"^{key} is .*, but {group}\.\w+ is .*; leave it out, or give {group}\."):
        checked(*shlex.split(line))


def test_each_key_with_a_need_is_among_them() -> None:
    needy = {key for key, field in KEYS.items() if field.metadata.get("need")}
    assert {line.split()[-2][2:] for line in NEEDY} == needy


FREE_TEXT = ("data.images", "data.labels", "data.val_images", "data.val_labels", "train.resume", "run.output")
VALUES = {
    "null": "null",
    "NaN": ".nan",
    "infinite": "-.inf",
    "overflowing": "1e400",
    "negative": "-1",
    "2^63": str(2**63),
    "2^64": str(2**64),
    "huge fraction": "1e300",
    "word": "many",
    "list": "[7, 8, 9]",
    "list of huge": f"[{2**63}, {2**63}]",
    "nested list": "[[1]]",
    "map": "{a: {b: 1}}",
    "date": "2026-01-01",
    "NUL": '"a\\0b"',
}


FITTING = {("train.class_weights", "list"): "[7, 8, 9] are weights of the three classes"}
NEVER = ("map", "NUL", "nested list")


def may_hold(name: str, key: Field[Any], kind: str) -> bool:
    """Values that a key takes, or that mean a file which may be there."""
    if kind == "null":
        return "None" in str(key.type)
    return (name, kind) in FITTING or (name in FREE_TEXT and kind not in NEVER)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values")
    for name in ("image", "labels"):
        write_raster(path / f"{name}.tif", np.ones((1, 48, 48), np.uint8))
    good = good_config(path)
    write_yaml(path / "good.yaml", {**good, "run": {**good["run"], "output": str(path / "out")}})
    return path


@pytest.mark.parametrize("name", KEYS)
def test_a_key_refuses_what_it_cannot_hold(name: str, root: Path) -> None:
    tried, before = 0, tree(root)
    for kind, text in VALUES.items():
        if may_hold(name, KEYS[name], kind):
            continue
        words = ["--config", str(root / "good.yaml"), f"--{name}={text}"]
        assert "unforeseen" not in refuse(lambda words=words: main(words), name.partition(".")[2]), kind
        tried += 1
    assert tree(root) == before
    assert tried >= 3


def test_every_number_has_a_range() -> None:
    """Declared beside the field; without one, nothing would stop a size beyond what memory or an index can hold."""
    numeric = {name: key for name, key in KEYS.items() if re.search(r"\b(int|float)\b", str(key.type))}
    assert len(numeric) >= 27
    assert len(KEYS) <= 100, "a key that one word alone knows is a field of that word"
    assert [name for name, key in numeric.items() if range_of(key) is None] == []
    whole = [key for key in numeric.values() if "int" in str(key.type) and "float" not in str(key.type)]
    assert all(range_of(key).whole and range_of(key).most < 2**63 for key in whole)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if range_of(key) is not None])
def test_the_ends_of_a_range(name: str) -> None:
    """Both ends are in it unless it says otherwise; what lies beyond is refused, with key, value and remedy."""
    allowed, (group, _, last) = range_of(KEYS[name]), name.partition(".")
    assert allowed is not None
    values = GROUPS[group]()
    steps = 1 if allowed.whole else 1e-9
    inside = [] if allowed.above else [allowed.least]
    inside += [] if allowed.below else [allowed.most]
    beyond = [allowed.least] if allowed.above else [allowed.least - steps]
    beyond += [allowed.most] if allowed.below else [allowed.most + max(steps, abs(allowed.most) * 1e-9)]
    for value in inside:
        setattr(values, last, value)
        check_values(group, values)
    for value in (v if not allowed.whole else int(v) for v in beyond if not math.isinf(v)):
        setattr(values, last, value)
        with pytest.raises(ConfigError, match=re.escape(f"{name} is {value}; give ")):
            check_values(group, values)


def test_what_yaml_cannot_say() -> None:
    """Values of a caller in Python: no whole numbers, and names that are no text."""
    for value in (True, 3.0, "3", [True], 10**5000):
        with pytest.raises(ConfigError, match=r"model\.levels is .*whole number"):
            check_values("model", ModelConfig(levels=value))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.name is .*not text in UTF-8"):
        check_values("model", ModelConfig(name="\udcff"))
