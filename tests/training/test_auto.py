"""`train --parallel auto` as users type it, on one rank: what it says, keeps and refuses."""

from __future__ import annotations

import json

import pytest

from tests.crash.runs import Material, lines, train
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.errors import ConfigError
from tiledseg.user_files.machine import machine_here

AUTO = "--parallel", "auto", "--tiling.grid", "auto", "--train.tiles_per_step", "null"


def test_a_run_says_what_it_found_and_why_and_keeps_it(material: Material, capfd: pytest.CaptureFixture[str]) -> None:
    folder = material.root / "found"
    assert train(material, folder, *AUTO, "--run.verbosity", "1") == 0
    said = capfd.readouterr()
    (line,) = [line for line in (said.out + said.err).splitlines() if "parallel auto" in line]
    assert "parallel auto, 1 rank: tiling.grid [" in line
    assert "% less time than" in line
    saved = find_checkpoint(folder).saved
    assert saved.found is not None
    found = json.loads((folder / "summary.json").read_text())["found"]
    assert found["keys"]["tiling.grid"] == saved.found.tiling.grid
    assert found["reason"] in line
    assert saved.config.parallel.auto == [*found["keys"]]
    capfd.readouterr()
    assert train(material, folder, *AUTO, "--run.verbosity", "1", "--train.epochs", "9") == 0
    said = capfd.readouterr()
    assert "parallel auto, 1 rank, as before: tiling.grid [" in said.out + said.err
    again = "--train.epochs", "10", "--parallel.halo", "layer", "--run.verbosity", "1"
    assert train(material, folder, *AUTO, *again) == 0
    said = capfd.readouterr()
    assert "parallel auto, 1 rank, found anew (for 1 rank before): tiling.grid [" in said.out + said.err


def test_nothing_that_fits_and_no_machine_are_one_line(material: Material, capfd: pytest.CaptureFixture[str]) -> None:
    folder = material.root / "refused"
    assert train(material, folder, *AUTO, "--memory.budget", "9KiB") == 2
    told = capfd.readouterr().err
    assert "settings for 1 ranks of 9.00 KiB can be" in told
    assert "the nearest, " in told
    assert told.count("\n") == 1
    assert not folder.exists()


def test_a_gpu_is_known_by_its_name_or_not_at_all() -> None:
    for device, name in {
        "Tesla V100-SXM2-16GB": "V100",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "AMD Instinct MI250X": "MI250X",
    }.items():
        assert name in machine_here(device, 4).name
    with pytest.raises(ConfigError, match=r"the device 'NVIDIA GH200 480GB', .* plan --calibrate .* parallel\.machine"):
        machine_here("NVIDIA GH200 480GB", 4)
    assert machine_here(None, 7).ranks_per_host == 7


def test_blocks_are_found_where_an_image_does_not_fit(material: Material, capfd: pytest.CaptureFixture[str]) -> None:
    """A norm over the image leaves no finer grid. Losses are those of the whole image, and a run goes on so."""
    norms = *AUTO, "--model.norm", "instance", "--model.base_channels", "16", "--train.epochs", "1"
    short = "--memory.budget", "3000KiB", "--run.verbosity", "1"
    whole, folder = material.root / "all-kept", material.root / "in-blocks"
    assert train(material, whole, *norms) == 0
    capfd.readouterr()
    assert train(material, folder, *norms, *short) == 0
    said = capfd.readouterr()
    assert "in blocks, grid 1 x 1 can be" in said.out + said.err
    found = find_checkpoint(folder).saved.found
    assert found is not None
    assert found.blocks is not None
    assert f"memory.blocks [{found.blocks[0]},{found.blocks[1]}]" in said.out + said.err
    assert json.loads((folder / "summary.json").read_text())["blocks"] is not None
    losses = [[line["loss"] for line in lines(each) if "loss" in line] for each in (whole, folder)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert train(material, folder, *norms, *short, "--train.epochs", "2") == 0
    said = capfd.readouterr()
    assert "parallel auto, 1 rank, as before" in said.out + said.err
