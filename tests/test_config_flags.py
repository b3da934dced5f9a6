"""`predict --config` and `evaluate --config`: a file's keys are the command's flags, read and refused as by `train`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.commands.options import parse
from tiledseg.errors import ConfigError
from tiledseg.predict import build_parser, parse_groups

FILES = "checkpoint: runs/a\nimage: a.tif\noutput: b.tif\n"


def options_of(text: str, *words: str, folder: Path):
    path = folder / "run.yaml"
    path.write_text(text)
    return parse(build_parser(), [word.replace("FILE", str(path)) for word in words])


def test_every_key_is_the_flag(tmp_path: Path) -> None:
    text = "checkpoint: runs/a\nimage: 5\noutput: -b.tif\nreferences: true\ntiling: {grid: [2, 3]}\nworkers: 3\n"
    text += "parallel: {halo: layer, mesh: [1, 2], exact: false, overlap: true, fusion: 2, deadline: 60}\n"
    found = options_of(text, "--config", "FILE", folder=tmp_path)
    flags = ["--checkpoint", "runs/a", "--image", "5", "--output=-b.tif", "--references", "--tiling.grid", "[2,3]"]
    flags += ["--workers", "3", "--parallel.halo", "layer", "--parallel.mesh", "[1,2]", "--parallel.exact", "false"]
    flags += ["--parallel.overlap", "true", "--parallel.fusion", "2", "--parallel.deadline", "60"]
    expected = parse(build_parser(), flags)
    assert parse_groups(found) == parse_groups(expected)
    assert parse_groups(found).tiling.grid_shape() == (2, 3)
    differing = {key for key in vars(found) if vars(found)[key] != vars(expected)[key]}
    assert differing == {"config", "tiling.grid", "parallel.mesh"}  # which are text, with a blank after the comma


def test_the_later_word_wins(tmp_path: Path) -> None:
    def workers(*words: str) -> int:
        options = options_of(FILES + "workers: 3\nreferences: true\n", *words, folder=tmp_path)
        return parse_groups(options).data.workers

    assert workers("--config", "FILE", "--workers", "4") == 4
    assert workers("--workers", "4", "--config=FILE") == 3
    both = options_of(FILES + "references: true\n", "--config=FILE", "--no-references", folder=tmp_path)
    assert (parse_groups(both).data.references, both.config) == (False, [str(tmp_path / "run.yaml")])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(name=st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1).filter(str.isprintable))
def test_any_name_of_a_file_arrives(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    import yaml

    folder = tmp_path_factory.getbasetemp()
    text = yaml.safe_dump({"checkpoint": "c", "image": name, "output": "o"}, allow_unicode=True)
    assert options_of(text, "--config", "FILE", folder=folder).image == [name]


KNOWN = (
    "checkpoint, which, image, output, probabilities, probability_type, format, compress, polygons, "
    "polygons_minimum_area, polygons_classes, tta, normalize, weights, mean, deviation, area, references, workers, "
    "precision, verbosity, build, arguments, verify, classes, bands, tiling, parallel, memory"
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("checkpont: a\n", f"FILE has the unknown key 'checkpont'; give some of {KNOWN}"),
        ("config: a.yaml\n", f"FILE has the unknown key 'config'; give some of {KNOWN}"),
        ("1: 2\n", f"FILE has the unknown key '1'; give some of {KNOWN}"),
        ("", f"FILE holds nothing instead of keys; give some of {KNOWN}"),
        ("tiling: {gird: 3}\n", "FILE has the unknown key tiling.gird; give some of grid"),
        ("tiling: 3\n", "FILE: tiling holds the int 3; give keys below it, or leave it out"),
        ("output: [a, b]\n", "FILE: output is ['a', 'b']; give text"),
        ("image: null\n", "FILE: image is null; give a value, or leave it out"),
        ("references: 1\n", "FILE: references is 1; give true or false"),
        (FILES + "workers: two\n", "--workers is two; give a whole number (see tiledseg predict --help)"),
        ("image: a\nimage: b\n", "FILE, line 2 gives the key 'image' a second time; keep one of them"),
        ("image: a\n", "the following arguments are required: --output (see tiledseg predict --help)"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_groups(options_of(text, "--config", "FILE", folder=tmp_path))
    assert str(caught.value) == line.replace("FILE", str(tmp_path / "run.yaml"))
