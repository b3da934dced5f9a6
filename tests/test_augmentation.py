"""`train.augment` from a file and from a flag, and what it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_files import write_yaml
from tiledseg.commands.options import parse_config, to_yaml
from tiledseg.config.words import Augmentation, augmentation
from tiledseg.errors import ConfigError

LIST = [
    {"reflect": ["row", "col"]},
    "turn",
    {"translate": 10},
    {"scale": [0.8, 1.25]},
    {"rotate": 30},
    {"brightness": 0.1},
    {"contrast": 0.2},
    {"noise": 0.05},
    {"drop_bands": 0.3},
]
VALUE = Augmentation((True, True), 90, 10, (0.8, 1.25), 30.0, 0.1, 0.2, 0.05, 0.3)


def test_a_file_and_a_flag_say_the_same(tmp_path: Path) -> None:
    write_yaml(tmp_path / "run.yaml", {"train": {"augment": LIST}})
    words = "[{reflect: [row, col]}, turn, {translate: 10}, {scale: [0.8, 1.25]}, {rotate: 30}, "
    words += "{brightness: 0.1, contrast: 0.2}, {noise: 0.05}, {drop_bands: 0.3}]"
    file = parse_config(["--config", str(tmp_path / "run.yaml")], "train", "")
    flag = parse_config(["--train.augment", words], "train", "")
    assert augmentation(file.train.augment) == augmentation(flag.train.augment) == VALUE
    (tmp_path / "resolved.yaml").write_text(to_yaml(file))
    again = parse_config(["--config", str(tmp_path / "resolved.yaml")], "train", "")
    assert again.train.augment == LIST


def test_names_alone_and_none() -> None:
    assert augmentation([]) == Augmentation()
    assert augmentation(["reflect", {"turn": 180}]) == Augmentation(reflect=(True, True), turn=180)
    assert augmentation([{"reflect": "col"}]) == Augmentation(reflect=(False, True))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("mirror", r"has 'mirror'; give some of reflect, turn"),
        (3, r"has the entry 3; give a name"),
        ({}, r"has the entry \{\}"),
        ({"reflect": "both"}, r"reflect is both; give row, col or \[row, col\]"),
        ({"turn": 45}, r"turn is 45; give 90 \(quarter turns\) or 180"),
        ("translate", r"translate is null; give a whole number"),
        ({"translate": 2.5}, "translate is 2.5"),
        ({"scale": 1.2}, r"scale is 1.2; give a list of numbers"),
        ({"scale": [1.25, 0.8]}, r"scale is \[1.25, 0.8\]"),
        ({"rotate": 181}, "rotate is 181.0; give a number, at least 0, at most 180"),
        ({"noise": float("nan")}, "noise is nan; give a number, at least 0"),
        ({"brightness": -1}, "brightness is -1"),
        ({"contrast": 1.0}, r"contrast is 1.0; give a number in \[0, 1\)"),
    ],
)
def test_what_it_cannot_be_is_said_in_one_line(entry: object, words: str) -> None:
    with pytest.raises(ConfigError, match=f"train.augment(:| has).*{words.removeprefix('has ')}"):
        augmentation([entry])


def test_a_name_is_given_once() -> None:
    with pytest.raises(ConfigError, match="noise twice"):
        augmentation([{"noise": 0.1}, {"noise": 0.2}])
