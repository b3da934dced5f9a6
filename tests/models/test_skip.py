from __future__ import annotations

import pytest

from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.geometry.layer import Activation, Layer, PopConcatenate, Stash
from tiledseg.models.skip import last_pops, skip_faults, verify_skips


def test_a_unet_has_no_fault() -> None:
    assert skip_faults(UNet(levels=6).layers()) == []


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ([Stash("a", "s")], "'a' stashes 's', which no layer pops"),
        ([PopConcatenate("b", "s", 4)], "'b' pops 's', which no layer before it stashes"),
        ([Stash("a", "s"), Stash("c", "s"), PopConcatenate("b", "s", 4)], "'c' stashes 's', which 'a' stashed already"),
        ([Activation("a"), Activation("a")], "two layers are named 'a'"),
    ],
    ids=["never popped", "never stashed", "stashed twice", "one name twice"],
)
def test_each_fault_is_named(layers: list[Layer], fault: str) -> None:
    assert skip_faults(layers) == [fault]
    with pytest.raises(ConfigError, match=fault.split("'")[1]):
        verify_skips(layers)


def test_all_faults_are_listed_at_once() -> None:
    faults = skip_faults([PopConcatenate("b", "s", 4), Stash("a", "t"), PopConcatenate("c", "u", 4)])
    assert len(faults) == 3


def test_several_layers_may_pop_one_skip() -> None:
    layers = [Stash("a", "s"), PopConcatenate("b", "s", 4), PopConcatenate("c", "s", 4)]
    assert skip_faults(layers) == []
    assert last_pops(layers) == {"s": "c"}
