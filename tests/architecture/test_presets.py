"""The paper's three networks: layer counts, and its balance lists as sums and as shares of the work."""

from __future__ import annotations

import pytest

from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.architecture.unet import UNet
from tiledseg.config.run import ModelConfig
from tiledseg.errors import ConfigError


@pytest.mark.parametrize(("name", "layers"), [("small", 109), ("medium-2", 129), ("large", 149)])
def test_layer_counts_and_balance_sums(name: str, layers: int) -> None:
    assert len(build_network(ModelConfig(name=name), bands=4, classes=2).graph()) == layers
    assert sum(PRESETS[name].balance) == layers
    assert len(PRESETS[name].balance) == 6


def test_a_network_by_its_options() -> None:
    options = {"levels": 3, "convs_per_level": 1, "kernel": 5, "base_channels": 16, "padding": "valid"}
    more = {"norm": "group", "upsampling": "bilinear", "dropout": 0.1}
    assert build_network(ModelConfig(**options, **more), 3, 5) == UNet(**options, **more, bands=3, classes=5)


def test_free_options_of_a_preset_are_kept() -> None:
    unet = build_network(ModelConfig(name="small", base_channels=8, upsampling="nearest", dropout=0.2), 5, 3)
    assert (unet.levels, unet.base_channels, unet.upsampling, unet.dropout) == (6, 8, "nearest", 0.2)
    assert (unet.bands, unet.classes, unet.norm) == (5, 3, "instance")


def test_unknown_names_and_contradictions_name_both_values() -> None:
    with pytest.raises(ConfigError, match=r"'medium'; give unet, segnet, residual_unet, .*small, medium-2, large"):
        build_network(ModelConfig(name="medium"), 4, 2)
    with pytest.raises(ConfigError, match=r"model.levels is 4, but the preset small has 6"):
        build_network(ModelConfig(name="small", levels=4), 4, 2)
    with pytest.raises(ConfigError, match=r"model.norm is batch, but the preset large has instance"):
        build_network(ModelConfig(name="large", norm="batch"), 4, 2)
