"""One uninterrupted run, which all interrupted ones are held against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.runs import STEPS, Material, lines


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.make(tmp_path_factory.mktemp("crash"))


@pytest.fixture(scope="session")
def uninterrupted(material: Material) -> Path:
    """The run's folder, trained on two ranks."""
    folder = material.root / "uninterrupted"
    done = material.train(2, folder)
    assert done.code == 0, done.err
    assert (folder / "progress.png").exists()
    assert [line["step"] for line in lines(folder) if "loss" in line] == list(range(1, STEPS + 1))
    return folder
