"""Seconds of steps: against sums taken by hand over layers, tiles and messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tiledseg.architecture.network import Network
from tiledseg.architecture.unet import UNet
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import graph_work
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.step.cost import layer_costs

FLAT = Machine(1e9, 1e9, 1e-3, "flat", memory_bandwidth=1e30, ranks_per_host=4, cores=4)
FREE = replace(FLAT, latency=0.0, bandwidth=1e20)


def seconds(machine: Machine, network: Network | None = None, size: int = 64, **given: object) -> float:
    parallel = Parallelism(**{key: given.pop(key) for key in ("halo", "mesh", "stages") if key in given})  # type: ignore[arg-type]
    if parallel.stages > 1:
        parallel = replace(parallel, recompute=("never",) * parallel.stages)
    asked = {"ranks": 1, "memory": 1 << 40, "grid": (1, 1)} | given
    network = network or UNet(2, base_channels=4)
    plan = plan_run(RunQuestion(network, (Extent((size, size)),), parallel=parallel, machine=machine, **asked))  # type: ignore[arg-type]
    assert plan.seconds is not None
    return plan.seconds


def test_of_flat_rates_the_multiply_adds_are_left() -> None:
    """Nothing but convolutions takes time: a backward pass two forward ones, but for the first layer's one."""
    network = UNet(2, base_channels=4)
    costs = layer_costs(network.graph(), 4, (64, 64))
    work = sum(3 * cost.multiply_adds for cost in costs)
    assert seconds(FLAT) == pytest.approx(2 * work / 1e9, rel=1e-6)


def test_each_part_takes_its_time() -> None:
    """A figure that is raised by itself adds what it counts."""
    network, flat = UNet(2, base_channels=4), seconds(FLAT)
    tensors = 2 * sum(cost.parameters > 0 for cost in layer_costs(network.graph(), 4, (64, 64)))
    layers = sum(not layer.hands_on for layer in network.graph().layers)
    forward_and_back = 2 * layers
    around = 3 + 2 * tensors  # the loss twice, what enters the network, and sums and updates of weights
    assert seconds(replace(FLAT, launch=1e-3)) - flat == pytest.approx(1e-3 * (forward_and_back + around))
    busy = replace(FLAT, cores=1, reading=1e-6, ranks_per_host=1)
    assert seconds(busy) - flat == pytest.approx(1e-6 * 4 * 64 * 64)
    moved = seconds(replace(FLAT, memory_bandwidth=1e9)) - flat
    bytes_moved = sum(w.forward_bytes + w.backward_bytes for w in graph_work(network.graph(), 4, (64, 64), 4))
    assert 0 < moved < 1.5 * bytes_moved / 1e9


def test_tiles_and_ranks() -> None:
    """Four tiles on four ranks: the busiest one's, and an all-reduce of 8 bytes a weight in 4 rounds."""
    weights = sum(cost.parameters for cost in layer_costs(UNet(2, base_channels=4).graph(), 4, (64, 64)))
    alone = seconds(FLAT, grid=(2, 2))
    reduced = 4 * 1e-3 + 1.5 * 8 * weights / 1e9
    assert seconds(FLAT, grid=(2, 2), ranks=4) == pytest.approx(alone / 4 + reduced)


def test_ranks_that_share_cores_take_turns() -> None:
    shared = replace(FREE, cores=1, ranks_per_host=2)
    both = seconds(shared, grid=(2, 2), ranks=2)
    assert both == pytest.approx(2 * seconds(FREE, grid=(2, 2), ranks=2)), "they take turns on the core"
    assert seconds(replace(shared, latency=1.0), grid=(2, 2), ranks=2) == pytest.approx(both + 2), "and speak besides"


def test_layer_mode_copies_windows_and_speaks() -> None:
    layer = {"grid": (2, 2), "ranks": 4, "halo": "layer"}
    plain = seconds(FREE, **layer)
    assert seconds(replace(FREE, latency=1.0), **layer) > plain + 8
    assert seconds(replace(FREE, launch=1e-3), **layer) > plain + 8e-3
    norm = UNet(2, base_channels=4, norm="instance")
    silent = seconds(FREE, norm, **layer) - plain
    spoken = seconds(replace(FREE, latency=1.0), norm, **layer) - seconds(replace(FREE, latency=1.0), **layer)
    norms = sum(layer.statistics is not None for layer in norm.graph().layers)
    assert spoken - silent == pytest.approx(4 * 2 * norms, rel=1e-6), "all-reduces, forward and backward"


def test_a_pipeline_lasts_as_its_simulation_says() -> None:
    """Two stages of two tiles: as long as the slowest at least, and less than one after the other."""
    whole = seconds(FREE, grid=(2, 1))
    staged = seconds(FREE, grid=(2, 1), ranks=2, stages=2)
    assert whole / 2 < staged < whole


def test_pipelines_that_take_turns_keep_their_cores_busy() -> None:
    """Four ranks of two stages on two cores: at least as long as the cores need for all of it, at most as if no rank
    computed while another waits."""
    asked = {"grid": (4, 2), "ranks": 4, "stages": 2}
    four, two = seconds(FREE, **asked), seconds(replace(FREE, cores=2), **asked)
    work = seconds(FREE, grid=(4, 2))
    assert max(four, work / 2) <= two * (1 + 1e-9)
    assert two < 2 * four
