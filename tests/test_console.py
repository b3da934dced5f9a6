"""A full or closed standard output or error: an answer lost is exit 1 and one line; a warning lost is nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.comm.launching import ROOT, clean_environment
from tests.crash.runs import Material
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.raster.tile_store import is_tile_store

FULL = "error: cannot write standard output: No space left on device; make room, then run the command again\n"
CLOSED = "error: cannot write standard output: it is closed; send it to a file, or to /dev/null\n"


def shell(redirected: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """`python -m tiledseg.COMMAND` with its output redirected as a shell does."""
    words = ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, "-m", f"tiledseg.{command[0]}", *command[1:]]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT, env=clean_environment()
    )


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material.make(tmp_path_factory.mktemp("console"))


def answers(material: Material) -> dict[str, list[str]]:
    """Every command that prints an answer."""
    root = material.root
    labels = str(root / "held-out-labels.tif")
    return {
        "plan": ["plan", "--size", "1000"],
        "help": ["train", "--help"],
        "evaluate": ["evaluate", "--prediction", labels, "--labels", labels],
    }


@pytest.mark.parametrize("name", ["help", "evaluate"])
def test_an_answer_that_a_full_disk_loses(material: Material, name: str) -> None:
    """`plan --help` gave 0, the others a line that said "unforeseen"."""
    done = shell("> /dev/full", answers(material)[name])
    assert (done.returncode, done.stderr) == (1, FULL)


def test_a_closed_output(material: Material) -> None:
    """It gave a traceback; and the next file opened had its number."""
    done = shell(">&-", answers(material)["plan"])
    assert (done.returncode, done.stderr) == (1, CLOSED)
    done = shell("2>&-", ["plan", "--sizee", "1000"])
    assert (done.returncode, done.stdout) == (2, "")


def test_a_full_standard_error_changes_no_code(material: Material) -> None:
    """Bad input gave 1; a run would have ended for a line of progress."""
    assert shell("2> /dev/full", ["plan", "--sizee", "1000"]).returncode == 2
    folder = material.root / "told"
    done = shell("> /dev/full 2>&1", [*material.train_command(folder), "--run.verbosity", "2"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert find_checkpoint(folder).saved.step == 12


def test_a_store_is_whole_though_its_summary_is_lost(material: Material) -> None:
    """It gave 0 and no word."""
    path = material.root / "tiles.h5"
    cut = ("--grid", "2", "--levels", "2", "--output", str(path))
    done = shell("> /dev/full", ["tile", "--images", str(material.root / "one.tif"), *cut])
    assert (done.returncode, done.stderr) == (1, FULL)
    assert is_tile_store(str(path))
