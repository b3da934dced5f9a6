"""What tests of the search share."""

from __future__ import annotations

import pytest

from tiledseg.planning.search import space


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few enough settings to look at all of them."""
    monkeypatch.setattr(space, "ROWS", (1, 2, 3))
    monkeypatch.setattr(space, "TILES_A_RANK", (1, 2))
    monkeypatch.setattr(space, "MESHES", 2)
    monkeypatch.setattr(space, "SCHEDULES", ("1f1b",))
