"""The configuration checks itself, group by group; every message names the key, the value and what to give."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from tiledseg.commands.options import meaning, parse_config
from tiledseg.config.run import Config, OptimizerConfig, ParallelConfig
from tiledseg.errors import ConfigError
from tiledseg.planning.walk.mode_cost import fusion_word


def good() -> Config:
    config = Config()
    config.data.images = ["a.tif"]
    config.data.labels = ["b.tif"]
    return config


def test_what_the_optimizer_would_ignore_is_refused() -> None:
    OptimizerConfig(momentum=0.5, name="sgd").check()
    words = "optimizer.momentum is 0.5, but optimizer.name is adamw; leave it out, or give optimizer.name sgd"
    with pytest.raises(ConfigError, match=re.escape(words)):
        OptimizerConfig(momentum=0.5).check()


def test_the_words_of_a_fusion() -> None:
    """What `plan` prints is what a run takes: its job scripts too."""
    assert ParallelConfig(halo="layer", fusion="auto").fusion_depth() is None
    whole = ParallelConfig(halo="layer", fusion="whole")
    whole.check()
    assert fusion_word(whole.fusion_depth() or 0) == "whole"


def test_the_defaults_need_images_only() -> None:
    good().check()
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
        config = good()
        config.tiling.grid = 2
        setattr(getattr(config, group), name, value)
        with pytest.raises(ConfigError) as caught:
            config.check()
        message = str(caught.value)
        assert key in message
        assert value == "" or str(value) in message
        assert "; give " in message or "is empty" in message
        assert "\n" not in message


@pytest.mark.parametrize("keys", [{"halo": "exchange"}, {"stages": 2}, {"halo": "layer", "fusion": 2}])
def test_a_store_that_nothing_goes_to_is_refused(keys: dict[str, Any]) -> None:
    config = good()
    config.memory.store = "/scratch"
    config.check()
    for key, value in keys.items():
        setattr(config.parallel, key, value)
    with pytest.raises(ConfigError, match=r"memory\.store is /scratch, but with parallel\..*would be stored there"):
        config.check()


def test_every_key_is_described_and_has_a_default() -> None:
    """The descriptions are what --help shows."""
    for group in fields(Config):
        kind = group.default_factory
        assert isinstance(kind, type)
        for key in fields(kind):
            assert meaning(f"{group.name}.{key.name}"), f"{group.name}.{key.name}"
            assert key.default is not MISSING or key.default_factory is not MISSING


def parse(*arguments: str) -> Config:
    config = parse_config([*arguments, "--data.images=a.tif", "--data.labels=b.tif"], "train", "")
    config.check()
    return config


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--parallel auto", "unrecognized arguments: --parallel"),
        ("--parallel.auto [parallel.halo]", "there is parallel.auto, of an older version: leave it out"),
        ("--parallel.fusion 2", "parallel.fusion is 2, but parallel.halo is read; leave it out"),
        ("--parallel.schedule gpipe", "schedule is gpipe, but parallel.stages is 1"),
    ],
)
def test_what_cannot_be_is_one_line(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*line.split())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
