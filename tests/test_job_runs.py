"""The batch scripts run: by a real Slurm; LSF's commands are played by mpirun, whose child jsrun is."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.comm.launching import MPIRUN, ROOT, clean_environment, needs_mpirun, run_job
from tests.conftest import NIGHTLY
from tests.crash.runs import step_losses
from tests.one_node_slurm import SlurmUnavailableError, one_node_slurm
from tests.small_files import write_raster
from tiledseg.train import main as train

JOBS = ROOT / "jobs"
SUMMIT = JOBS / "lsf/summit.lsf"
EPOCHS = ["--train.epochs", "120", "--train.checkpoint_every", "1000"]
TINY = ["--tiling.grid", "2", "--train.tiles_per_step", "4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data`, a 64 x 64 raster and its labels, and run.yaml: three steps of a small U-Net in float64."""
    draw = np.random.default_rng(0)
    labels_HW = (draw.random((8, 8)) > 0.5).repeat(8, 0).repeat(8, 1).astype("uint8")
    pixels_CHW = (labels_HW * 100 + draw.integers(0, 60, (3, 64, 64))).astype("uint8")
    tmp_path = tmp_path_factory.mktemp("tiny")
    (tmp_path / "data").mkdir()
    write_raster(tmp_path / "data/image.tif", pixels_CHW)
    write_raster(tmp_path / "data/labels.tif", labels_HW[None])
    (tmp_path / "run.yaml").write_text(
        f"data: {{images: [{tmp_path}/data/image.tif], labels: [{tmp_path}/data/labels.tif]}}\n"
        "model: {levels: 2, base_channels: 4}\n"
        "train: {epochs: 3, precision: fp64}\n"
    )
    return tmp_path


@pytest.fixture
def tiny_run(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny / "data", tmp_path / "data")
    (tmp_path / "run.yaml").write_text((tiny / "run.yaml").read_text().replace(str(tiny), str(tmp_path)))
    return tmp_path


@pytest.fixture(scope="module")
def losses_alone(tiny: Path) -> list[float]:
    """The losses of the same training on one rank, without any launcher."""
    assert train(["--config", str(tiny / "run.yaml"), *TINY, *EPOCHS, "--run.output", str(tiny / "alone")]) == 0
    return step_losses(tiny / "alone")


def job_environment(folder: Path, **variables: str) -> dict[str, str]:
    return clean_environment(
        {"TILEDSEG_PYTHON": sys.executable, "TILEDSEG_CONFIG": str(folder / "run.yaml"), **variables}
    )


def fake(folder: Path, **bodies: str) -> Path:
    """Commands in `folder`, to stand first on the path."""
    folder.mkdir(exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\nset -e\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def test_lsf_script_asks_for_the_papers_machine(tmp_path: Path) -> None:
    """One resource set a node with 6 ranks and 6 GPUs, and the rendezvous at the first compute node."""
    body = 'echo "MASTER $MASTER_ADDR $MASTER_PORT OMP $OMP_NUM_THREADS"\necho "$@"'
    tools, config = fake(tmp_path / "tools", jsrun=body), tmp_path / "run.yaml"
    hosts = tmp_path / "hosts"
    hosts.write_text("batch1\n" + "a01n01\n" * 42 + "a01n02\n" * 42)
    environ = clean_environment(
        {"PATH": f"{tools}:{os.environ['PATH']}", "LSB_DJOB_HOSTFILE": str(hosts), "LSB_JOBID": "1234567"}
    )
    environ["TILEDSEG_CONFIG"] = str(config)
    done = run_job(["bash", str(SUMMIT)], environ=environ)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: cannot read the configuration {config}; set TILEDSEG_CONFIG\n"
    config.touch()
    done = run_job(["bash", str(SUMMIT), "--optimizer.lr", "0.1"], environ=environ)
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
    paper = f"--config {config} --tiling.grid [8,8] --parallel.halo read --train.tiles_per_step 1200"
    assert train.endswith(f"python -m tiledseg.train {paper} --optimizer.lr 0.1")


NODE = """
while [[ "$1" == --* ]]; do shift 2; done
echo "$@"
case "$1$3" in
    cp*) [[ -z "$SIGNALLED" ]] || kill -USR2 "$PPID" ;;
    *tiledseg.train) exit 75 ;;
    *tiledseg.doctor) ;;
    *) exec "$@" ;;
esac
"""


def job_of(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in the folder, with `run.yaml` of images below its folder data; each command runs once."""
    tools = fake(folder / "tools", jsrun=NODE, srun=NODE.replace("shift 2", "shift"), sbcast='cp "$2" "$3"')
    if not (folder / "data").exists():
        (folder / "data").mkdir()
        (folder / "data/image.tif").write_bytes(bytes(2**20))
        (folder / "run.yaml").write_text(f"data: {{images: {folder}/data/*.tif, labels: [data/image.tif]}}\n")
    environ = clean_environment({"PATH": f"{tools}:{os.environ['PATH']}", "LSB_JOBID": "12", "SLURM_JOB_ID": "12"})
    environ |= {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_END_TIME": "9999999999", "SIGNALLED": ""}
    words = ["bash", str(JOBS / script)]
    return subprocess.run(
        words, cwd=folder, env=environ | variables, capture_output=True, text=True, timeout=60, check=False
    )


def test_an_lsf_script_counts_its_restarts_and_may_be_signalled_early(tmp_path: Path) -> None:
    runs = [job_of(tmp_path, "lsf/summit.lsf", TILEDSEG_RESTARTS="2") for _ in range(3)]
    assert [run.returncode for run in runs] == [75, 75, 143]
    assert runs[-1].stderr.startswith("error: no restart is left of 2, but steps are")
    assert ["tiledseg.doctor" in run.stdout for run in runs] == [True, False, False]
    assert not list(tmp_path.glob(".tiledseg-*")), "the next job counts anew"
    early = job_of(tmp_path, "lsf/summit.lsf", TILEDSEG_DATA="data", TILEDSEG_LOCAL=f"{tmp_path}/local", SIGNALLED="1")
    assert (early.returncode, "tiledseg.train" in early.stdout) == (75, False), early.stderr


def test_a_script_goes_on_only_after_a_step(tmp_path: Path) -> None:
    """The first start may have no checkpoint, as its folder is new; later ones have a newer one than the last."""
    (tmp_path / "runs/run/checkpoints/step-000099").mkdir(parents=True)
    done = job_of(tmp_path, "lsf/summit.lsf")
    assert (done.returncode, done.stderr.split(",")[0]) == (143, "error: this start has done no step")
    step = 'mkdir -p runs/run/checkpoints/step-000100; echo "$@"; exit 75'
    (tmp_path / "run.yaml").write_text("run: {output: 'runs/run'}\n")
    job_of(tmp_path, "lsf/summit.lsf")
    environ = {"PATH": f"{fake(tmp_path / 'own', jsrun=step)}:{os.environ['PATH']}", "TILEDSEG_DOCTOR": "0"}
    assert job_of(tmp_path, "lsf/summit.lsf", **environ).returncode == 75


@pytest.mark.parametrize(
    ("data", "config", "staged"),
    [
        ("data", "[data/a.tif, ./data/b.tif]", "[LOCAL/a.tif, LOCAL/b.tif]"),
        ("data/", "HERE/data", "LOCAL"),
        ("HERE/data", "[data/a.tif, my/data/a.tif, data2/a.tif]", "[LOCAL/a.tif, my/data/a.tif, data2/a.tif]"),
        ("HERE", "HERE/data/*.tif}\nrun: {output: HERE/runs", "LOCAL/data/*.tif}\nrun: {output: HERE/runs"),
        ("HERE", "data/*.tif", "error: no path of run.yaml begins with HERE; give TILEDSEG_DATA as the paths have it"),
        (".", "data/*.tif", "error: no path of run.yaml begins with .; give TILEDSEG_DATA as the paths have it"),
        ("gone", "data/*.tif", "error: TILEDSEG_DATA is gone, which is no folder"),
    ],
)
def test_paths_of_staged_data(tmp_path: Path, data: str, config: str, staged: str) -> None:
    data, config, staged = (
        text.replace("HERE", str(tmp_path)).replace("LOCAL", "/nodes/disk/data") for text in (data, config, staged)
    )
    job_of(tmp_path, "slurm/generic.sbatch")
    (tmp_path / "run.yaml").write_text(f"data: {{images: {config}}}\n")
    node = NODE.replace("*) exec", "bash*) ;;\n    *) exec").replace("shift 2", "shift")  # nothing is made there
    paths = {"PATH": f"{fake(tmp_path / 'own', srun=node)}:{os.environ['PATH']}", "TILEDSEG_LOCAL": "/nodes/disk"}
    done = job_of(tmp_path, "slurm/generic.sbatch", **paths, TILEDSEG_DATA=data)
    if staged.startswith("error: "):
        assert (done.returncode, done.stderr.startswith(staged), done.stderr.count("\n")) == (2, True, 1), done.stderr
    else:
        assert (tmp_path / "tiledseg-12-0.yaml").read_text() == f"data: {{images: {staged}}}\n"
        assert "--config tiledseg-12-0.yaml" in done.stdout


def test_a_script_looks_for_room(tmp_path: Path) -> None:
    """Of data; of an environment with its archive, which Slurm brings to each node first."""
    local = {"TILEDSEG_LOCAL": f"{tmp_path}/local"}
    job_of(tmp_path, "lsf/summit.lsf")
    df = fake(tmp_path / "own", df="echo disk 2000 900 1500 90% /")
    local["PATH"] = f"{df}:{tmp_path}/tools:{os.environ['PATH']}"
    subprocess.run(["tar", "-cf", tmp_path / "env.tar", "-C", tmp_path, "data"], check=True, timeout=60)
    environment = {"TILEDSEG_ENVIRONMENT": "env.tar", **local}
    room = r"error: \S+/local/environment has room for \d+ KiB, but 20\d\d come there; set TILED"
    full = job_of(tmp_path, "slurm/generic.sbatch", **environment)
    assert (full.returncode, bool(re.search(room, full.stderr))) == (2, True), full.stderr
    assert "room" not in job_of(tmp_path, "lsf/summit.lsf", **environment).stderr
    fake(tmp_path / "own", df="echo disk 2000 900 500 90% /")
    full = job_of(tmp_path, "lsf/summit.lsf", **local, TILEDSEG_DATA="data")
    assert full.returncode == 2
    assert re.search(r"error: \S+/local/data has room for \d+ KiB, but 102\d come there", full.stderr)


@pytest.mark.parametrize("script", ["slurm/generic.sbatch", "lsf/generic.lsf"])
def test_mpirun_hands_on_what_a_user_sets(tmp_path: Path, script: str) -> None:
    names = {"NCCL_DEBUG": "INFO", "UCX_TLS": "rc", "FI_PROVIDER": "cxi", "MASTER_PORT": "15000", "SECRET": "1"}
    job_of(tmp_path, script)
    tools = f"{fake(tmp_path / 'own', mpirun='echo $@')}:{os.environ['PATH']}"
    more = {"TILEDSEG_LAUNCHER": "mpirun", "SLURM_NTASKS_PER_NODE": "1", "PATH": tools}
    handed = re.findall(r"-x (\w+)", job_of(tmp_path, script, **names, **more).stdout)
    assert {*names, "PATH", "OMP_NUM_THREADS", "TILEDSEG_END_TIME"} - {*handed} == {"SECRET"}
    assert "SLURM_JOB_ID" not in handed


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} within {seconds:.0f} s"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_mpirun
def test_lsf_script_is_signalled_and_goes_on(tiny_run: Path, losses_alone: list[float]) -> None:
    """bsub is played by this test: it runs the script with the variables that LSF sets, and sends USR2, as -wa says,
    once training goes on; 75 makes LSF run it again (-Q). A second line of a sweep names the run's folder."""
    hosts = tiny_run / "hosts"
    hosts.write_text("localhost\n" * 2)
    (tiny_run / "sweep.txt").write_text(f"--optimizer.lr -1\n--run.output {tiny_run}/job\n")
    tools = f"{Path(MPIRUN or '').parent}:{os.environ['PATH']}"
    environ = job_environment(tiny_run, PATH=tools, LSB_DJOB_HOSTFILE=str(hosts), LSB_JOBID="7", LSB_JOBINDEX="2")
    environ |= {"TILEDSEG_NODES": "1", "TILEDSEG_GPUS_PER_NODE": "2", "TILEDSEG_CORES_PER_GPU": "1"}
    environ |= {"TILEDSEG_DOCTOR": "0", "TILEDSEG_SWEEP": str(tiny_run / "sweep.txt")}
    command = ["bash", str(JOBS / "lsf/generic.lsf"), *TINY, *EPOCHS]
    codes = []
    for number in (signal.SIGUSR2, signal.SIGTERM, None):
        before = steps_done(tiny_run / "job")
        with (
            (tiny_run / "log").open("a") as log,
            subprocess.Popen(
                command, cwd=tiny_run, env=environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
            ) as process,
        ):
            if number is not None:
                wait_until(lambda before=before: steps_done(tiny_run / "job") > before + 2, "third step")  # type: ignore[misc]
                process.send_signal(number)
            codes.append(process.wait(timeout=200))
    assert (codes[0], codes[2]) == (75, 0), (tiny_run / "log").read_text()
    assert codes[1] not in (0, 75), "bkill's TERM ends the job for good, with its checkpoint written"
    np.testing.assert_allclose(step_losses(tiny_run / "job"), losses_alone, rtol=1e-10, atol=0)


def job_state(job: str, environ: dict[str, str]) -> dict[str, str]:
    shown = subprocess.run(
        ["scontrol", "show", "job", job, "--oneliner"], env=environ, capture_output=True, text=True, timeout=30
    )
    return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)


def wait_for_states(jobs: dict[str, str], states: dict[str, str], environ: dict[str, str]) -> None:
    wait_until(
        lambda: {way: job_state(job, environ)["JobState"] for way, job in jobs.items()} == states,
        f"end of {jobs} as {states}",
        240,
    )


def signal_each(jobs: dict[Path, str], environ: dict[str, str]) -> None:
    """USR1 to the shell of each job, as soon as its run has done three steps."""
    left = dict(jobs)

    def all_signalled() -> bool:
        for run in [run for run in left if steps_done(run) > 2]:
            scancel = ["scancel", "--batch", "--signal=USR1", left.pop(run)]
            subprocess.run(scancel, env=environ, check=True, timeout=30)
        return not left

    wait_until(all_signalled, f"third step of each of {jobs}")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_slurm_script_is_signalled_requeues_itself_and_finishes(tiny_run: Path, losses_alone: list[float]) -> None:
    """A real slurmctld, 2 tasks: by srun, with an environment and data staged onto the node; at night by mpirun too. A
    job is signalled in mid-run as --signal=B:USR1 does, requeues itself and ends with the losses of one rank. Before it
    a wrong configuration, alone on the machine, exits with 2."""
    (tiny_run / "environment/bin").mkdir(parents=True)
    (tiny_run / "environment/bin/python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tiny_run / "environment/bin/python").chmod(0o755)
    archive = tiny_run / "environment.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", tiny_run / "environment", "."], check=True, timeout=60)
    local = tiny_run / "local"
    staging = {"TILEDSEG_ENVIRONMENT": str(archive), "TILEDSEG_DATA": f"{tiny_run}/data", "TILEDSEG_LOCAL": str(local)}
    tools = f"{Path(MPIRUN or '').parent}:{os.environ['PATH']}"
    no_doctor = {"TILEDSEG_DOCTOR": "0"}
    good = {"srun": staging} | ({"mpirun": no_doctor | {"TILEDSEG_LAUNCHER": "mpirun"}} if NIGHTLY else {})
    one_node = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=0:30:00"]
    one_node.append("--oversubscribe")  # in place of the script's --exclusive
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        try:
            with one_node_slurm(Path(folder), cpus=6) as variables:
                submitted = {}
                for way, more in ({"wrong": no_doctor} | good).items():
                    environ = job_environment(tiny_run, PYTHONPATH=str(ROOT), **more) | variables
                    environ["PATH"] = f"{tools}:{environ['PATH']}"
                    submit = ["sbatch", "--parsable", *one_node, f"--output={tiny_run}/{way}.log"]
                    submit += [f"--chdir={tiny_run}", str(JOBS / "slurm/generic.sbatch"), *TINY, *EPOCHS]
                    wrong = ["--optimizer.lr", "-1"] if way == "wrong" else []
                    done = run_job([*submit, "--run.output", str(tiny_run / way), *wrong], 60, environ)
                    assert done.code == 0, done.err
                    submitted[way] = done.out.strip()
                    if way == "wrong":
                        wait_for_states(submitted, {"wrong": "FAILED"}, environ)
                signal_each({tiny_run / way: submitted[way] for way in good}, environ)
                wait_for_states(submitted, {"wrong": "FAILED"} | dict.fromkeys(good, "COMPLETED"), environ)
                states = {way: job_state(job, environ) for way, job in submitted.items()}
        except SlurmUnavailableError as reason:
            pytest.skip(f"no Slurm here: {reason}")
    for way in good:
        assert states[way]["Restarts"] == "1"
        text = (tiny_run / f"{way}.log").read_text()
        assert "the job goes on: requeued after 0 restarts" in text
        np.testing.assert_allclose(step_losses(tiny_run / way), losses_alone, rtol=1e-10, atol=0)
    text = (tiny_run / "srun.log").read_text()
    assert text.count("2 ranks, launcher slurm, transport gloo") == 1, "doctor looks once, not after a requeue"
    assert str(local / "data/image.tif") in (tiny_run / "srun/config.yaml").read_text()
    assert states["wrong"]["ExitCode"] == "2:0"
    assert re.findall(r"^error: .*$", (tiny_run / "wrong.log").read_text(), re.MULTILINE) == [
        "error: optimizer.lr is -1.0; give a number above 0, at most 1e+06"
    ]
