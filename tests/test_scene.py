from __future__ import annotations

from pathlib import Path

import pytest
import rasterio

from tiledseg.scene import main


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, labels = tmp_path / "a.tif", tmp_path / "b.tif"
    assert main(["--size", "90", "70", "--seed", "5", "--image", str(image), "--labels", str(labels)]) == 0
    with rasterio.open(image) as dataset, rasterio.open(labels) as other:
        assert dataset.shape == other.shape == (90, 70)
        assert dataset.count == 4
    assert "90 x 70" in capsys.readouterr().out


def test_the_seed_and_nothing_else_chooses_the_scene(tmp_path: Path) -> None:
    def bytes_of(*options: str) -> bytes:
        path = tmp_path / "a.tif"
        assert main(["--size", "60", "90", "--image", str(path), "--labels", str(tmp_path / "b.tif"), *options]) == 0
        return path.read_bytes()

    assert bytes_of("--seed", "5") == bytes_of("--seed", "5", "--workers", "3")
    assert bytes_of("--seed", "5") != bytes_of("--seed", "6")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--size", "0", "5"], "size 0 x 5"),
        (["--size", "5"], "expected 2 arguments"),
        (["--size", "5", "x"], "invalid int"),
        (["--size", "9", "9", "--bands", "5"], "5 bands"),
        (["--size", "9", "9", "--seed", "-3"], "seed -3"),
        (["--size", "9", "9", "--workers", "0"], "workers 0"),
        (["--size", "9", "9", "--labels", "/no/such/b.tif"], "not a folder"),
        (["--size", "9", "9", "--colour"], "--colour"),
        ([], "--size"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    arguments = ["--image", str(tmp_path / "a.tif"), "--labels", str(tmp_path / "b.tif"), *options]
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert said in text
    assert text.count("\n") == 1
    assert not list(tmp_path.iterdir())
