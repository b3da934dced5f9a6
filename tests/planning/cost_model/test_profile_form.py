"""Files of machines: those shipped, and what is refused in one line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.planning.cost_model.layer_work import LayerWork
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.cost_model.profile import CopyRates, Link, Pass
from tiledseg.planning.cost_model.profile_form import profile_of
from tiledseg.planning.question import Question, run_question
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.user_files.machine import SOME_CPU, find_machine, shipped_machines

MEASURED: dict[str, Any] = {
    "name": "test",
    "host": {"ranks": 2, "cores": 2, "threads": 1},
    "measured": {
        "flops": {"fp32": 2e9, "bf16": 1e9, "fp64": 1e9},
        "bandwidth": 1e9,
        "launch": 1e-3,
        "rates": {"fp32": {"convolution": [[1, 8, 100, 1e9, 5e8]]}},
        "links": {"host": {"latency": 1e-4, "bandwidth": 1e8, "reduce_latency": 2e-4, "reduce_bandwidth": 5e7}},
        "sharing": {"computing": 1.5, "memory": 2.0},
        "base": 1000,
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """With one value, at keys joined by points, that is another; None: without it."""
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
    profile = profile_of("m.yaml", MEASURED)
    work = LayerWork("convolution", 8, 1.0, 100, 10**6, 2, 10**6, 10**6, 4)
    assert profile.passes(work) == Pass(pytest.approx(1e-3 + 2e-3), pytest.approx(1e-3 + 8e-3))
    pool = work._replace(kind="pool", passes=1, multiply_adds=0)
    assert profile.passes(pool) == Pass(pytest.approx(2e-3), pytest.approx(2e-3)), "no table: by the bandwidth"
    assert profile.slowed(Pass(1.0, 2.0), work, 2) == Pass(1.5, 3.0)
    assert profile.slowed(Pass(1.0, 2.0), pool, 4) == Pass(2.0, 4.0)
    assert profile.slowed(Pass(1.0, 2.0), pool, 1) == Pass(1.0, 2.0)
    assert (profile.oversubscribed(2), profile.oversubscribed(4)) == (1, 2)
    assert profile.link(2) == Link(1e-4, 1e8, 2e-4, 5e7)
    assert profile.measured
    assert profile.base == 1000


def test_a_disk_is_measured_or_a_share_of_a_datasheet() -> None:
    known = {"written": 2e9, "read": 3e9}
    assert profile_of("m.yaml", changed("measured.disk", known)).disk == CopyRates(2e9, 3e9)
    assert profile_of("m.yaml", MEASURED).disk is None
    assert find_machine("summit").disk == CopyRates(pytest.approx(0.7 * 2.1e9), pytest.approx(0.7 * 5.5e9))
    assert find_machine("a100").disk is None, "nodes differ"


def test_the_way_to_the_hosts_memory_is_measured_or_a_share_of_a_datasheet() -> None:
    values = changed("host.cores", None)
    assert profile_of("m.yaml", values).host_store is None
    values["measured"]["host_store"] = {"written": 5e10, "read": 4e10}
    assert profile_of("m.yaml", values).host_store == CopyRates(5e10, 4e10)
    each_way = {"h100": 64e9, "h200": 64e9, "a100": 32e9, "summit": 50e9, "frontier": 36e9}
    assert {*each_way} == {*shipped_machines()} - {SOME_CPU}
    for name, rate in each_way.items():
        assert find_machine(name).host_store == CopyRates(pytest.approx(0.7 * rate), pytest.approx(0.7 * rate))
    assert find_machine(SOME_CPU).host_store is None


CROWDED = {
    "turns": 1.25, "exchange": 2.0, "window": 3e-9, "summed": 4e-9, "norm": 5.0, "reduce_latency": 6.0,
    "reduce_bandwidth": 7e6,
}  # fmt: skip


def test_more_ranks_than_cores() -> None:
    """What was measured of them counts for them alone; where nothing was, all takes as often longer as they take
    turns."""
    values = changed("host.ranks", 4)
    values["measured"] |= {"crowded": CROWDED, "exchange": 1.0}
    profile = profile_of("m.yaml", values)
    assert profile.of(2) is profile
    assert (profile.by_the_clock(2), profile.by_the_clock(4)) == (1, 2.5)
    four = profile.of(4)
    assert (four.exchange, four.window, four.summed, four.norm) == (2.0, 3e-9, 4e-9, 5.0)
    assert four.link(4) == Link(1e-4, 1e8, 6.0, 7e6)
    del values["measured"]["crowded"]
    plain = profile_of("m.yaml", values)
    assert (plain.of(4).exchange, plain.by_the_clock(4)) == (2.0, 2)


def test_a_wide_kernel_has_rates_of_its_own_or_those_of_a_usual_one() -> None:
    work = LayerWork("wide convolution", 8, 1.0, 100, 10**6, 1, 10**6, 10**6, 4)
    usual = profile_of("m.yaml", MEASURED)
    assert usual.passes(work) == usual.passes(work._replace(kind="convolution"))
    own = changed("measured.rates.fp32.wide convolution", [[1, 8, 100, 4e9, 2e9]])
    assert profile_of("m.yaml", own).passes(work) == Pass(pytest.approx(1e-3 + 5e-4), pytest.approx(1e-3 + 1e-3))
    kinds = [
        Convolution(8, 1).speed,
        Convolution(8, 3).speed,
        Convolution(8, 5).speed,
        Convolution(8, 1, across=9).speed,
    ]
    assert kinds == ["pointwise", "convolution", "wide convolution", "convolution"]


def test_some_cpu_is_measured() -> None:
    assert find_machine(SOME_CPU).measured


@pytest.mark.parametrize("name", sorted({*shipped_machines()} - {SOME_CPU}))
def test_shipped_machines_have_sources_and_are_not_measured(name: str) -> None:
    profile = find_machine(name)
    values = yaml.safe_load((Path(find_machine.__code__.co_filename).parent / f"machines/{name}.yaml").read_text())
    assert not profile.measured
    assert "Not measured" in values["note"]
    assert values["sources"]
    assert profile.flops["fp32"] < values["datasheet"]["flops"]["fp32"], "a share of the datasheet's figure"
    assert profile.memory is not None
    assert profile.memory >= 16 * 2**30


def test_numbers_that_yaml_takes_for_words() -> None:
    assert profile_of("m.yaml", changed("measured.launch", "1e-3")) == profile_of("m.yaml", MEASURED)


def test_figures_that_are_given_stand_in_place_of_the_profiles() -> None:
    profile = profile_of("m.yaml", MEASURED).with_figures(flops=4e9, latency=1.0)
    work = LayerWork("convolution", 8, 1.0, 100, 10**8, 2, 0, 0, 4)
    assert profile.passes(work) == Pass(pytest.approx(1e-3 + 0.05), pytest.approx(1e-3 + 0.1))
    assert profile.link(2) == Link(1.0, 1e8, 1.0, 5e7)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("name", "", "m.yaml: name is ''; give a word"),
        ("host.ranks", 0, "host.ranks is 0; give a whole number from 1"),
        ("host.ranks", True, "host.ranks is True"),
        ("host.speed", 3, "unknown key 'host.speed'; give some of ranks"),
        ("measured", None, "either measured or datasheet figures"),
        ("measured.flops.fp32", "fast", "measured.flops.fp32 is 'fast'; give a number"),
        ("measured.flops.fp8", 1.0, "unknown key 'measured.flops.fp8'"),
        ("measured.flops.bf16", None, "measured.flops.bf16 is None; give a number"),
        ("measured.bandwidth", 0, "measured.bandwidth is 0.0; give a number above 0"),
        ("measured.bandwidth", float("nan"), "measured.bandwidth is nan"),
        ("measured.launch", -1, "measured.launch is -1; give a number from 0"),
        ("measured.rates.fp32.convolution", [], r"measured.rates.fp32.convolution is \[\]; give a list of points"),
        ("measured.rates.fp32.convolution", [[1, 2, 3]], r"is \[1, 2, 3\]; give points of five positive numbers"),
        ("measured.rates.fp32.convolution", [[1, 8, 0, 1, 1]], "five positive numbers: ratio, channels, pixels"),
        ("measured.rates.fp32.dance", [[1, 8, 1, 1, 1]], "unknown key 'measured.rates.fp32.dance'"),
        ("measured.links.host.latency", 0, "measured.links.host.latency is 0.0; give a number above 0"),
        ("measured.base", "x" * 99, "measured.base is 'xxx.*[.][.][.]; give a number"),
        ("measured.disk", {"written": 1e9}, "measured.disk.read is None; give a number"),
        ("measured.disk", {"written": 0, "read": 1e9}, "measured.disk.written is 0.0; give a number above 0"),
        ("measured.disk", {"seek": 1}, "unknown key 'measured.disk.seek'"),
        ("measured.host_store", 5e10, "measured.host_store is 50000000000.0; give keys below it: written, read"),
        ("measured.host_store", {"written": 1e9, "read": -1}, "measured.host_store.read is -1; give a number from 0"),
        (
            "measured.host_store",
            {"written": 1, "read": 1},
            "host.cores and a host_store, but ranks on cores compute in",
        ),
        ("datasheet", {}, "either measured or datasheet figures"),
    ],
)
def test_bad_values_are_refused_in_one_line(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        profile_of("m.yaml", changed(path, value))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("m.yaml")


@pytest.mark.parametrize("values", [None, [], "text", 3])
def test_what_is_no_map_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"m.yaml is no machine's profile, which has name, note, .*; give one of"):
        profile_of("m.yaml", values)


def test_unknown_machines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'cray' is neither one of a100, .* nor a file; .* plan --calibrate"):
        find_machine("cray")
    with pytest.raises(ConfigError, match="cannot read"):
        find_machine(str(tmp_path / "none.yaml"))


def test_fp16_has_rates_of_its_own() -> None:
    """Of values of two bytes, which bf16 has too; where nobody has measured any, those of fp32."""
    values = changed("measured.rates", None)
    flops = values["measured"]["flops"]
    work = LayerWork("convolution", 8, 1.0, 100, 10**6, 2, 10, 10, 2)

    def seconds(precision: str) -> float:
        profile = profile_of("m.yaml", values)
        return profile.computing(precision).passes(work).forward - profile.launch

    assert (seconds("bf16"), seconds("fp16")) == (pytest.approx(2e-3), pytest.approx(1e-3))
    flops["fp16"] = 8e9
    assert (seconds("bf16"), seconds("fp16")) == (pytest.approx(2e-3), pytest.approx(2.5e-4))


def test_a_v100_is_quicker_in_fp16() -> None:
    def seconds(precision: str) -> float:
        machine = Machine.known(find_machine("summit"))
        asked = Question((2048, 2048), UNet(4), (2, 2), precision=precision, machine=machine)
        assert asked.machine == run_question(asked, Parallelism(), 1).machine
        prices = Prices(asked.network.graph(), 4, asked.bytes_per_value, asked.machine, 1)
        return sum(node.forward for node in prices.nodes((1024, 1024)))

    assert seconds("fp16") < 0.6 * seconds("bf16")


@pytest.mark.parametrize(("alias", "name"), [("v100", "summit"), ("V100", "summit"), ("mi250x", "frontier")])
def test_a_gpu_names_the_machine_that_it_is_of(alias: str, name: str) -> None:
    assert find_machine(alias) == find_machine(name)


def test_names_of_machines_may_be_in_capitals() -> None:
    assert find_machine("H200") == find_machine("h200")
