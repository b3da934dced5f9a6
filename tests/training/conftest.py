"""What the runs of this folder do without."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_plots(without_plots: None) -> None:
    """Drawing a tiny run takes longer than the run."""
