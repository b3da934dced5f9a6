"""`--parallel auto`, and `parallel: auto` in a file: the keys that nobody gives are found when the run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiledseg.commands.options import as_config, parse_config, to_yaml
from tiledseg.config.parallel import FOUND
from tiledseg.config.run import Config
from tiledseg.errors import ConfigError


def parse(*arguments: str) -> Config:
    config = parse_config([*arguments, "--data.images=a.tif", "--data.labels=b.tif"], "train", "")
    config.check()
    return config


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_all_that_is_not_given_is_found(tmp_path: Path) -> None:
    assert parse().parallel.auto == []
    assert parse("--parallel", "auto").parallel.auto == list(FOUND)
    assert parse("--parallel=auto", "--tiling.grid", "auto").parallel.auto == list(FOUND)
    layer = parse("--parallel", "auto", "--parallel.halo", "layer", "--tiling.grid=4", "--train.epochs", "7")
    assert layer.parallel.auto == [name for name in FOUND if name not in ("tiling.grid", "parallel.halo")]
    assert (layer.parallel.halo, layer.tiling.grid, layer.train.epochs) == ("layer", 4, 7)
    read = parse("--parallel", "auto", "--parallel.halo", "read")
    assert "parallel.halo" not in read.parallel.auto, "a default that is given is given"


def test_a_file_says_it_and_flags_and_other_files_stand_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "parallel: auto\ntrain: {epochs: 3}\ndata: {classes: {'#ff0000': 0}}\n")
    alone = parse("--config", path)
    assert (alone.parallel.auto, alone.train.epochs, alone.data.classes) == (list(FOUND), 3, {"#ff0000": 0})
    beside = parse(f"--config={path}", "--parallel.stages", "2", "--train.epochs", "5")
    assert (beside.parallel.stages, beside.train.epochs) == (2, 5)
    assert beside.parallel.auto == [name for name in FOUND if name != "parallel.stages"]
    only = write(tmp_path / "only.yaml", "parallel: auto\n")
    halo = write(tmp_path / "halo.yaml", "parallel: {halo: layer}\n")
    assert parse("--config", only).parallel.auto == list(FOUND)
    assert parse("--config", halo, "--config", only).parallel.halo == "layer"
    assert "parallel.halo" not in parse("--config", only, "--config", halo).parallel.auto
    grid = write(tmp_path / "grid.yaml", "tiling: {grid: 4}\n")
    assert parse("--config", grid, "--parallel", "auto", "--tiling.grid", "auto").parallel.auto == list(FOUND)
    assert as_config({"parallel": "auto", "tiling": {"grid": 3}}).parallel.auto == list(FOUND[1:])


def test_the_record_of_a_run_says_the_same_again(tmp_path: Path) -> None:
    config = parse("--parallel", "auto", "--parallel.halo", "layer")
    record = write(tmp_path / "config.yaml", to_yaml(config))
    assert parse("--config", record) == config
    others = ("parallel.halo", "tiling.grid")
    again = parse("--config", record, "--parallel", "auto", "--tiling.grid", "2")
    assert again.parallel.auto == [name for name in FOUND if name not in others], "what was open is open again"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--parallel automatic", "--parallel takes a map of keys, not 'automatic'"),
        ("--parallel auto --parallel.auto [parallel.halo]", "--parallel.auto is given beside --parallel auto"),
        ("--parallel.auto [halo]", "parallel.auto names 'halo'; give some of tiling.grid, parallel.halo"),
        ("--parallel.auto [parallel.halo] --parallel.halo layer", "which is given as layer; leave one of them out"),
        ("--parallel.auto [tiling.grid] --tiling.grid 4", "names tiling.grid, but tiling.grid is 4; leave one"),
        ("--parallel auto --parallel.exact false", "parallel.exact is False beside parallel.auto: nothing but exact"),
        ("--parallel auto --tiling.grid 4 --train.tiles_per_step 4", "train.tiles_per_step is 4 beside parallel.auto"),
        (
            "--parallel auto --train.augment [turn] --train.augment_each tile",
            "train.augment_each is tile beside parallel.auto: the result",
        ),
        ("--parallel auto --memory.blocks 2", "memory.blocks is 2 beside parallel.auto: the search"),
        ("--parallel auto --config=", "config"),
        ("--parallel auto --parallel.fusion 2", "parallel.fusion is 2, but parallel.halo is read; leave fusion out"),
        ("--parallel auto --parallel.schedule gpipe", "schedule is gpipe, but parallel.stages is 1"),
    ],
)
def test_what_cannot_be_is_one_line(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*line.split())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_left_to_find_is_refused(tmp_path: Path) -> None:
    given = [f"--{name}" for name in FOUND]
    values = ["4", "layer", "[2,2]", "1", "1", "modelled", "1f1b", "3", "never"]
    line = [word for pair in zip(given, values, strict=True) for word in pair]
    with pytest.raises(ConfigError, match=r"parallel is auto, but all .* is given: tiling\.grid, "):
        parse("--parallel", "auto", *line)
