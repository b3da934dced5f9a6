"""Seconds of steps: against sums taken by hand over layers, tiles and messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.cost_model.test_profile_form import MEASURED
from tiledseg.architecture.network import Network
from tiledseg.architecture.unet import UNet
from tiledseg.planning.cost_model.layer_work import CLASSES, graph_work
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.profile import Link, Profile, Sharing
from tiledseg.planning.cost_model.profile_form import profile_of
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.step.cost import layer_costs

LINK = Link(1e-3, 1e9, 2e-3, 5e8)
FLAT = Profile(
    "flat", dict.fromkeys(("fp32", "bf16", "fp64"), 1e9), 1e30, 0.0, {"host": LINK, "network": LINK}, 4, cores=4
)


def seconds(profile: Profile, network: Network | None = None, size: int = 64, **given: object) -> float:
    parallel = Parallelism(**{key: given.pop(key) for key in ("halo", "mesh", "stages") if key in given})  # type: ignore[arg-type]
    if parallel.stages > 1:
        parallel = replace(parallel, recompute=("never",) * parallel.stages)
    asked = {"ranks": 1, "memory": 1 << 40, "grid": (1, 1)} | given
    machine = Machine.known(profile)
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
    weights = sum(cost.parameters for cost in layer_costs(network.graph(), 4, (64, 64)))
    tensors = 2 * sum(cost.parameters > 0 for cost in layer_costs(network.graph(), 4, (64, 64)))
    layers = sum(not layer.hands_on for layer in network.graph().layers)
    assert seconds(replace(FLAT, gradient=1e-3)) - flat == pytest.approx(1e-3 * weights)
    assert seconds(replace(FLAT, update=1e-3)) - flat == pytest.approx(1e-3 * weights)
    assert seconds(replace(FLAT, tensor=1e-3)) - flat == pytest.approx(1e-3 * tensors)
    forward_and_back = 2 * layers
    around = 3  # the loss twice, and what enters the network
    assert seconds(replace(FLAT, launch=1e-3)) - flat == pytest.approx(1e-3 * (forward_and_back + around))
    busy = replace(FLAT, cores=1, reading=1e-6, opening=1.0, ranks_per_host=1)
    assert seconds(busy) - flat == pytest.approx(1.0 + 1e-6 * 4 * 64 * 64)
    moved = seconds(replace(FLAT, bandwidth=1e9)) - flat
    bytes_moved = sum(w.forward_bytes + w.backward_bytes for w in graph_work(network.graph(), 4, (64, 64), 4))
    assert 0 < moved < 1.5 * bytes_moved / 1e9


def test_tiles_and_ranks() -> None:
    """Four tiles on four ranks: the busiest one's, and an all-reduce of 8 bytes a weight in 4 rounds."""
    weights = sum(cost.parameters for cost in layer_costs(UNet(2, base_channels=4).graph(), 4, (64, 64)))
    alone = seconds(FLAT, grid=(2, 2))
    reduced = 4 * 2e-3 + 1.5 * 8 * weights / 5e8
    assert seconds(FLAT, grid=(2, 2), ranks=4) == pytest.approx(alone / 4 + reduced)


def test_ranks_that_share_cores_take_longer() -> None:
    network = UNet(2, base_channels=4)
    two = replace(FLAT, cores=2, sharing=Sharing(1.5, 1.0), ranks_per_host=2)
    alone, both = seconds(two, network, grid=(2, 2)), seconds(two, network, grid=(2, 2), ranks=2)
    assert both == pytest.approx(1.5 * alone / 2 + seconds(FLAT, grid=(2, 2), ranks=2) - seconds(FLAT, grid=(2, 2)) / 2)
    one = replace(FLAT, cores=1, ranks_per_host=2)
    assert seconds(one, network, grid=(2, 2), ranks=2) > alone, "they take turns on the core, and speak besides"


def test_layer_mode_copies_windows_and_speaks() -> None:
    free = replace(FLAT, links={"host": Link(0.0, 1e20, 0.0, 1e20), "network": LINK})
    layer = {"grid": (2, 2), "ranks": 4, "halo": "layer"}
    plain = seconds(free, **layer)
    assert seconds(replace(FLAT, links={"host": Link(1.0, 1e20, 0.0, 1e20), "network": LINK}), **layer) > plain + 8
    norm = UNet(2, base_channels=4, norm="instance")
    silent = seconds(free, norm, **layer)
    reduced = seconds(replace(free, links={"host": Link(0.0, 1e20, 1.0, 1e20), "network": LINK}), norm, **layer)
    norms = sum(layer.statistics is not None for layer in norm.graph().layers)
    assert reduced - silent == pytest.approx(4 * (2 * norms + 1), rel=1e-6), "forward, backward, and of gradients"


def test_a_pipeline_lasts_as_its_simulation_says() -> None:
    """Two stages of two tiles: as long as the slowest at least, and less than one after the other."""
    free = replace(FLAT, links={"host": Link(0.0, 1e20, 0.0, 1e20), "network": LINK})
    whole = seconds(free, grid=(2, 1))
    staged = seconds(free, grid=(2, 1), ranks=2, stages=2)
    assert whole / 2 < staged < whole


def test_norms_take_what_was_measured_of_their_sums() -> None:
    """Each sum, forward and backward, besides its all-reduce; nothing where no rank sums."""
    network, layer = UNet(2, base_channels=4, norm="instance"), {"grid": (2, 2), "ranks": 4, "halo": "layer"}
    sums = 2 * sum(layer.statistics is not None for layer in network.graph().layers)
    more = seconds(replace(FLAT, norm=1.0), network, **layer) - seconds(FLAT, network, **layer)
    assert more == pytest.approx(sums)
    assert seconds(replace(FLAT, norm=1.0), network) == seconds(FLAT, network)


def test_pipelines_that_take_turns_keep_their_cores_busy() -> None:
    """Four ranks of two stages on two cores: at least as long as the cores need for all of it, at most as if no rank
    computed while another waits. Where no core is free, messages take their time besides."""
    free = replace(FLAT, links={"host": Link(0.0, 1e20, 0.0, 1e20), "network": LINK})
    asked = {"grid": (4, 2), "ranks": 4, "stages": 2}
    four, two = seconds(free, **asked), seconds(replace(free, cores=2), **asked)
    work = seconds(free, grid=(4, 2))
    assert max(four, work / 2) <= two * (1 + 1e-9)
    assert two < 2 * four
    slow = {"host": Link(1.0, 1e20, 0.0, 1e20), "network": LINK}
    apart = (seconds(replace(FLAT, links=slow, cores=cores), **asked) for cores in (4, 5))
    assert next(apart) > next(apart) + 2


def test_every_layer_of_every_network_has_a_class() -> None:
    for network in (UNet(3, norm="pixel"), UNet(3, norm="batch", upsampling="bilinear"), UNet(2, upsampling="nearest")):
        works = graph_work(network.graph(), 4, (64, 64), 4)
        assert len(works) == len(network.graph())
        assert {work.kind for work in works} <= set(CLASSES)


def test_predictions_are_the_same_twice() -> None:
    profile = profile_of("m.yaml", MEASURED)
    assert seconds(profile, grid=(2, 2), ranks=2) == seconds(profile, grid=(2, 2), ranks=2)
