"""Predicted against measured: the cases, the figures of the table, and a small run from end to end; no timings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from scipy.stats import spearmanr

from benchmarks.cost_model.cases import Case, cases
from benchmarks.cost_model.job import run
from benchmarks.cost_model.table import Row, chosen_over_best, predicted, rank_correlation, report
from tests.planning.cost_model.test_profile_form import MEASURED
from tiledseg.architecture.presets import build_network
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.commands.config_file import parse_config
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.profile_form import profile_of
from tiledseg.scene import main as scene
from tiledseg.training.calibration.exchanges import NETWORK, WIDER
from tiledseg.training.calibration.layers import usual_cases

ROWS = [
    Row("a, 1", "a", 1, (1.0, 1.2), 1.05),
    Row("a, 2", "a", 1, (2.0,), 1.0),
    Row("b, 1", "b", 2, (4.0,), 6.0),
]


def test_no_network_that_is_predicted_is_one_that_a_calibration_measures() -> None:
    found = cases()
    assert len({case.name for case in found}) == len(found) >= 60
    calibrated = {case.network for case in usual_cases()} | {
        NETWORK,
        WIDER,
        dataclasses.replace(NETWORK, norm="instance"),
    }
    for case in found:
        keys = {"data.images": "a", "data.labels": "b", "data.classes": "5"} | case.keys
        config = parse_config([word for key, value in keys.items() for word in (f"--{key}", value)], "train", "")
        config.check()
        assert build_network(config.model, 4, 5) not in calibrated


def test_figures_of_the_table() -> None:
    assert chosen_over_best(ROWS) == {"a": pytest.approx(2.0 / 1.0)}
    assert [row.error for row in ROWS] == pytest.approx([0.05, -0.5, 0.5])
    assert ROWS[0].noise == pytest.approx(0.2)
    one, other = [3.0, 1.0, 2.0, 5.0, 4.0], [2.0, 1.0, 3.0, 5.0, 4.5]
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic)
    text = report(ROWS)
    assert "| within 10 % | 33% |" in text
    assert "| median error | 50.0% |" in text


def test_a_run_is_timed_and_predicted(tmp_path: Path) -> None:
    """The same twice; longer on a machine that takes longer to launch."""
    image, labels = str(tmp_path / "image-64.tif"), str(tmp_path / "labels-64.tif")
    scene(["--size", "64", "64", "--bands", "4", "--seed", "1", "--image", image, "--labels", labels])
    case = Case("small", "grid 2", 1, 64, {"model.levels": "2", "model.base_channels": "4", "tiling.grid": "2"})
    line = run(case, tmp_path, 2, Mesh(SERIAL, SerialCommunicator(), _cpu(), "serial", "here"))
    assert len(line["clock"]) == len(line["cpu"]) == 2
    assert min(*line["clock"], *line["cpu"]) > 0
    assert not (tmp_path / "run").exists()
    profile = profile_of("m.yaml", MEASURED)
    seconds = predicted(line, Machine.known(profile))
    assert seconds == predicted(line, Machine.known(profile)) > 0
    assert predicted(line, Machine.known(dataclasses.replace(profile, launch=1.0))) > seconds


def _cpu():  # type: ignore[no-untyped-def]
    import torch

    return torch.device("cpu")
