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
