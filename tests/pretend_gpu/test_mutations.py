"""Each fault of `mutations.py` is caught: by a race, a failure, or values other than those of the package as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import rasterio

from tests.conftest import NIGHTLY
from tests.crash.runs import Material, lines, weights
from tests.pretend_gpu.harness import ROOT, PretendGpu
from tests.pretend_gpu.mutations import MUTATIONS, OVER_MPI, RUNS
from tests.pretend_gpu.test_laws import RUNS as RANKS


def of_runs(pretend_gpu: PretendGpu, material: Material, folder: Path, root: Path) -> object:
    """Losses, weights and a map; None where the job failed or had a race."""
    folder.mkdir()
    train, offload = folder / "train", folder / "offload"
    words = ["--train.epochs", "2", "--train.precision", "fp32"]
    commands = [
        ["train", "train", [*material.train_command(train)[1:], *words], "never"],
        ["map", "predict", material.predict_command(train, folder / "map.tif")[1:], "never"],
        ["offload", "train", [*material.train_command(offload)[1:], *words, "--memory.offload", "all"], "never"],
    ]
    ran = pretend_gpu.run(["-m", "tests.pretend_gpu.session", json.dumps(commands)], root=root)
    statuses = [json.loads(line)[1] for line in ran.output.splitlines()]
    if ran.status or ran.races or statuses != [0, 0, 0]:
        return None
    with rasterio.open(folder / "map.tif") as there:
        return lines(train), weights(train), lines(offload), there.read().tobytes()


def over_ranks(pretend_gpu: PretendGpu, job: str, root: Path) -> object:
    """True where the laws hold and each rank keeps to its GPU; else None."""
    transport = "mpi" if job == OVER_MPI else "nccl"
    words = ["-m", "pytest", "--only-mpi", "-m", "mpi", "-q", "-x", "-p", "no:cacheprovider"]
    words += ["-k", "one_rank and (exchange or thirty)", RANKS]
    ran = pretend_gpu.run(words, ranks=2, devices=2, root=root, PRETEND_GPU_TRANSPORT=transport)
    apart = all(list(report["contexts"]) == [str(rank)] for rank, report in enumerate(ran.reports))
    return None if ran.status or ran.races or not apart else True


def outcome(job: str, pretend_gpu: PretendGpu, folder: Path, root: Path) -> object:
    if job != RUNS:
        return over_ranks(pretend_gpu, job, root)
    material = Material.make(folder)
    return of_runs(pretend_gpu, material, folder / "runs", root)


@pytest.fixture(scope="module")
def sound(pretend_gpu: PretendGpu, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], object]:
    """What the package as it is gives, by job."""
    return cache(lambda job: outcome(job, pretend_gpu, tmp_path_factory.mktemp("sound"), ROOT))


NIGHTLY_ONLY = pytest.mark.skipif(not NIGHTLY, reason="a job for each fault: with TILEDSEG_NIGHTLY")


@NIGHTLY_ONLY
@pytest.mark.timeout(1500)
def test_the_package_as_it_is_gives_the_same_again(
    sound: Callable[[str], object], pretend_gpu: PretendGpu, tmp_path: Path
) -> None:
    assert sound(RUNS) is not None
    assert outcome(RUNS, pretend_gpu, tmp_path, ROOT) == sound(RUNS)


@NIGHTLY_ONLY
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fault_is_caught(
    name: str, sound: Callable[[str], object], pretend_gpu: PretendGpu, tmp_path: Path
) -> None:
    file, old, new, job = MUTATIONS[name]
    assert sound(job) is not None
    root = tmp_path / "root"
    shutil.copytree(ROOT / "tiledseg", root / "tiledseg")
    for folder in ("tests", "benchmarks"):
        (root / folder).symlink_to(ROOT / folder)
    source = (root / "tiledseg" / file).read_text()
    assert source.count(old) == 1
    (root / "tiledseg" / file).write_text(source.replace(old, new))
    found = outcome(job, pretend_gpu, tmp_path, root)
    assert found is None or found != sound(job)


def test_each_fault_can_be_put_in() -> None:
    for file, old, new, _ in MUTATIONS.values():
        source = (ROOT / "tiledseg" / file).read_text()
        assert source.count(old) == 1, (file, old)
        compile(source.replace(old, new), file, "exec")
