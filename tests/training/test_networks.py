"""The networks of the sources, small, trained, resumed, mapped and planned by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiledseg
from tests.crash.runs import Material, step_losses

NETWORKS: dict[str, dict[str, Any]] = {
    "segnet": {"levels": 3, "base_channels": 8, "norm": "batch"},
    "residual_unet": {"encoder": "resnet18", "base_channels": 8},
    "gated_scnn": {"encoder": "resnet18", "base_channels": 8},
}


def config_of(material: Material, name: str, folder: Path, epochs: int) -> dict[str, Any]:
    """On whole images, of which each is a tile."""
    config = material.config()
    config["model"] = {"name": name, **NETWORKS[name]}
    config["tiling"] = {"grid": 1}
    config["train"] = {"epochs": epochs, "seed": 3, "precision": "fp32", "validate_every": epochs}
    config["optimizer"] = {"lr": 0.01}
    config["run"] = {"output": str(folder), "verbosity": 0}
    return config


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_learns_goes_on_and_maps(material: Material, tmp_path: Path, name: str) -> None:
    whole = tiledseg.train_network(config_of(material, name, tmp_path / "whole", 12))
    parts = tiledseg.train_network(config_of(material, name, tmp_path / "parts", 2))
    assert tiledseg.train_network(config_of(material, name, tmp_path / "parts", 4)) == parts
    assert step_losses(parts) == step_losses(whole)[:8], "a resumed run has the losses of one in a piece"
    assert sum(step_losses(whole)[-2:]) < 0.7 * sum(step_losses(whole)[:2])
    tiledseg.predict_raster(whole, material.root / "held-out.tif", tmp_path / "map.tif", grid=1)
    scores = tiledseg.evaluate_map(tmp_path / "map.tif", material.root / "held-out-labels.tif", classes=3)
    assert scores.accuracy > 0.5, "a guess has a third"


def test_a_band_of_edges_is_told_apart(material: Material, tmp_path: Path) -> None:
    config = config_of(material, "gated_scnn", tmp_path / "run", 1)
    config["model"] |= {"arguments": {"edge_band": True}}
    config["train"] |= {"loss": {"name": "edges", "radius": 3, "dual": 2.0}}
    run = tiledseg.train_network(config)
    network = tiledseg.load(run).network
    assert network.layers["conv1"].weight.shape[1] == 2, "of three bands the encoder sees two"
    tiledseg.predict_raster(run, material.root / "held-out.tif", tmp_path / "map.tif", grid=1)
