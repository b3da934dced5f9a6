from __future__ import annotations

from pathlib import Path

import pytest

from tiledseg.errors import ConfigError
from tiledseg.planning.cost_model.machine import LayerWork, Machine, Pass, parse_bandwidth, parse_flops, parse_latency
from tiledseg.planning.step.halo_traffic import SentBytes
from tiledseg.units.quantities import parse_bytes
from tiledseg.user_files.machine import find_machine


@pytest.mark.parametrize(
    ("text", "value"),
    [("10T", 10e12), ("10 TFLOPS", 10e12), ("500G", 5e11), ("1.5Tflop/s", 1.5e12), ("1e13", 1e13), ("7", 7.0)],
)
def test_flops(text: str, value: float) -> None:
    assert parse_flops(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("25GB", 25e9), ("25 GB/s", 25e9), ("1GiB", 2**30), ("800MB", 8e8), ("2KiB/s", 2048), ("1e10", 1e10), ("5B", 5)],
)
def test_bandwidths(text: str, value: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"), [("20us", 2e-5), ("1.5 ms", 1.5e-3), ("3ns", 3e-9), ("0.001", 1e-3), ("2s", 2)]
)
def test_latencies(text: str, value: float) -> None:
    assert parse_latency(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "count"),
    [("16GiB", 2**34), ("16 GB", 16 * 10**9), ("1.5TiB", 3 * 2**39), ("2kB", 2000), ("2KiB", 2048), ("1234B", 1234)],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "16XB", "16G", "-1GiB", "16 GiB free", "1e9", "16iB"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no number of bytes; give 16GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("parse", [parse_flops, parse_bandwidth, parse_latency])
@pytest.mark.parametrize("text", ["", "fast", "-1", "10 X", "1 2", "T", "10Tus", "inf", "nan"])
def test_what_is_no_quantity_is_refused(parse: object, text: str) -> None:
    with pytest.raises(ConfigError, match=r"--\w+ is '.*'; give .* or a plain number"):
        parse(text)  # type: ignore[operator]


@pytest.mark.parametrize(
    "values",
    [{"flops": 0.0}, {"bandwidth": -1.0}, {"latency": -1e-6}, {"flops": float("inf")}, {"latency": float("nan")}],
)
def test_speeds_must_be_positive(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"give at least [01]|give at most|give a number"):
        Machine(**values)


def test_seconds() -> None:
    machine = Machine(flops=1e12, bandwidth=1e9, latency=1e-5)
    assert machine.layer(LayerWork(8, 10**12, 2, 1, 1)) == Pass(2.0, 4.0), "two flops each"
    assert machine.message_seconds(SentBytes(3, 10**9)) == pytest.approx(1.00003)
    assert machine.all_reduce_seconds(1, 10**9, 1) == 0
    assert machine.all_reduce_seconds(1, 10**9, 4) == pytest.approx(1.5 + 4e-5)


@pytest.mark.parametrize("text", ["16", "0.5", "1000000"])
def test_bytes_that_are_no_memory_have_lost_their_unit(text: str) -> None:
    with pytest.raises(ConfigError, match=f"memory '{text}' has no unit; give {text}GiB, or {text}B for"):
        parse_bytes(text)
    assert (parse_bytes("16B"), parse_bytes("17179869184")) == (16, parse_bytes("16GiB"))


@pytest.mark.parametrize(
    "text", ["secret", "- secret\n", "secret: secret\n", "root:secret:0:0\nuser:secret\n", "3\n", ""]
)
def test_of_a_file_that_is_no_profile_nothing_is_printed(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(
        ConfigError, match=r"a.txt is no machine's profile, which has name, .*; give one of --calibrate"
    ) as error:
        find_machine(str(tmp_path / "a.txt"))
    assert "secret" not in str(error.value)
