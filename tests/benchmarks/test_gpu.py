"""The battery for one GPU runs at its small sizes, at night whole, and its wheels are checked by their metadata."""

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import wheels
from benchmarks.gpu.figures import FIGURES
from benchmarks.gpu.lines import read_lines
from benchmarks.gpu.report import MEASURED, PAGES, device_of, table, with_table
from tests.comm.launching import ROOT, clean_environment, run_job
from tests.conftest import NIGHTLY

FOLDER = ROOT / "benchmarks/gpu"


@pytest.mark.timeout(1200)
def test_the_small_form_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--out", str(tmp_path), "--seconds", "1100"]
    some = () if NIGHTLY else ("versions", "mapping")
    command += ["--parts", *some] if some else []
    done = run_job(command, seconds=1150, environ=clean_environment())
    lines = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text().splitlines()]
    assert done.code == 0, [line for line in lines if line["state"] == "failed"]
    assert [line["name"] for line in lines if line["state"] == "failed"] == []
    parts = {line["part"] for line in lines if line["name"] == "part"}
    assert parts == (set(some) or {p.stem for p in FOLDER.glob("*.py") if "begin_part(__file__)" in p.read_text()})
    assert {path.name for path in tmp_path.iterdir()} == {"measurements.jsonl", "battery.log"}
    by_name = {(line["part"], line["name"]): line for line in lines}
    assert not NIGHTLY or by_name["training_step", "production step fp32 default"]["value"]["ms"] > 0
    assert run_job(command, environ=clean_environment()).code == 2, "an earlier run's lines must stay as they are"
    there = {(line["part"], _any_size(line["name"])) for line in lines}
    named = [(f.part, _any_size(name)) for f in FIGURES for name in (f.name, f.over) if name is not None]
    assert [name for name in named if name not in there and NIGHTLY] == [], (
        "a figure of a line that the battery does not write"
    )
    assert device_of(lines) is None, "a CPU's times are no figures of a GPU"
    assert "none of these figures exists" in table(lines)


@pytest.mark.skipif(not NIGHTLY, reason="minutes of torch's compiler")
@pytest.mark.timeout(900)
def test_bytes_of_a_compiled_step_are_counted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.element_bytes", "--out", str(tmp_path), "--work", str(tmp_path)]
    done = run_job(command, seconds=860, environ=clean_environment())
    assert done.code == 0, done.err
    found = {line["name"]: line["value"] for line in read_lines(tmp_path)}
    assert found["compiled"]["graphs"] == 2
    assert found["compiled"]["all"] < 0.7 * found["node by node"]["all"]


def _any_size(name: str) -> str:
    """The small form has other sizes."""
    return re.sub(r"\d+ px", "N px", name)


def test_the_pages_have_the_table_of_the_lines_that_are_kept() -> None:
    expected = table(read_lines(MEASURED))
    for page in PAGES:
        assert with_table(page.read_text(), expected) == page.read_text(), (
            f"{page}: make it anew by benchmarks.gpu.report"
        )


def test_wheels_that_lack_something_are_told(tmp_path: Path) -> None:
    first, second = tmp_path / "one-1-py3-none-any.whl", tmp_path / "two-3-py3-none-any.whl"
    for path, required in ((first, "two (>=3)\nRequires-Dist: four; python_version < '3.8'"), (second, "NumPy>1")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{path.name[:5]}.dist-info/METADATA", f"Requires-Dist: {required}\n\nRequires-Dist: no\n")
    assert (wheels.needs(first), wheels.needs(second)) == ({"two"}, {"numpy"})
    assert wheels.faults([first]) == [f"{first.name} needs two, which is neither collected nor on the machine"]
    assert wheels.faults([first, second]) == []
    assert wheels.faults([first, second, tmp_path / "two-3-py3-none-any.whl"]) == ["two wheels of two: remove one"]
