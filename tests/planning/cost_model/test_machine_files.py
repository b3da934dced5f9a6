"""Files of machines: those shipped, and bad ones, which are refused in one line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.planning.cost_model.machine import CopyRates, LayerWork, Link, Machine, Pass
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.question import Question
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.step.halo_traffic import SentBytes
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
    if value is None:
        del at[last]
    else:
        at[last] = value
    return values


def test_a_measured_machine() -> None:
    machine = machine_from("m.yaml", MEASURED)
    assert machine.layer(LayerWork(16, 10**6, 2, 10**5, 10**5)) == Pass(pytest.approx(2e-3), pytest.approx(3e-3))
    assert machine.layer(LayerWork(8, 10**6, 2, 10**5, 10**5)).forward == pytest.approx(3e-3), "half of the lanes"
    assert machine.layer(LayerWork(8, 0, 1, 10**6, 10**7)) == Pass(pytest.approx(2e-3), pytest.approx(11e-3))
    assert machine.layer(LayerWork(8, 0, 0, 0, 0)) == Pass(), "nothing is done, so nothing is launched"
    assert (machine.taking_turns(2), machine.taking_turns(4)) == (1, 1), "two ranks a host have a core each"
    assert machine.message_seconds(SentBytes(1, 10**8), 2) == pytest.approx(1 + 1e-4)
    assert machine.measured
    assert machine.base == 1000
    assert machine_from("m.yaml", changed("host.ranks", 4)).taking_turns(4) == 2


def test_stores_are_known_or_not() -> None:
    rates = {"written": 2e9, "read": 3e9}
    assert machine_from("m.yaml", changed("figures.stores", {"disk": rates})).disk == CopyRates(2e9, 3e9)
    assert machine_from("m.yaml", MEASURED).disk is None
    on_devices = changed("host.cores", None)
    on_devices["figures"]["stores"] = {"host": rates}
    assert machine_from("m.yaml", on_devices).host_store == CopyRates(2e9, 3e9)
    assert find_machine("summit").disk == CopyRates(pytest.approx(0.7 * 2.1e9), pytest.approx(0.7 * 5.5e9))
    assert find_machine("a100").disk is None, "nodes differ"
    each_way = {"h100": 64e9, "h200": 64e9, "a100": 32e9, "summit": 50e9, "frontier": 36e9}
    assert {*each_way} == {*shipped_machines()} - {SOME_CPU}
    for name, rate in each_way.items():
        assert find_machine(name).host_store == CopyRates(pytest.approx(0.7 * rate), pytest.approx(0.7 * rate))
    assert find_machine(SOME_CPU).host_store is None


def test_hosts_share_their_network_among_their_ranks() -> None:
    values = changed("figures.links.network", {"latency": 1.0, "bandwidth": 1e6})
    machine = machine_from("m.yaml", values)
    assert machine.message_seconds(SentBytes(1, 0), 2) == pytest.approx(1e-4)
    assert machine.message_seconds(SentBytes(1, 10**6), 3) == pytest.approx(1 + 2)


@pytest.mark.parametrize("name", shipped_machines())
def test_shipped_machines_say_where_their_figures_are_from(name: str) -> None:
    machine = find_machine(name)
    values = yaml.safe_load((Path(find_machine.__code__.co_filename).parent / f"machines/{name}.yaml").read_text())
    assert machine.measured == (name == SOME_CPU)
    if name != SOME_CPU:
        assert "Not measured" in values["note"]
        assert values["sources"]
        assert machine.memory is not None
        assert machine.memory >= 16 * 2**30


def test_numbers_that_yaml_takes_for_words() -> None:
    assert machine_from("m.yaml", changed("figures.launch", "1e-3")) == machine_from("m.yaml", MEASURED)


def test_flags_stand_in_place_of_the_profiles_figures() -> None:
    machine = machine_from("m.yaml", MEASURED).with_figures(flops=4e9, latency=1.0).computing("bf16")
    assert machine.layer(LayerWork(16, 10**8, 2, 1, 1)) == Pass(pytest.approx(1e-3 + 0.05), pytest.approx(1e-3 + 0.1))
    assert (machine.latency, machine.bandwidth) == (1.0, 1e8)
    assert machine.network == Link(1.0, 10e9)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("name", "", "m.yaml: name is ''; give a word"),
        ("host.ranks", 0, "host.ranks is 0; give at least 1"),
        ("host.ranks", True, "host.ranks is True"),
        ("host.speed", 3, "unknown key 'host.speed'; give some of ranks"),
        ("figures", None, "figures is null; give keys below it: flops, lanes"),
        ("figures.flops.fp32", "fast", "figures.flops.fp32 is fast; give a number"),
        ("figures.flops.fp32", None, "figures.flops.fp32 is null; give a number"),
        ("figures.flops.fp8", 1.0, "unknown key 'figures.flops.fp8'"),
        ("figures.memory_bandwidth", 0, "figures.memory_bandwidth is 0; give a number above 0"),
        ("figures.memory_bandwidth", float("nan"), "figures.memory_bandwidth is nan"),
        ("figures.launch", -1, "figures.launch is -1; give at least 0"),
        ("figures.rates", {}, "unknown key 'figures.rates'; give some of flops, lanes"),
        ("figures.links.host.latency", 0, "figures.links.host.latency is 0; give a number above 0"),
        ("host.base", "x" * 999, "host.base is x.*[.][.][.]; give a whole number"),
        ("figures.stores", {"disk": {"written": 1e9}}, "figures.stores.disk.read is null; give a number"),
        ("figures.stores", {"disk": {"seek": 1}}, "unknown key 'figures.stores.disk.seek'"),
        ("figures.stores", {"disk": 5e10}, r"figures.stores.disk is 5.*; give keys below it: written, read"),
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


@pytest.mark.parametrize("values", [None, [], "text", 3])
def test_what_is_no_map_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"m.yaml is no machine's profile, which has name, note, .*; give one of"):
        machine_from("m.yaml", values)


def test_unknown_machines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'cray' is neither one of a100, .* nor a file; .* plan --calibrate"):
        find_machine("cray")
    with pytest.raises(ConfigError, match="cannot read"):
        find_machine(str(tmp_path / "none.yaml"))


def test_a_v100_is_quicker_in_fp16() -> None:
    def seconds(precision: str) -> float:
        asked = Question((2048, 2048), UNet(4), (2, 2), precision=precision, machine=find_machine("summit"))
        assert asked.machine == asked.run(Parallelism(), 1).machine
        prices = Prices(asked.network.graph(), 4, asked.bytes_per_value, asked.machine, 1)
        return sum(node.forward for node in prices.nodes((1024, 1024)))

    assert seconds("fp16") < 0.6 * seconds("bf16")


def test_a_precision_without_a_rate_has_that_of_fp32() -> None:
    machine = machine_from("m.yaml", MEASURED)
    assert [machine.computing(each).flops for each in ("fp32", "bf16", "fp16")] == [2e9, 1e9, 2e9]
    assert Machine().computing("bf16") == Machine()


@pytest.mark.parametrize(("alias", "name"), [("v100", "summit"), ("V100", "summit"), ("mi250x", "frontier")])
def test_a_gpu_names_the_machine_that_it_is_of(alias: str, name: str) -> None:
    assert find_machine(alias) == find_machine(name)
