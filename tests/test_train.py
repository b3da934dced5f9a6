"""The train command, one rank: what it leaves, and that a run goes on, unchanged and with other settings."""

import json
import os
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from torch.nn import functional

from tests.answers import errors_of, refuse
from tests.crash.runs import STEPS, Material, after_step, lines, train, weights
from tests.law.runs import check_same_run
from tests.small_files import tree, write_raster
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.checkpoint.saved_state import LossScale
from tiledseg.commands.options import parse_config, to_yaml
from tiledseg.system.run_lock import hold
from tiledseg.training import trainer as loop
from tiledseg.training.run_journal import plot_progress
from tiledseg.training.run_page import write_report

pytestmark = pytest.mark.usefixtures("without_plots")  # but for `test_what_a_run_leaves`
SGD = ("--optimizer.name", "sgd", "--optimizer.lr", "0.2", "--optimizer.clip_norm", "0.5")
FP32 = ("--train.precision", "fp32")
RECIPES = {
    "adamw-fp64": (),
    "sgd-fp32": (*SGD, *FP32, "--train.ema", "0.9", "--train.best", "mean_iou"),
    "sgd-fp16": (*SGD, "--train.precision", "fp16"),
}


@pytest.fixture(autouse=True, scope="module")
def scale() -> Iterator[None]:
    """In half precision the first steps overflow, the others not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "LossScale", lambda: LossScale(2.0**20))
        yield


@pytest.fixture(scope="module")
def finished(material: Material, scale: None) -> dict[str, Path]:
    """An uninterrupted run of each recipe."""
    folders = {}
    for name, options in RECIPES.items():
        folders[name] = material.root / f"finished-{name}"
        assert train(material, folders[name], *options) == 0
    return folders


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("step", [1, 4])
def test_a_stopped_run_goes_on_exactly(
    material: Material, finished: dict[str, Path], monkeypatch: pytest.MonkeyPatch, recipe: str, step: int
) -> None:
    """Optimizer state, averaged weights, best validation, dropout, shuffling and rate: losses and the final checkpoint
    have the same bits. The signal is acted on at the end of the following step: 2 is in an epoch, 5 too."""
    folder = material.root / f"stopped-{recipe}-{step}"
    with monkeypatch.context() as patch:
        after_step(patch, step)
        assert train(material, folder, *RECIPES[recipe]) == 75
    assert find_checkpoint(folder).saved.step == step + 1
    assert json.loads((folder / "summary.json").read_text())["finished"] is False
    assert train(material, folder, *RECIPES[recipe]) == 0
    check_same_run(folder, finished[recipe], 0.0)
    skipped = (folder / "metrics.jsonl").read_text().count('"skipped": true')
    assert skipped == (2 if recipe == "sgd-fp16" else 0)


def test_a_signal_in_the_last_step_is_a_finish(
    material: Material, finished: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = material.root / "late-signal"
    with monkeypatch.context() as patch:
        after_step(patch, STEPS - 1)
        assert train(material, folder) == 0
    assert json.loads((folder / "summary.json").read_text())["finished"] is True
    check_same_run(folder, finished["adamw-fp64"], 0.0)


def test_a_run_goes_on_over_damaged_checkpoints(material: Material, finished: dict[str, Path]) -> None:
    """The newest are damaged, which is said, and the log is ahead: the steps from the last whole one on are done again,
    not twice."""
    folder = Path(shutil.copytree(finished["adamw-fp64"], material.root / "damaged"))
    checkpoints = folder / "checkpoints"
    (checkpoints / "step-000010" / "manifest.json").write_text("{")
    (checkpoints / "step-000012" / "model.safetensors").write_bytes(b"")
    later = folder / "validation" / "step-000011.json"
    later.write_text("{}")
    options = "--train.keep_checkpoints", "1", "--run.verbosity", "1"
    said = errors_of(lambda: train(material, folder, *options)).splitlines()
    newest, other = [line for line in said if line.startswith("warning: ") and "going on from step-000008" in line]
    assert "step-000012 is damaged: model.safetensors does not match its checksum" in newest
    assert "step-000010 is no whole checkpoint: manifest.json cannot be read" in other
    assert not later.exists()
    check_same_run(folder, finished["adamw-fp64"], 0.0)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-000012"]


def test_a_checkpoint_starts_another_run(material: Material, finished: dict[str, Path]) -> None:
    """`train.resume` with a path: the steps after it, in a folder of its own."""
    source = finished["adamw-fp64"] / "checkpoints" / "step-000010"
    folder = material.root / "branch"
    assert train(material, folder, "--train.resume", str(source)) == 0
    whole = lines(finished["adamw-fp64"])
    assert lines(folder) == [line for line in whole if line["step"] > 10]
    assert weights(folder) == weights(finished["adamw-fp64"])


def test_a_second_run_into_the_folder_of_a_living_one_is_refused(material: Material, finished: dict[str, Path]) -> None:
    """It had gone on with the other's checkpoints: one of them ended with a traceback, the other with 6 of 60 lines."""
    folder = Path(shutil.copytree(finished["adamw-fp64"], material.root / "in-use"))
    with hold(folder):
        before = tree(folder)
        refuse(lambda: train(material, folder), f"{folder} is in use by process {os.getpid()} on ")
        assert tree(folder) == before


def test_a_run_that_came_between_look_and_lock_is_seen(
    material: Material, finished: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look had found an empty folder, and the run would have begun anew over the other's checkpoints."""
    folder = material.root / "raced"

    def hold_late(path: Path) -> Any:
        shutil.copytree(finished["adamw-fp64"], path)
        return hold(path)

    monkeypatch.setattr("tiledseg.training.start.hold", hold_late)
    words = "newest checkpoint was of step None and is of step 12; run the command again"
    refuse(lambda: train(material, folder), words)
    check_same_run(folder, finished["adamw-fp64"], 0.0)


def test_metrics_cut_short_are_seen_before_anything_is_written(material: Material, finished: dict[str, Path]) -> None:
    """The run went on and ended with 0 and without the lines that were gone."""
    folder = Path(shutil.copytree(finished["adamw-fp64"], material.root / "cut-short"))
    shutil.rmtree(folder / "checkpoints" / "step-000012")
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(whole[:4]))
    before = tree(folder)
    refuse(lambda: train(material, folder), "the lines between are lost; put the whole file back")
    assert tree(folder) == before
    metrics.unlink()  # the other remedy: said, and the new file has what comes
    said = errors_of(lambda: train(material, folder, "--run.verbosity", "1"))
    assert "metrics.jsonl is gone: the new one starts after step 10" in said
    assert [line["step"] for line in lines(folder) if "loss" in line] == [11, 12]
    assert weights(folder) == weights(finished["adamw-fp64"])


def test_what_a_run_leaves(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = material.root / "leaves"
    monkeypatch.setattr("tiledseg.training.run_journal.plot_progress", plot_progress)
    monkeypatch.setattr("tiledseg.training.run_page.write_report", write_report)
    assert train(material, folder) == 0
    assert (folder / "progress.png").read_bytes().startswith(b"\x89PNG")
    steps = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    wanted = "step epoch loss lr tiles pixels seconds data_seconds communication_seconds halo_bytes halo_messages"
    wanted += " pixels_per_second memory_bytes"
    assert all(line.keys() == set(wanted.split()) and line["memory_bytes"] > 0 for line in steps if "loss" in line)
    checks = [line for line in steps if "val" in line]
    assert all(line.keys() == {"step", "epoch", "val"} for line in checks)
    assert all(line["val"].keys() == {"loss", "accuracy", "mean_iou", "iou"} for line in checks)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"], summary["finished"], summary["ranks"]) == (STEPS, 4, True, 1)
    assert summary["val"] == checks[-1]["val"]
    assert summary["command"].startswith("tiledseg train --config ")
    assert f"{summary['parameters']:,} weights, 2 images, 1 rank, " in summary["title"]
    assert "mean IoU" in (folder / "report.html").read_text()
    config = parse_config(["--config", str(folder / "config.yaml")], "train", "")
    assert to_yaml(config) == (folder / "config.yaml").read_text()
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["epochs"] == 4
    assert not list(folder.rglob(".*"))


def test_a_step_has_few_frames(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of ours from the loop to the kernel, both included."""
    convolve, depths, home = functional.conv2d, set[int](), str(Path(loop.__file__).parents[1])

    def counted(*arguments: Any) -> Any:
        frames = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(home)]
        if "_loop" in frames and "_validate" not in frames:
            depths.add(len(frames) - frames.index("_loop"))
        return convolve(*arguments)

    monkeypatch.setattr(functional, "conv2d", counted)
    assert train(material, material.root / "frames", "--train.epochs", "1") == 0
    assert 0 < max(depths) <= 8


def test_a_class_file_is_kept_by_the_run(material: Material) -> None:
    """The checkpoint and the configuration have what it says, when the file itself is gone."""
    folder, file = material.root / "named", material.root / "classes.csv"
    file.write_text("name,value,class,colour\nlawn,0,field,#00ff00\nfield,1,field,#9ebc5e\nroad,2,road,#46464a\n")
    epochs = "--train.epochs", "1"
    assert train(material, folder, "--data.classes", str(file), *epochs) == 0
    file.unlink()
    assert [*find_checkpoint(folder).saved.label_map.classes] == [("field", (158, 188, 94)), ("road", (70, 70, 74))]
    classes = yaml.safe_load((folder / "config.yaml").read_text())["data"]["classes"]
    grouped = {"name": "field", "colour": "#9ebc5e", "values": ["0", "1"]}
    assert classes == [grouped, {"name": "road", "colour": "#46464a", "values": ["2"]}]
    assert train(material, folder, "--data.classes", json.dumps(classes), *epochs) == 0


def test_a_class_that_no_label_has_is_named_where_labels_count_nowhere(material: Material, tmp_path: Path) -> None:
    """A mask of 0 and 255, where 255 is no class unless `data.classes` says so."""
    masks = [str(tmp_path / f"mask-{number}.tif") for number in (1, 2)]
    for mask in masks:
        write_raster(Path(mask), np.kron(np.eye(8, dtype=np.uint8), np.full((8, 8), 255, np.uint8))[None])
    labels = ("--data.labels", json.dumps(masks), "--train.epochs", "1", "--run.verbosity", "1", *FP32)
    words = "no label has class 1, 2, and 1,024 label pixels are not counted: they are 255 or without data"
    assert words in errors_of(lambda: train(material, tmp_path / "run", *labels))


STEADY = ("--optimizer.name", "sgd", "--optimizer.policy", "constant", "--train.precision", "fp32")
WHOLE = ("--train.tiles_per_step", "null")


def one_image(material: Material) -> tuple[str, ...]:
    return ("--data.images", str(material.root / "one.tif"), "--data.labels", str(material.root / "one-labels.tif"))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "loss" in line]


@pytest.fixture(scope="module")
def begun(material: Material) -> Path:
    """One image for two epochs of four, one step each: stopped by its epochs."""
    folder = material.root / "begun"
    assert train(material, folder, *one_image(material), *WHOLE, "--train.epochs", "2") == 0
    return folder


def copy(begun: Path, name: str) -> Path:
    return Path(shutil.copytree(begun, begun.with_name(name)))


def test_more_images_and_epochs_are_trained_to_their_end_and_saved(material: Material, begun: Path) -> None:
    """It was: exit 0, finished, and the newest checkpoint step-000002: 12 steps lost."""
    folder = copy(begun, "more-images")
    assert train(material, folder, *WHOLE, "--train.epochs", "8", "--train.checkpoint_every", "100") == 0
    assert [line["step"] for line in steps(folder)] == list(range(1, 15))
    assert [line["epoch"] for line in steps(folder)] == [0, 1, *(epoch for epoch in range(2, 8) for _ in range(2))]
    assert find_checkpoint(folder).saved.step == 14
    found = summary(folder)
    assert (found["finished"], found["steps"], found["epochs"]) == (True, 14, 8)
    rates = [line["lr"] for line in steps(folder)][3:]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.1 * rates[0], "the cosine ends with the last epoch"


def test_fewer_epochs_in_the_middle_of_one(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs and a step are more than three; four epochs are still to come, and end there."""
    folder = material.root / "in-the-middle"
    with monkeypatch.context() as patch:
        after_step(patch, 9)
        assert train(material, folder, "--train.epochs", "6") == 75
    assert find_checkpoint(folder).saved.position == (3, 1)
    words = "has done 3 epochs and 1 steps, but train.epochs is 3; give at least 4"
    refuse(lambda: train(material, folder, "--train.epochs", "3"), words)
    assert train(material, folder, "--train.epochs", "4") == 0
    assert (summary(folder)["steps"], find_checkpoint(folder).saved.step) == (12, 12)


def test_weights_that_are_not_finite_are_never_saved(material: Material, tmp_path: Path) -> None:
    """The loss of a last step is finite where its update is not: it was exit 0 with a checkpoint of NaN.

    Pixels of 1e34 give a loss and gradients of their size, and a rate of 1e6 an update beyond float32.
    """
    generator = np.random.default_rng(0)
    write_raster(tmp_path / "huge.tif", generator.uniform(1e34, 2e34, (3, 64, 64)).astype(np.float32))
    data = ("--data.images", str(tmp_path / "huge.tif"), *one_image(material)[2:], "--data.normalize", "false")
    validation = ("--data.val_images", "[]", "--data.val_labels", "[]")
    options = (*data, *validation, *WHOLE, *STEADY, "--optimizer.clip_norm", "0", "--optimizer.warmup_steps", "0")
    assert train(material, tmp_path / "run", *options, "--train.epochs", "2", "--optimizer.lr", "1e-36") == 0
    options = (*options, "--train.epochs", "3", "--optimizer.lr")
    words = "is not finite after step 3; its checkpoint is not written"
    refuse(lambda: train(material, tmp_path / "run", *options, "1e6"), words, code=1)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-000002"]
    assert train(material, tmp_path / "run", *options, "1e-36") == 0
    assert find_checkpoint(checkpoints).saved.step == 3


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "report.html"])
def test_a_file_that_no_run_has_written_stays(material: Material, tmp_path: Path, name: str) -> None:
    """A new run removed, or replaced, other programs' files of its names."""
    (tmp_path / name).write_text("mine\n")
    before = tree(tmp_path)
    refuse(lambda: train(material, tmp_path), f"{name} was not written by a run, which would replace it")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("ended", ["finished", "killed long after", "killed soon"])
def test_checkpoints_that_are_gone_are_missed(
    material: Material, begun: Path, capsys: pytest.CaptureFixture[str], ended: str
) -> None:
    """A run began anew without a word, and its first write removed the metrics of the one before."""
    folder = copy(begun, f"gone-{ended.replace(' ', '-')}")
    shutil.rmtree(folder / "checkpoints")
    every = {"finished": "9", "killed long after": "1", "killed soon": "9"}[ended]
    if ended != "finished":
        (folder / "summary.json").unlink()
        more = (folder / "metrics.jsonl").read_text().splitlines()[0]
        more = json.dumps({**json.loads(more), "step": 3})
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(more + "\n")
    before = tree(folder)
    options = (*one_image(material), *WHOLE, "--train.epochs", "2", "--train.checkpoint_every", every)
    code = train(material, folder, *options, "--run.verbosity", "1")
    said = capsys.readouterr().err
    if ended == "killed soon":
        assert code == 0
        assert "has 3 steps, but there is no checkpoint of them: the run begins anew" in said
    else:
        assert code == 2
        assert "but no checkpoint is left in" in said
        assert tree(folder) == before
