"""Under mpirun rank 0 reports; another rank speaks only where a test failed there."""

from __future__ import annotations

import os
import sys

import pytest

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if RANK > 0 and reporter is not None:
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115  (lives as long as the process)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if RANK > 0 and report.failed:
        sys.stderr.write(f"rank {RANK}: {report.nodeid} failed in {report.when}\n{report.longreprtext}\n")
