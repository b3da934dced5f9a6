"""The choice of mode and fusion."""

from __future__ import annotations

import pytest

from tiledseg.architecture.unet import UNet
from tiledseg.errors import GeometryError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.sharing.decomposition import Partition, decompose
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.geometry.tiling import make_tiling
from tiledseg.planning.answer.modes import choose_mode
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.modes.mode_cost import DEPTHS, ModeCost, Task, choose_fusion, label, layer_cost, settled
from tiledseg.planning.step.halo_traffic import SentBytes, Traffic

MACHINES = [Machine(), Machine(latency=1e-3), Machine(latency=0), Machine(flops=1e15), Machine(bandwidth=1e6)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_no_other_depth_takes_less_time(padding: str, machine: Machine) -> None:
    layers = UNet(4, base_channels=8, padding=padding).graph()
    decomposition = decompose(make_tiling((500, 700), (2, 3), network_footprint(layers)), (2, 3))
    task = Task(layers, 4, decomposition)
    fusion = choose_fusion(layers, *settled(layers, decomposition), 4, 4, machine)
    seconds = {depth: layer_cost(task, machine, depth).seconds for depth in DEPTHS}
    assert seconds[fusion] == min(seconds.values())
    assert fusion == WHOLE or all(seconds[depth] > seconds[fusion] for depth in DEPTHS if depth < fusion)


def test_what_costs_most_decides() -> None:
    """Dear messages: one exchange. Messages for nothing: a thin halo at each layer."""
    layers, cut = UNet(3, base_channels=8).graph(), Partition.even(1024, 4)
    assert choose_fusion(layers, cut, cut, 4, 4, Machine(latency=1.0)) == WHOLE
    assert choose_fusion(layers, cut, cut, 4, 4, Machine(latency=0, bandwidth=1e15)) == 1
    alone = Partition((0, 1024))
    assert choose_fusion(layers, alone, alone, 4, 4, Machine(latency=1.0)) == 1


def test_an_impossible_partition_is_refused() -> None:
    with pytest.raises(GeometryError, match="none of them to rank"):
        choose_fusion(UNet(3, base_channels=2).graph(), Partition.even(16, 8), Partition((0, 16)), 4, 4, Machine())


def cost(mode: str, seconds: float, memory: int = 10, fusion: int = 0) -> ModeCost:
    traffic = Traffic(SentBytes(1, 1))
    return ModeCost(mode, fusion, 1, 1, traffic, traffic, SentBytes(), memory, seconds)


COSTS = [cost("read", 3e-3, 5), cost("exchange", 2e-3, 6), cost("layer", 1e-3, 7, 1), cost("layer", 5e-4, 9, WHOLE)]


@pytest.mark.parametrize(
    ("memory", "exact", "expected"),
    [
        (None, ("read", "exchange", "layer"), 3),
        (9, ("read", "exchange", "layer"), 3),
        (8, ("read", "exchange", "layer"), 2),
        (6, ("read", "exchange", "layer"), 1),
        (5, ("read", "exchange", "layer"), 0),
        (4, ("read", "exchange", "layer"), None),
        (None, ("layer",), 3),
        (6, ("layer",), None),
    ],
)
def test_the_quickest_that_fits_and_is_exact(memory: int | None, exact: tuple[str, ...], expected: int | None) -> None:
    chosen, reason = choose_mode(COSTS, memory, exact)
    assert chosen == (None if expected is None else COSTS[expected])
    if chosen is None:
        assert f"no mode fits {memory} bytes" in reason
        assert str(5 if "read" in exact else 7) in reason
    else:
        assert reason.startswith(f"{label(chosen)} takes the least predicted time, {1000 * chosen.seconds:.4g} ms")
        assert reason.count("does not fit") == sum(c.memory > (memory or 99) and c.mode in exact for c in COSTS)
        assert reason.count("not exact") == sum(c.mode not in exact for c in COSTS)


def test_nothing_exact() -> None:
    chosen, reason = choose_mode(COSTS[:2], None, ("layer",))
    assert chosen is None
    assert "exactly" in reason


def test_equals_are_said_to_be_so() -> None:
    same = [
        ModeCost(mode, 0, 1, 1, Traffic(), Traffic(), SentBytes(), 1, 1.0) for mode in ("read", "exchange", "layer")
    ]
    chosen, reason = choose_mode(same)
    assert chosen == same[0]
    assert "all modes are the same here" in reason
