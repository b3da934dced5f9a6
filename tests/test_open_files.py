"""Too few files that may be open: one line before the first write, or the limit is raised."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.comm.launching import Done, run_job
from tests.crash.runs import Material
from tiledseg.checkpoint.folder import find_checkpoint

LIMITED = (
    "import os, resource, sys; soft, hard = int(sys.argv[1]), int(sys.argv[2]); "
    "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)); "
    "os.execv(sys.executable, [sys.executable, '-m', *sys.argv[3:]])"
)


def limited(soft: int, hard: int, *command: str) -> Done:
    return run_job([sys.executable, "-c", LIMITED, str(soft), str(hard), *command], seconds=100)


def test_too_few_are_refused_and_a_low_limit_is_raised(tmp_path: Path) -> None:
    """With 8 or 12, a run ended with words about one of its images, its folder and a checkpoint written."""
    material, folder = Material.make(tmp_path), tmp_path / "run"
    train = ["tiledseg.train", *material.train_command(folder)[1:]]
    done = limited(12, 12, *train)
    assert (done.code, done.err) == (
        2,
        "error: no more than 12 files may be open here, 64 are needed; raise it (ulimit -n)\n",
    )
    assert not folder.exists()
    assert limited(12, 64, *train).code == 0
    assert find_checkpoint(folder).saved.step == 12
