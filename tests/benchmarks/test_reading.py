"""The reading benchmark runs, and every way of reading gives every window (it asserts so itself)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.comm.launching import clean_environment, run_job


def test_the_quick_run_fills_the_table(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.reading", "--quick", "--json", str(found)]
    done = run_job(command, environ=clean_environment())
    assert done.code == 0, done.err
    rows = [line for line in done.out.splitlines() if re.match(r"\| [^-]", line)][1:]
    assert [row.split(" |")[0] for row in rows[-2:]] == ["| HDF5 tile store", "| memory map"]
    assert len(rows) == 9
    measurements = json.loads(found.read_text())
    assert len(measurements) == 9 * 3 + 4
    assert all(len(values) == 2 and min(values) > 0 for *_, values in measurements)
