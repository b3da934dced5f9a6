"""Flags and YAML give one configuration; what is wrong with them is said in one line that names the file; help of keys.

The keys of a file are the flags of `predict --config` and `evaluate --config` too.
"""

import itertools
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.answers import refusal
from tests.small_files import write_yaml
from tiledseg.commands.options import (
    KEYS,
    MAIN,
    example,
    help_of_key,
    keys_to_show,
    meaning,
    parse_config,
    takes,
    to_yaml,
)
from tiledseg.commands.options import parse as parse_options
from tiledseg.config.run import Config
from tiledseg.config.words import Augmentation, augmentation
from tiledseg.errors import ConfigError
from tiledseg.predict import build_parser, parse_groups
from tiledseg.user_files.yaml_text import load_value, read_yaml


def parse(*arguments: str) -> Config:
    return parse_config(arguments, "train", "")


def error_of(*arguments: str) -> str:
    with refusal(ConfigError) as caught:
        parse(*arguments)
    return str(caught.value)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flags_stand_above_the_file_that_comes_before_them(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "train: {epochs: 3, seed: 5}\n")
    config = parse("--config", path, "--train.epochs", "7")
    assert (config.train.epochs, config.train.seed) == (7, 5)
    assert parse(f"--config={path}").train.seed == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: [\n", ("run.yaml, line", "is not YAML", "mend")),
        ("data:\n\timages: a.tif\n", ("run.yaml, line 2", "mend")),
        ("- 1\n", ("run.yaml is [1]", "data, tiling")),
        ("3\n", ("run.yaml is 3",)),
        ("", ("run.yaml", "nothing", "data, tiling")),
        ("optimiser: {lr: 1}\n", ("run.yaml", "unknown key 'optimiser'", "optimizer")),
        ("data:\n", ("run.yaml: data holds nothing", "images")),
        ("data: 3\n", ("run.yaml: data is 3",)),
        ("train: {focal_gamma: 1}\n", ("run.yaml has train.focal_gamma", "train.loss {name: focal, gamma: VALUE}")),
        ("train: {epoch: 3}\n", ("run.yaml: train has the unknown key 'epoch'", "epochs")),
        ("train: {epochs: many}\n", ("train.epochs is many", "a whole number")),
        ("data: {nodata: none}\n", ("data.nodata is none", "a number or null")),
        ("model: {dropout: [1]}\n", ("model.dropout is [1]", "a number")),
        ("data: {bands: 3}\n", ("data.bands is 3", "a list of whole numbers [a,b]")),
        ("parallel: {exact: perhaps}\n", ("parallel.exact is perhaps", "true or false")),
        ("? [1, 2]\n: 3\n", ("run.yaml",)),
        ("a: &a [*a]\n", ("run.yaml, line 1", "alias", "write it out")),
        ("data: {classes: 2}\ntrain: {epochs: 2}\ndata: {bands: [1]}\n", ("run.yaml, line 3", "'data' a second time")),
        ("train:\n  epochs: 2\n  seed: 1\n  epochs: 3\n", ("run.yaml, line 4", "'epochs' a second time")),
        ("train: {<<: {epochs: 2}}\n", ("run.yaml, line 1", "merges", "write it out")),
        ("train: {seed: 1}\n---\ntrain: {seed: 2}\n", ("run.yaml, line 2", "another document")),
        ("train: {seed: " + "[" * 3000 + "]" * 3000 + "}\n", ("run.yaml, line 1", "16 deep")),
        ("train: {seed: " + "[" * 3000, ("run.yaml, line 1", "16 deep")),
        ("train: {seed: 0x" + "f" * 5000 + "}\n", ("run.yaml, line 1", "5002 characters")),
        ("train: {seed: 0b_}\n", ("run.yaml", "cannot be", "mend")),
        ("model: {levels: 010}\n", ("run.yaml, line 1", "010", "takes for 8")),
        ("data: {classes: {-007: 1}}\n", ("run.yaml, line 1", "-007", "takes for -7", "quote")),
        ("parallel:\n  deadline: 1:30\n", ("run.yaml, line 2", "1:30", "takes for 90")),
        ("data: {bands: [1, 02]}\n", ("run.yaml, line 1", "02", "takes for 2")),
        ("# " + "x" * 2**20, ("run.yaml has 1048578 bytes", "1048576")),
        ("!!python/object/apply:os.system ['true']\n", ("run.yaml", "is not YAML")),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    with refusal(ConfigError, *words):
        parse("--config", write(tmp_path / "run.yaml", text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "nowhere.yaml: No such file" in error_of("--config", str(tmp_path / "nowhere.yaml"))
    assert "it is a folder" in error_of("--config", str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "it is not text" in error_of("--config", str(tmp_path / "binary.yaml"))


def test_files_that_would_never_end(tmp_path: Path) -> None:
    """A FIFO waits for a writer, a device has no end, aliases multiply: each is said within a second; where others
    load the machine, all are within a minute."""
    os.mkfifo(tmp_path / "fifo")
    begun = time.monotonic()
    assert "it is a FIFO; give a YAML file" in error_of("--config", str(tmp_path / "fifo"))
    assert "it is a character device" in error_of("--config=/dev/zero")
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"{b}: &{b} [{', '.join(9 * [f'*{a}'])}]\n" for a, b in itertools.pairwise("abcdefghi"))
    assert "alias" in error_of("--config", write(tmp_path / "bomb.yaml", bomb))
    assert "alias" in error_of("--data.classes", bomb)
    assert "gives the key '1' a second time" in error_of("--data.classes={1: 0, 2: 1, 1: 2}")
    assert "gives the key 'a' a second time" in error_of("--model.arguments={a: 1, a: 2}")
    assert "; give a map of name to value" in error_of("--model.arguments=t.yaml")
    assert time.monotonic() - begun < 60


def test_colours_of_classes_arrive_as_they_are_written(tmp_path: Path) -> None:
    """A parser that made YAML of each text took "#9ebc5e" for a comment: the class had no colour, and nothing was
    said."""
    records = [
        {"name": "field", "colour": "#9ebc5e", "values": ["#00ff00", "1,2,3"]},
        {"name": "7", "colour": [1, 2, 3], "value": 7},
        {"name": "null", "ignored": True, "values": [1, 2]},
    ]
    by_name = {"a": {"colour": "#00ff00", "value": 1}, "b": {"colour": "255,0,0", "value": 2}}
    for classes in (records, by_name, {0: 1, 7: None}, {"#ff0000": 0, "1,2,3": 1}, {0: "#ff0000"}, 5, "a.csv"):
        write_yaml(tmp_path / "run.yaml", {"data": {"classes": classes}})
        assert parse("--config", str(tmp_path / "run.yaml")).data.classes == classes


FILES = "checkpoint: runs/a\nimage: a.tif\noutput: b.tif\n"


def options_of(text: str, *words: str, folder: Path):
    path = folder / "run.yaml"
    path.write_text(text)
    return parse_options(build_parser(), [word.replace("FILE", str(path)) for word in words])


def test_every_key_is_the_flag(tmp_path: Path) -> None:
    text = "checkpoint: runs/a\nimage: 5\noutput: -b.tif\nreferences: true\ntiling: {grid: [2, 3]}\nworkers: 3\n"
    text += "parallel: {halo: layer, mesh: [1, 2], exact: false, overlap: true, fusion: 2, deadline: 60}\n"
    found = options_of(text, "--config", "FILE", folder=tmp_path)
    flags = ["--checkpoint", "runs/a", "--image", "5", "--output=-b.tif", "--references", "--tiling.grid", "[2,3]"]
    flags += ["--workers", "3", "--parallel.halo", "layer", "--parallel.mesh", "[1,2]", "--parallel.exact", "false"]
    flags += ["--parallel.overlap", "true", "--parallel.fusion", "2", "--parallel.deadline", "60"]
    expected = parse_options(build_parser(), flags)
    assert parse_groups(found) == parse_groups(expected)
    assert parse_groups(found).tiling.grid_shape() == (2, 3)
    assert (found.checkpoint, found.image, found.output) == (expected.checkpoint, ["5"], "-b.tif")


def test_the_later_word_wins(tmp_path: Path) -> None:
    def workers(*words: str) -> int:
        options = options_of(FILES + "workers: 3\nreferences: true\n", *words, folder=tmp_path)
        return parse_groups(options).data.workers

    assert workers("--config", "FILE", "--workers", "4") == 4
    assert workers("--workers", "4", "--config=FILE") == 3
    both = options_of(FILES + "references: true\n", "--config=FILE", "--no-references", folder=tmp_path)
    assert (parse_groups(both).data.references, both.config) == (False, [str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("name", ["1", "null", "-a.tif", "a b=c,d.tif", "#a: [b]", "é'\"{x}.tif", "1e3"])
def test_any_name_of_a_file_arrives(name: str, tmp_path: Path) -> None:
    text = yaml.safe_dump({"checkpoint": "c", "image": name, "output": "o"}, allow_unicode=True)
    assert options_of(text, "--config", "FILE", folder=tmp_path).image == [name]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("checkpont: a\n", "FILE has the unknown key 'checkpont'; give some of checkpoint, which, image, output, "),
        ("config: a.yaml\n", "FILE has the unknown key 'config'; give some of checkpoint, which, image, output, "),
        ("1: 2\n", "FILE has the unknown key '1'; give some of checkpoint, which, image, output, "),
        ("", "FILE holds nothing; give some of checkpoint, which, image, output, "),
        ("tiling: {gird: 3}\n", "FILE: tiling has the unknown key 'gird'; give some of grid"),
        ("tiling: 3\n", "FILE: tiling is 3; give some of grid"),
        ("output: [a, b]\n", "FILE: output is ['a', 'b']; give text"),
        ("image: null\n", "FILE: image is null; give a value, or leave it out"),
        (FILES + "references: 1\n", "--references is 1; give true or false (see tiledseg predict --help)"),
        (FILES + "workers: two\n", "--workers is two; give a whole number (see tiledseg predict --help)"),
        ("image: a\nimage: b\n", "FILE, line 2 gives the key 'image' a second time; keep one of them"),
        ("image: a\n", "the following arguments are required: --output (see tiledseg predict --help)"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, line: str) -> None:
    with refusal(ConfigError) as caught:
        parse_groups(options_of(text, "--config", "FILE", folder=tmp_path))
    said, wanted = str(caught.value), line.replace("FILE", str(tmp_path / "run.yaml"))
    assert said == wanted or (wanted.endswith(", ") and said.startswith(wanted))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_config(["--help", *words], "tiledseg train", "Train.")
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_help_shows_the_main_keys_on_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = said(capsys)
    assert [key for key in KEYS if f"--{key} " in text] == sorted(MAIN, key=list(KEYS).index)
    assert "--help all" in text
    assert max(map(len, text.splitlines())) <= 80
    whole = said(capsys, "all")
    assert all(f"--{key} " in whole for key in KEYS)
    assert max(map(len, whole.splitlines())) <= 80


def test_a_group_or_a_key_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert keys_to_show(["--help", "tiling"]) == ["tiling.grid", "tiling.halo"]
    assert said(capsys, "train.ema").rstrip() == help_of_key("train.ema")
    assert said(capsys, "--train.ema") == said(capsys, "train.ema")
    assert keys_to_show(["--config", "a.yaml"]) is None
    with pytest.raises(ConfigError, match="--help has no 'grid'; give all, a group"):
        keys_to_show(["--help", "grid"])


def test_each_key_has_a_default_values_and_an_example_that_comes_back_whole(tmp_path: Path) -> None:
    """All examples in one file: each value is in the configuration, and what the run writes gives the same again."""
    examples: dict[str, dict[str, Any]] = {}
    for key in KEYS:
        group, _, name = key.partition(".")
        assert takes(key)
        assert meaning(key), "which --help shows"
        (value,) = yaml.safe_load(example(key))[group].items()
        assert value[0] == name
        examples.setdefault(group, {}).update([value])
    config = parse("--config", write(tmp_path / "run.yaml", yaml.safe_dump(examples)))
    assert asdict(config) == examples
    assert parse("--config", write(tmp_path / "config.yaml", to_yaml(config))) == config
    assert yaml.safe_load(to_yaml(Config())) == asdict(Config())


def test_dates_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {times: [2024-04, 2024-06-20]}\n")
    assert read_yaml(str(path)) == {"data": {"times": ["2024-04", "2024-06-20"]}}
    assert load_value("[2024-04, 2024-06-20T10:00:00Z]") == ["2024-04", "2024-06-20T10:00:00Z"]


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
