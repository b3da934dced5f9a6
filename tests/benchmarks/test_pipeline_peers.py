"""The programs of the pipeline benchmark run at a tiny size, and every peer computes what one process computes."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.comm.launching import MPIRUN, ROOT, clean_environment, oversubscribe, run_job

PROGRAMS = "benchmarks.pipeline"
NETWORK = ("--levels", "3", "--base-channels", "4", "--size", "16")
TINY = (*NETWORK, "--micro-batches", "4", "--dtype", "float64", "--repeat", "1")
TORCHGPIPE = importlib.util.find_spec("torchgpipe")


def line_of(command: Sequence[str], *flags: str) -> dict:
    """What a program says; it finds torchgpipe where these tests do."""
    paths = [str(ROOT)]
    if TORCHGPIPE is not None and TORCHGPIPE.origin is not None:
        paths.append(str(Path(TORCHGPIPE.origin).parents[1]))
    done = run_job([*command, *TINY, *flags], environ=clean_environment({"PYTHONPATH": os.pathsep.join(paths)}))
    assert done.code == 0, done.err
    return json.loads([line for line in done.out.splitlines() if line.startswith("{")][-1])


def alone(program: str) -> list[str]:
    return [sys.executable, "-m", f"{PROGRAMS}.{program}"]


def mpirun(ranks: int, program: str) -> list[str]:
    return [str(MPIRUN), *oversubscribe(), "-n", str(ranks), *alone(program)]


def check(line: dict, stages: int) -> None:
    assert max(line[f"{what}_differs_by"] for what in ("loss", "worst_weight")) < 1e-12
    assert line["gradients_differ_by"] < 1e-12
    assert (line["stages"], len(line["balance"]), len(line["seconds"])) == (stages, stages, 1)
    assert (line["bytes_sent"] > 0) == (stages > 1)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_serial_run_equals_its_reference(layout: str) -> None:
    check(line_of(alone("serial"), "--layout", layout), stages=1)


def test_a_reference_of_another_workload_is_refused(tmp_path: Path) -> None:
    kept = ["--reference", str(tmp_path / "serial.safetensors")]
    serial = alone("serial")
    first, again = line_of(serial, *kept), line_of(serial, *kept)
    assert first["loss"] == again["loss"]
    done = run_job([*serial, *TINY, *kept, "--micro-batches", "3"], environ=clean_environment())
    assert done.code == 2
    assert "another workload" in done.errors[0]


@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_torchs_pipelining_equals_one_process(schedule: str) -> None:
    check(line_of(mpirun(2, "peers.torch_pipelining"), "--schedule", schedule), stages=2)


@pytest.mark.skipif(TORCHGPIPE is None, reason="torchgpipe is not on the path")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_torchgpipe_equals_one_process(checkpoint: str) -> None:
    flags = ("--checkpoint", checkpoint, "--workers", "partition")
    check(line_of(alone("peers.torchgpipe_pipeline"), *flags), stages=2)


@pytest.mark.skipif(TORCHGPIPE is not None, reason="torchgpipe is on the path")
def test_a_peer_that_is_absent_says_so() -> None:
    done = run_job(alone("peers.torchgpipe_pipeline"), environ=clean_environment())
    assert done.code == 3
    assert done.err.strip() == "not runnable: No module named 'torchgpipe'"
