"""What a run leaves: whole lines, files that are the old one or the new one, a plot."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiledseg.errors import OutputError, WriteError
from tiledseg.system.outputs import METRICS
from tiledseg.training.run_folder import metrics
from tiledseg.training.run_folder.journal import plot_progress
from tiledseg.training.run_folder.metrics import MetricsLog, check_lines, read_metrics, write_whole


def step_line(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": 0,
        "loss": 1 / (step + 1),
        "lr": 0.1,
        "tiles": 1,
        "pixels": 10,
        "seconds": 0.1,
        "data_seconds": 0.0,
        "communication_seconds": 0.0,
        "pixels_per_second": 100.0,
        "memory_bytes": 1,
    }


def validation_line(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "val": {"loss": 0.5, "accuracy": 0.5, "mean_iou": 0.25, "iou": [0.25, None]}}


def write_run(folder: Path, steps: int) -> list[dict[str, Any]]:
    """A log with a validation after every second step."""
    lines = []
    log = MetricsLog(folder, 0, [])
    for step in range(1, steps + 1):
        for line in (step_line(step), *([validation_line(step)] if step % 2 == 0 else [])):
            log.write(line)
            lines.append(line)
            assert read_metrics(log.path) == lines, "a line is there as soon as it is written"
    log.close()
    return lines


@settings(derandomize=True, max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), keep=st.integers(0, 7))
def test_a_resumed_log_is_that_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, keep: int) -> None:
    """Wherever a crash has cut the file, after the checkpoint's step: lines after the checkpoint go, whole ones stay,
    and going on gives the file of an uninterrupted run."""
    monkeypatch.setattr(metrics, "_open_events", lambda folder, step: None)
    (tmp_path / METRICS).unlink(missing_ok=True)
    lines = write_run(tmp_path, 6)
    text = (tmp_path / METRICS).read_text()
    kept = [line for line in lines if line["step"] <= keep]
    least = len("".join(json.dumps(line) + "\n" for line in kept))
    (tmp_path / METRICS).write_text(text[: max(least, len(text) - cut)])
    log = MetricsLog(tmp_path, keep, read_metrics(tmp_path / METRICS))
    assert read_metrics(log.path) == kept
    for line in lines[len(kept) :]:
        log.write(line)
    log.close()
    assert (tmp_path / METRICS).read_text() == text


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / METRICS) == []


@pytest.mark.parametrize(
    "damage", [b"{", b"3", b'{"loss": 1}', b'{"step": true}', b"\0\0\0", b"\xff", b'{"step": 1, "val": {}}']
)
def test_damage_is_said_and_nothing_of_the_file_is_lost(tmp_path: Path, damage: bytes) -> None:
    """A line in the middle that no run has written: those after it would be lost with it."""
    good = [json.dumps(step_line(step)).encode() + b"\n" for step in (1, 2, 3)]
    whole = good[0] + damage + b"\n" + good[2]
    (tmp_path / METRICS).write_bytes(whole)
    with pytest.raises(OutputError, match=r"metrics\.jsonl, line 2 is no line of this run"):
        MetricsLog(tmp_path, 9, read_metrics(tmp_path / METRICS))
    assert (tmp_path / METRICS).read_bytes() == whole


@pytest.mark.parametrize("torn", [b"{", b'{"step": 2, "lo', b"\0\0", b"\xff"])
def test_a_last_line_torn_by_a_crash_is_left_out(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / METRICS).write_bytes(json.dumps(step_line(1)).encode() + b"\n" + torn)
    assert read_metrics(tmp_path / METRICS) == [step_line(1)]


def test_write_whole_leaves_the_old_file_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_progress_is_drawn(tmp_path: Path, steps: int) -> None:
    pytest.importorskip("matplotlib")
    write_run(tmp_path, steps)
    assert plot_progress(tmp_path, "a title", "Dice")
    assert (tmp_path / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


def test_lines_without_a_score_are_drawn_too(tmp_path: Path) -> None:
    """A step, or a validation, without a valid pixel."""
    pytest.importorskip("matplotlib")
    empty = {"loss": None, "accuracy": None, "mean_iou": None, "iou": [None]}
    text = [json.dumps({**step_line(1), "loss": None}), json.dumps({"step": 1, "epoch": 0, "val": empty})]
    (tmp_path / METRICS).write_text("\n".join(text) + "\n")
    assert plot_progress(tmp_path, "nothing to see", "Dice")


def test_the_plot_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    write_run(tmp_path, 2)
    assert not plot_progress(tmp_path, "a title", "Dice")
    assert not (tmp_path / "progress.png").exists()


def test_events_are_an_extra_and_hold_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    write_run(tmp_path, 4)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == {step: pytest.approx(1 / (step + 1)) for step in range(1, 5)}
    assert [event.step for event in events.Scalars("val/mean_iou")] == [2, 4]

    (tmp_path / "pictures").mkdir()
    log = MetricsLog(tmp_path / "pictures", 0, [])
    log.write(validation_line(1))
    log.picture("val/panel", np.full((5, 7, 3), 9, np.uint8), 1)
    log.close()
    pictures = EventAccumulator(str(tmp_path / "pictures" / "events"))
    pictures.Reload()
    assert [(image.step, image.height, image.width) for image in pictures.Images("val/panel")] == [(1, 5, 7)]

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    (tmp_path / "without").mkdir()
    write_run(tmp_path / "without", 1)
    assert [path.name for path in (tmp_path / "without").iterdir()] == [METRICS]


def test_numbers_survive_the_file_bit_for_bit(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, [])
    values = [math.pi, 1 / 3, 1e-300, 123456789.123456789]
    for step, value in enumerate(values, start=1):
        log.write({**step_line(step), "loss": value})
    log.close()
    assert [line["loss"] for line in read_metrics(log.path)] == values
    assert log.path.read_text().endswith("\n")


def test_a_step_that_does_not_follow_the_one_before_is_refused(tmp_path: Path) -> None:
    """A digit that was changed: the line would else be lost, or there twice, in a run that goes on."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 7, 4)))
    with pytest.raises(OutputError, match=r"metrics\.jsonl, line 3 is of step 7, after one of step 2; mend it"):
        read_metrics(path)


@pytest.mark.parametrize(("kept", "end"), [(2, "at step 2"), (0, "before the first step")])
def test_a_file_cut_short_is_refused(tmp_path: Path, kept: int, end: str) -> None:
    """The run would go on, and its file would look whole."""
    lines = write_run(tmp_path, 4)
    path = tmp_path / METRICS
    assert check_lines(path, 4, read_metrics(path)) is None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] <= kept))
    with pytest.raises(OutputError, match=rf"metrics\.jsonl ends {end}, the checkpoint is of step 4: the lines"):
        check_lines(path, 4, read_metrics(path))


def test_a_file_moved_away_is_said_and_a_new_one_starts(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    assert check_lines(path, 4, read_metrics(path)) == f"{path} is gone: the new one starts after step 4"
    log = MetricsLog(tmp_path, 4, [])
    log.write(step_line(5))
    log.close()
    assert check_lines(path, 5, read_metrics(path)) is None


def test_a_run_folder_that_is_moved_away_is_said_at_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiledseg.training.run_folder.metrics._open_events", lambda *given: None)
    (tmp_path / "run").mkdir()
    log = MetricsLog(tmp_path / "run", 0, [])
    log.write(step_line(1))
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(WriteError, match=r"cannot write \S+/run/metrics.jsonl: No such file"):
        log.write(step_line(2))
    log.close()
    assert len(read_metrics(tmp_path / "away" / METRICS)) == 1
