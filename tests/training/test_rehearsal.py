"""A rehearsal of many ranks says what they would do, matches their messages, and names what would fail."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rasterio
import yaml
from torch import nn

from tests.answers import output_of, refuse
from tests.comm.launching import clean_environment
from tests.crash.runs import Material
from tiledseg import doctor
from tiledseg.models import normalise
from tiledseg.pipeline import executor
from tiledseg.pipeline.simulation import itinerary
from tiledseg.plan import main as plan


@pytest.fixture(scope="module")
def config(material: Material) -> Path:
    return material.root / "run.yaml"


WHOLE = ["--train.tiles_per_step", "null", "--train.images_per_step", "2"]


def rehearsed(config: Path, capsys: pytest.CaptureFixture[str], ranks: int, *more: str) -> tuple[int, dict[str, Any]]:
    code = doctor.main(["--rehearse", "-n", str(ranks), "--format", "json", "--config", str(config), *WHOLE, *more])
    return code, json.loads(capsys.readouterr().out)


def normed(bands: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(bands, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, classes, 1))


SHARED = {"tiles": 8, "idle": 0, "rasters": 1, "groups": 2, "peers": 3}  # two replicas of 2 x 2 ranks
STAGED = ["--parallel.stages", "2", "--parallel.schedule"]
WAYS: dict[str, tuple[list[str], dict[str, int]]] = {
    "exchange": (["--parallel.halo", "exchange"], SHARED),
    "layer": (["--parallel.halo", "layer"], SHARED),
    "1f1b": ([*STAGED, "1f1b", "--model.levels", "3"], {"idle": 0, "sums": 1}),
    "folded": ([*STAGED, "folded", "--parallel.halo", "exchange"], {"idle": 0, "sums": 1}),
    "gpipe": ([*STAGED, "gpipe", "--parallel.recompute", "always", "--parallel.halo", "layer"], {"idle": 0, "sums": 1}),
}


@pytest.mark.parametrize("way", WAYS)
def test_eight_ranks(config: Path, capsys: pytest.CaptureFixture[str], way: str) -> None:
    flags, figures = WAYS[way]
    code, found = rehearsed(config, capsys, 8, *flags)
    assert (code, found["fails"]) == (0, [])
    assert {key: found[key] for key in figures} == figures
    assert found["messages"] >= 2
    assert found["bytes"] > 0


def test_a_network_of_a_function_with_buffers(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Tracing compares values of buffers, before the step without values."""
    own = yaml.safe_load(config.read_text()) | {"model": {"build": f"{__name__}:normed"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(own))
    code, found = rehearsed(tmp_path / "run.yaml", capsys, 8, "--parallel.halo", "layer")
    assert (code, found["fails"], found["peers"], found["bytes"] > 0) == (0, [], 3, True)


def test_a_step_forward_and_back_on_many_ranks(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of 4 x 16 ranks each, with the gradients of halos on their way back, and the sums of norms."""
    mesh = [
        *("--tiling.grid", "[4,16]", "--parallel.mesh", "[4,16]"),
        *("--parallel.halo", "layer", "--model.norm", "instance"),
    ]
    words = ["--rehearse", "-n", "160", "--config", str(config), *WHOLE, *mesh]
    refuse(lambda: doctor.main(words), "32 of 160 ranks own nothing")
    code, found = rehearsed(config, capsys, 160, *mesh, "--parallel.idle_ranks", "true")
    assert (code, found["fails"], found["tiles"], found["seconds"] < 60) == (0, [], 128, True)
    assert found["peers"] == 8
    convolutions, norms = 3, 3  # of 3 x 3 pixels, of which the first sends no gradient
    assert found["messages"] == 8 * (2 * convolutions - 1)
    assert found["sums"] == 2 * norms + 1


def forgetful(sums: Any, ranks: Any, summed: Any = normalise.summed) -> Any:
    """Sum over ranks, but for rank 2."""
    return sums if ranks is not None and ranks.rank == 2 else summed(sums, ranks)


def turned(orders: Any, pipeline: Any, rank: int) -> tuple[Any, ...]:
    """Send the skip before the tensor that the next stage takes first."""
    moves = itinerary(orders, pipeline, rank)
    return tuple(move._replace(makes=move.makes[::-1]) for move in moves) if rank == 0 else moves


@pytest.mark.parametrize(
    ("where", "name", "fault", "flags", "words"),
    [
        (normalise, "summed", forgetful, ["--parallel.halo", "layer", "--model.norm", "instance"], "rank 2 sums .*and"),
        (executor, "itinerary", turned, [*STAGED, "1f1b", "--parallel.balance", "[14,15]"], "rank 0 sends rank 1 "),
    ],
)
def test_messages_that_do_not_match_are_named(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    fault: Any,
    flags: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(where, name, fault)
    code, found = rehearsed(config, capsys, 8, *flags, "--model.levels", "3")
    assert code == 1
    assert re.match(words, found["fails"][0])


def test_too_few_tiles_leave_ranks_idle(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two images of four tiles are no work for 1200 ranks."""
    code, found = rehearsed(config, capsys, 1200)
    assert (code, found["idle"], found["seconds"] < 60) == (0, 1192, True)
    assert any("1192 of 1200 ranks have no part of the first step: ranks 8-1199" in line for line in found["warnings"])


WRONG: dict[str, tuple[str, list[str], int, str]] = {  # ranks, flags, exit code, words
    "mesh": ("8", ["--parallel.halo", "layer", "--parallel.mesh", "[9,9]"], 2, "81 ranks an image, but the job has 8"),
    "number": ("8", ["--gpu-memory", "lots"], 2, "'lots' is no number of bytes"),
    "ranks": ("0", [], 2, "-n is 0; give at least 1"),
    "compile": ("8", ["--train.compile", "on", "--parallel.halo", "layer"], 2, "halo is layer; give read or exchange"),
    "grid": ("8", ["--gpu-memory", "300KiB", "--tiling.grid", "1"], 1, r"of 300.00 KiB; use tiling.grid \["),
    "budget": (
        *("8", ["--gpu-memory", "300KiB", "--tiling.grid", "1", "--memory.budget", "2MiB"], 1),
        r"; use (tiling.grid \[|memory.budget \d{1,6}\b)",
    ),
    "none": ("8", ["--gpu-memory", "9KiB"], 1, "of 9.00 KiB; no budget and no tiling.grid does"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_once(config: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    ranks, more, code, words = WRONG[name]
    assert doctor.main(["--rehearse", "-n", ranks, "--config", str(config), *WHOLE, *more]) == code
    out, err = capsys.readouterr()
    assert len(re.findall(words, " ".join((out + err).split()))) == 1
    assert code == 1 or err.count("\n") == 1


def test_labels_output_folder_and_network_are_looked_at(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rehearse", "-n", "8", "--config", str(config), *WHOLE]
    before = sorted(config.parent.iterdir())
    good = [*flags, "--run.output", str(config.parent / "new/folder"), "--planned", "3 bands"]
    out = " ".join(output_of(lambda: doctor.main(good)).split())
    assert re.search(r"memory of a step [\d.]+ KiB of 16.00 GiB on the rank", out)
    assert re.search(r"messages, forward and back \d+ messages to \d+ peers, ", out)
    assert "warning: the plan was made for another network: 3 bands" in out
    assert out.endswith("rasters, open files, output folder, and 3 of 3 blocks of labels")
    assert sorted(config.parent.iterdir()) == before
    assert doctor.main([*flags, "--data.classes", "2", "--run.output", "/proc/nope"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"would fail: \S+-labels.tif holds value 2 at \(row \d+, col \d+\), outside the cl", out)
    assert " would fail: run.output is /proc/nope, but /proc is not writable (No such file" in out
    assert "nothing found" not in out


def test_a_script_rehearses_the_plan_that_it_was_emitted_from(tmp_path: Path) -> None:
    """With its memory: of 16 GiB, a rank would recompute. Another network is named."""
    for name, bands in (("image", 3), ("labels", 1)):
        profile = {"count": bands, "height": 3600, "width": 3600, "dtype": "uint8", "sparse_ok": True}
        with rasterio.open(tmp_path / f"{name}.tif", "w", driver="GTiff", tiled=True, **profile):
            pass
    (tmp_path / "run.yaml").write_text("data: {images: image.tif, labels: labels.tif}\n")
    line = ["--size", "3600", "--grid", "1", "--bands", "3", "--machine", "a100", "--precision", "bf16"]
    memory = json.loads(output_of(lambda: plan([*line, "--format", "json"])))["summary"]["memory"]
    assert memory > 16 * 2**30
    (tmp_path / "job").write_text(output_of(lambda: plan([*line, "--emit", "slurm"])))
    environ, found = clean_environment({"TILEDSEG_PYTHON": sys.executable}), []
    for more in ([], ["--model.levels", "4"]):
        command = ["bash", "job", "rehearse", "--format", "json", *more]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, timeout=200, check=True)
        found.append(json.loads(done.stdout))
    assert (found[0]["memory"], found[0]["gpu_memory"]) == (memory, 80 * 2**30)
    assert ["another network" in " ".join(each["warnings"]) for each in found] == [False, True]
