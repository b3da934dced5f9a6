"""Files of machines, those shipped and bad ones; quantities; and seconds of steps against sums taken by hand."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiledseg.architecture.network import Network
from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.cost import tile_walk
from tiledseg.planning.walk.cost_model import CopyRates, Machine
from tiledseg.units import parse_bytes
from tiledseg.user_files.machine import SOME_CPU, find_machine, machine_from, shipped_machines

MEASURED: dict[str, Any] = {
    "name": "test",
    "measured": "today",
    "host": {"ranks": 2, "cores": 2, "threads": 1, "base": 1000},
    "figures": {
        "flops": {"fp32": 2e9, "bf16": 1e9, "fp64": 1e9},
        "lanes": 16,
        "memory_bandwidth": 1e9,
        "launch": 1e-3,
        "links": {"host": {"latency": 1e-4, "bandwidth": 1e8}},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the values with another one at keys joined by points; None: without it."""
    values = copy.deepcopy(MEASURED)
    *groups, last = path.split(".")
    at = values
    for group in groups:
        at = at[group]
    at[last] = value
    if value is None:
        del at[last]
    return values


@pytest.mark.parametrize(
    ("text", "value"),
    [("16 GB", 16 * 10**9), ("1.5TiB", 3 * 2**39), ("1234B", 1234), ("17179869184", 2**34)],
)
def test_quantities(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "16XB", "16G", "-1GiB", "16 GiB free", "1e9", "16iB", "16", "0.5"])
def test_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no number of bytes; give 16GiB|has no unit; give \S+GiB, or \S+B for"):
        parse_bytes(text)


def test_a_measured_machine() -> None:
    machine = machine_from("m.yaml", MEASURED)
    assert machine.kernel(10**5, 2 * 10**6, 16) == pytest.approx(2e-3)
    assert machine.kernel(10**5, 2 * 10**6, 8) == pytest.approx(3e-3), "half of the lanes"
    assert machine.kernel(10**7) == pytest.approx(11e-3)
    assert machine.kernel(0) == 0, "nothing is done, so nothing is launched"
    assert (machine.measured, machine.base, machine.disk) == (True, 1000, None)
    assert (machine.taking_turns(2), machine.taking_turns(4)) == (1, 1), "two ranks a host have a core each"
    assert machine_from("m.yaml", changed("host.ranks", 4)).taking_turns(4) == 2
    assert machine.message_seconds([10**8], 2) == pytest.approx(1 + 1e-4)
    assert machine.all_reduce_seconds(1, 10**9, 1) == 0
    assert Machine(latency=1e-5, bandwidth=1e9).all_reduce_seconds(1, 10**9, 4) == pytest.approx(1.5 + 4e-5)
    assert machine_from("m.yaml", changed("figures.launch", "1e-3")) == machine, "which YAML takes for a word"
    assert [machine.computing(each).flops for each in ("fp32", "bf16", "fp16")] == [2e9, 1e9, 2e9]
    shared = machine_from("m.yaml", changed("figures.links.network", {"latency": 1.0, "bandwidth": 1e6}))
    assert shared.message_seconds([0], 2) == pytest.approx(1e-4)
    assert shared.message_seconds([10**6], 3) == pytest.approx(1 + 2), "ranks of a host share its network"
    rates = {"written": 2e9, "read": 3e9}
    assert machine_from("m.yaml", changed("figures.stores", {"disk": rates})).disk == CopyRates(2e9, 3e9)


@pytest.mark.parametrize("name", shipped_machines())
def test_shipped_machines_say_where_their_figures_are_from(name: str) -> None:
    machine = find_machine(name)
    values = yaml.safe_load((Path(find_machine.__code__.co_filename).parent / f"machines/{name}.yaml").read_text())
    assert machine.measured == (name == SOME_CPU)
    memory = "cores" if machine.memory is None else f"of {machine.memory // 2**30} GiB"
    docs = Path(__file__).parents[2] / "docs"
    pages = " ".join((docs / page).read_text() for page in ("reference/plan-output.md", "how-to/batch-jobs.md"))
    nodes = rf"`{name}`[^.]*? {machine.ranks_per_host}( GPUs)? {memory}[,.]"
    assert re.search(nodes, " ".join(pages.split()))
    if name != SOME_CPU:
        assert "Not measured" in values["note"]
        assert values["sources"]
        assert machine.memory is not None
        assert machine.memory >= 16 * 2**30
        each_way = {"h100": 64e9, "h200": 64e9, "a100": 32e9, "perlmutter": 32e9, "summit": 50e9, "frontier": 36e9}[
            name
        ]
        share = 0.84 if name == "h100" else 0.7  # the first is measured
        assert machine.host_store == CopyRates(*[pytest.approx(share * each_way, rel=0.02)] * 2)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("name", "", "m.yaml: name is ''; give a word"),
        ("host.ranks", 0, "host.ranks is 0; give a whole number, at least 1"),
        ("host.speed", 3, "host has the unknown key 'speed'; give some of ranks"),
        ("figures.flops.fp32", "fast", "figures.flops.fp32 is fast; give a number"),
        ("figures.flops.fp8", 1.0, "figures.flops has the unknown key 'fp8'"),
        ("figures.memory_bandwidth", float("nan"), "figures.memory_bandwidth is nan"),
        ("figures.links.host.latency", 0, "figures.links.host.latency is 0; give a number above 0"),
        ("host.base", "x" * 999, "host.base is x.*[.][.][.]; give a whole number"),
        ("figures.stores", {"disk": {"written": 1e9}}, "figures.stores.disk.read is null; give a number"),
        ("figures.links.far", {}, "figures.links has the unknown key 'far'"),
        ("figures.stores", {"disk": 5e10}, r"figures.stores.disk is 5.*; give some of written, read"),
        ("figures.stores", {"host": {"written": 1, "read": 1}}, "host.cores and figures.stores.host, but ranks on"),
        ("measured", {"flops": {"fp32": 1.0}}, "older version.*run plan --calibrate again, or give figures: flops"),
        ("datasheet", {}, "older version, with other figures; run plan --calibrate again, or give figures: flops"),
    ],
)
def test_bad_values_are_refused_in_one_line(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        machine_from("m.yaml", changed(path, value))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("m.yaml")


@pytest.mark.parametrize("text", ["secret", "- secret\n", "secret: secret\n", ""])
def test_of_a_file_that_is_no_profile_nothing_is_printed(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ConfigError, match=r"a.txt is no machine's profile, which has name, .*; give one of") as error:
        find_machine(str(tmp_path / "a.txt"))
    assert "secret" not in str(error.value)


def test_machines_have_the_names_of_their_gpus_and_others_are_refused(tmp_path: Path) -> None:
    for alias, name in (("v100", "summit"), ("V100", "summit"), ("mi250x", "frontier")):
        assert find_machine(alias) == find_machine(name)
    with pytest.raises(ConfigError, match=r"'cray' is neither one of a100, .* nor a file; .* plan --calibrate"):
        find_machine("cray")
    with pytest.raises(ConfigError, match="cannot read"):
        find_machine(str(tmp_path / "none.yaml"))


FLAT = Machine(1e9, 1e9, 1e-3, "flat", memory_bandwidth=1e30, ranks_per_host=4, cores=4)
FREE = replace(FLAT, latency=0.0, bandwidth=1e20)
NETWORK = UNet(2, base_channels=4)


def seconds(machine: Machine, network: Network = NETWORK, **given: Any) -> float:
    parallel = Parallelism(**{key: given.pop(key) for key in ("halo", "mesh", "stages") if key in given})
    parallel = replace(parallel, recompute=("never",) * parallel.stages)
    asked = {"ranks": 1, "memory": 1 << 40, "grid": (1, 1), "parallel": parallel, "machine": machine} | given
    plan = plan_run(RunQuestion(network, (Extent((64, 64)),), **asked))
    assert plan.seconds is not None
    return plan.seconds


def test_each_part_takes_its_time() -> None:
    """Convolutions alone: a backward pass two forward ones, but for the first layer's one. A figure that is raised adds
    what it counts."""
    costs = tile_walk(NETWORK.graph(), 4, (64, 64)).costs
    flat = seconds(FLAT)
    assert flat == pytest.approx(2 * sum(3 * cost.multiply_adds for cost in costs) / 1e9, rel=1e-6)
    layers = sum(not layer.hands_on for layer in NETWORK.graph().layers)
    around = 3 + 4 * sum(cost.parameters > 0 for cost in costs)  # the loss twice, the input, sums and updates
    assert seconds(replace(FLAT, launch=1e-3)) - flat == pytest.approx(1e-3 * (2 * layers + around))
    busy = replace(FLAT, cores=1, reading=1e-6, ranks_per_host=1)
    assert seconds(busy) - flat == pytest.approx(1e-6 * 4 * 64 * 64)
    assert seconds(replace(FLAT, memory_bandwidth=1e9)) > flat


def test_tiles_and_ranks() -> None:
    """Four tiles on four ranks: the busiest one's, and an all-reduce of 8 bytes a weight in 4 rounds. Ranks that share
    cores take turns, and speak besides."""
    weights = sum(cost.parameters for cost in tile_walk(NETWORK.graph(), 4, (64, 64)).costs)
    reduced = 4 * 1e-3 + 1.5 * 8 * weights / 1e9
    assert seconds(FLAT, grid=(2, 2), ranks=4) == pytest.approx(seconds(FLAT, grid=(2, 2)) / 4 + reduced)
    shared = replace(FREE, cores=1, ranks_per_host=2)
    both = seconds(shared, grid=(2, 2), ranks=2)
    assert both == pytest.approx(2 * seconds(FREE, grid=(2, 2), ranks=2))
    assert seconds(replace(shared, latency=1.0), grid=(2, 2), ranks=2) == pytest.approx(both + 2)


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
    """As long as the slowest stage at least, and less than one after the other. Four ranks of two stages on two cores
    keep these busy."""
    whole = seconds(FREE, grid=(2, 1))
    assert whole / 2 < seconds(FREE, grid=(2, 1), ranks=2, stages=2) < whole
    asked = {"grid": (4, 2), "ranks": 4, "stages": 2}
    four, two = seconds(FREE, **asked), seconds(replace(FREE, cores=2), **asked)
    assert max(four, seconds(FREE, grid=(4, 2)) / 2) <= two * (1 + 1e-9)
    assert two < 2 * four
