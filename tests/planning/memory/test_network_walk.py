"""The backward pass of a network as items: what is planned for a choice is what PyTorch allocates."""

from __future__ import annotations

import pytest

from benchmarks.planned_memory.peaks import CONTEXT, allocated_peak, walk_of
from tiledseg.architecture.network import NORMS, Network
from tiledseg.architecture.presets import KINDS
from tiledseg.architecture.unet import UNet
from tiledseg.planning.memory.greedy import Greedy
from tiledseg.planning.walk.items import price
from tiledseg.planning.walk.step_memory import training_memory


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("norm", NORMS)
def test_where_all_is_kept_it_is_the_walk_of_a_step(norm: str, width: int) -> None:
    unet = UNet(4, base_channels=8, norm=norm, dropout=0.1)
    memory = training_memory(unet.graph(), unet.bands, CONTEXT, width)
    walk = walk_of(unet, width)
    kept = price(walk, Greedy(walk).kept)
    assert kept.peak == memory.activations + memory.backward
    assert kept.seconds == 0


@pytest.mark.parametrize(
    "network",
    [
        UNet(4, base_channels=8),
        UNet(3, base_channels=8, norm="instance", upsampling="bilinear"),
        UNet(3, base_channels=8, norm="group", dropout=0.2),
        UNet(3, base_channels=8, norm="pixel", upsampling="nearest"),
        UNet(3, base_channels=8, norm="batch", padding="same", convs_per_level=1),
        KINDS["segnet"](),
    ],
    ids=["none", "instance", "group", "pixel", "batch", "segnet"],
)
@pytest.mark.parametrize("share", [0.9, 0.7, 0.55])
def test_the_peak_of_a_choice_is_that_of_a_real_step(network: Network, share: float) -> None:
    """Within 2 %, and never above the budget by more than that."""
    found = walk_of(network)
    greedy = Greedy(found)
    full = greedy.peak(greedy.kept)
    chosen = greedy.choose(int(share * full))
    assert chosen is not None
    assert chosen.peak <= share * full
    policy = found.policy(chosen.words)
    assert found.words(policy) == chosen.words
    assert allocated_peak(network, policy) == pytest.approx(chosen.peak, rel=0.02)
