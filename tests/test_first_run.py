"""The commands of docs/first-run.md, as they stand there, in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import rasterio

from tests.comm.launching import MPIRUN, ROOT, clean_environment, oversubscribe

PAGE = (ROOT / "docs" / "first-run.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.timeout(900)
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun")
def test_the_commands_of_the_first_run_do_what_the_page_says(tmp_path: Path) -> None:
    environment = clean_environment()
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "tiledseg").write_text(f'#!/bin/sh\nexec {sys.executable} -m tiledseg "$@"\n')
    (commands / "tiledseg").chmod(0o755)
    environment["PATH"] = f"{commands}:{environment['PATH']}"
    script = "set -eux\n" + "".join(BLOCKS).replace("mpirun", " ".join([str(MPIRUN), *oversubscribe()]))
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        ["bash", "-c", script], cwd=work, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "wrote report runs/first/report.html, checkpoint runs/first/checkpoints/step-000100" in done.stderr
    assert "wrote a map of 192 x 192 pixels: map.tif" in done.stderr
    assert "steps in all" not in done.stderr, "the page's run is long enough"
    assert len(BLOCKS) == 4
    for name in ("runs/first/report.html", "map.png"):
        assert (work / name).stat().st_size > 10_000
    with rasterio.open(work / "map.tif") as found:
        assert found.shape == (192, 192)
    assert re.search(r"^ *building .* %", done.stdout, re.MULTILINE), "classes by name in the table of scores"
