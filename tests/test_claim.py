"""Two jobs with one output: the second is refused, whatever it is cut or mapped from; nothing is left of a lock."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.raster.test_writer import Info
from tests.small_files import write_raster
from tiledseg.errors import OutputError
from tiledseg.execution.progress import StepProgress
from tiledseg.raster.map_writer import lay_out, publish
from tiledseg.system.files import temporary
from tiledseg.system.run_lock import check_unclaimed, claimed
from tiledseg.tile import main as tile


def test_a_second_map_is_refused_and_the_first_is_whole(tmp_path: Path) -> None:
    """It replaced the first's unfinished file, whose inode number the new one could get."""
    layout = lay_out(tmp_path / "a.tif", Info(30, 40), 1, "uint8")
    with claimed(layout.temporary, layout.path):
        for _ in range(2):
            with pytest.raises(OutputError, match=r"a\.tif: another job is writing it too"):
                lay_out(tmp_path / "a.tif", Info(99, 99), 1, "uint8")
        assert os.stat(layout.temporary).st_ino == layout.inode
        publish(layout)
    assert os.listdir(tmp_path) == ["a.tif"]
    lay_out(tmp_path / "a.tif", Info(30, 40), 1, "uint8")


def test_a_claim_ends_with_its_block_and_is_lost_with_its_file(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_text("one")
    with claimed(part, "a"), pytest.raises(OutputError, match="another job"):
        check_unclaimed(part, "a")
    check_unclaimed(part, "a")
    check_unclaimed(tmp_path / "absent", "a")
    assert os.listdir(tmp_path) == ["part"]


def test_two_stores_at_one_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused while the first is cut; the first is not published over a store that came meanwhile."""
    for seed, name in enumerate(("one", "two")):
        pixels_CHW = np.random.default_rng(seed).integers(0, 255, (3, 64, 64)).astype(np.uint8)
        write_raster(tmp_path / f"{name}.tif", pixels_CHW)
    store = tmp_path / "t.h5"
    words = ["--grid", "2", "--levels", "1", "--output", str(store)]
    one, two = (["--images", str(tmp_path / f"{name}.tif"), *words] for name in ("one", "two"))
    part = temporary(store)
    part.touch()
    with claimed(part, store):
        assert tile(one) == 2
        assert "another job is writing it too" in capsys.readouterr().err
    assert not store.exists()
    assert tile(one) == 0
    assert not part.exists()
    other = store.read_bytes()
    store.unlink()
    progress = StepProgress.advance
    monkeypatch.setattr(StepProgress, "advance", lambda *words: (progress(*words), store.write_bytes(other)))
    assert tile(two) == 2
    assert "another job is writing it too" in capsys.readouterr().err
    assert store.read_bytes() == other
