"""The backward pass of a network as items: what is planned for a choice is what PyTorch allocates."""

from __future__ import annotations

import pytest

from benchmarks.planned_peaks import CONTEXT, allocated_peak, budget_at, walk_of
from tiledseg.architecture.kinds import KINDS
from tiledseg.architecture.network import Network
from tiledseg.architecture.options import NORMS
from tiledseg.architecture.unet import UNet
from tiledseg.planning.memory.leaving import choose
from tiledseg.planning.walk.items import price_all_kept
from tiledseg.planning.walk.step_memory import training_memory


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("norm", NORMS)
def test_where_all_is_kept_it_is_the_walk_of_a_step(norm: str, width: int) -> None:
    unet = UNet(4, base_channels=8, norm=norm, dropout=0.1)
    memory = training_memory(unet.graph(), unet.bands, CONTEXT, width)
    walk = walk_of(unet, width).walk
    kept = price_all_kept(walk)
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
    full = price_all_kept(found.walk).peak
    chosen = choose(found.walk, int(share * full))
    assert chosen is not None
    assert chosen.peak <= share * full
    policy = found.policy(chosen.choices)
    assert found.choices(policy) == chosen.choices
    assert allocated_peak(network, policy) == pytest.approx(chosen.peak, rel=0.02)


def test_where_a_budget_fits_a_larger_one_does() -> None:
    """Also where some good choice will do, and few are looked at."""
    found = walk_of(UNet(3, base_channels=8, norm="instance"), context=(1024, 1024))
    budgets = [budget_at(found.walk, share / 100) for share in range(20, 101, 5)]
    chosen = [choose(found.walk, budget, quick=True) for budget in budgets]
    assert all(each is not None and each.peak <= budget for each, budget in zip(chosen, budgets, strict=True))
