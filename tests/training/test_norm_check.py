"""Statistics of one pixel are refused beforehand: exactly where torch would refuse them in mid-run."""

from __future__ import annotations

import pytest
import torch

from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import make_tiling
from tiledseg.models.unet import build_unet
from tiledseg.training.norm_check import MAPPED, TRAINED, check_statistics


def refused(unet: UNet, raster: tuple[int, int], whole: bool, training: bool) -> bool:
    tiling = make_tiling(raster, (1, 1), network_footprint(unet.layers()))
    try:
        check_statistics(unet, [tiling], whole, TRAINED if training else MAPPED)
    except ConfigError:
        return True
    return False


def fails(unet: UNet, raster: tuple[int, int], training: bool) -> bool:
    tile = make_tiling(raster, (1, 1), network_footprint(unet.layers())).tiles[0]
    network = build_unet(unet, seed=0).train(training)
    try:
        network(torch.ones(1, unet.bands, tile.context.height, tile.context.width))
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("training", [True, False], ids=["trained", "mapped"])
@pytest.mark.parametrize("norm", ["none", "pixel", "instance", "group", "batch"])
def test_what_torch_would_refuse(norm: str, training: bool) -> None:
    unet = UNet(3, 1, base_channels=8, norm=norm)
    found = [refused(unet, raster, False, training) for raster in ((4, 4), (4, 5), (5, 5), (9, 3))]
    assert found == [fails(unet, raster, training) for raster in ((4, 4), (4, 5), (5, 5), (9, 3))]
    assert found[0] == (norm == "instance" or (norm == "batch" and training))
    assert not any(found[1:])


def test_in_layer_mode_the_image_counts() -> None:
    """However it is cut."""
    unet = UNet(3, 1, base_channels=8, norm="instance")
    tiling = make_tiling((8, 8), (2, 2), network_footprint(unet.layers()))
    check_statistics(unet, [tiling], True, TRAINED)
    with pytest.raises(ConfigError, match=r"image of 4 x 4 px, halo included, leaves 1 pixel at .*; use larger"):
        check_statistics(unet, [make_tiling((4, 4), (1, 1), network_footprint(unet.layers()))], True, TRAINED)
    assert refused(unet, (4, 4), True, True)
