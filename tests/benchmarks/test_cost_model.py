"""Predicted against measured: the cases, the table, and a small run from end to end; no timings."""

from __future__ import annotations

from benchmarks.cost_model.__main__ import Case, cases, measured_and_predicted
from tests.planning.test_machine import MEASURED
from tiledseg.architecture.presets import build_network
from tiledseg.comm.mesh import ALONE
from tiledseg.commands import calibrate as calibration
from tiledseg.user_files.machine import machine_from


def test_no_network_that_is_predicted_is_one_that_a_calibration_trains() -> None:
    runs = [*cases(1), *cases(2)]
    assert len({(case.ranks, case.name) for case in runs}) == len(runs) >= 25
    trained = [calibration._graph(case) for case in calibration.CASES]
    for case in runs:
        config = case.config("a", "b", "c")
        config.check()
        assert build_network(config.model, 4, 5).graph() not in trained


def test_a_run_is_timed_and_predicted() -> None:
    """Longer on a machine that takes longer to launch."""
    mesh = ALONE
    case = Case(1, 64, 2, 4, {"tiling.grid": "2"})
    measured, predicted = measured_and_predicted(case, machine_from("m.yaml", MEASURED), mesh)
    assert measured > 0
    slow = MEASURED | {"figures": MEASURED["figures"] | {"launch": 1.0}}
    assert measured_and_predicted(case, machine_from("m.yaml", slow), mesh)[1] > predicted + 1
