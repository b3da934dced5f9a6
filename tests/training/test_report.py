"""The lines that a run leaves: whole ones, where it ends and goes on; and the extras beside them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiledseg.errors import OutputError
from tiledseg.system.outputs import METRICS
from tiledseg.training.run_files import read_metrics
from tiledseg.training.run_journal import Journal, plot_progress

find = importlib.util.find_spec


def without(monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == extra else find(name))


def step_line(step: int, loss: float | None = 0.5) -> dict[str, Any]:
    pace = {"seconds": 0.1, "data_seconds": 0.0, "communication_seconds": 0.0, "pixels_per_second": 100.0}
    return {"step": step, "epoch": 0, "loss": loss, "lr": 0.1, "tiles": 1, "pixels": 10, **pace}


def opened(folder: Path, step: int = 0) -> Journal:
    return Journal(folder, step, 0, 0, {})


def write_run(folder: Path, steps: int) -> list[dict[str, Any]]:
    journal, lines = opened(folder), []
    for step in range(1, steps + 1):
        journal.step(step_line(step, 1 / (step + 1)))
        lines.append(step_line(step, 1 / (step + 1)))
        assert read_metrics(journal.path) == lines, "a line is there as soon as it is written"
    journal.close()
    return lines


@settings(derandomize=True, max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), keep=st.integers(0, 7))
def test_a_resumed_log_is_that_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, keep: int) -> None:
    """Wherever a crash has cut the file, after the checkpoint's step: lines after the checkpoint go, whole ones stay,
    and going on gives the file of an uninterrupted run."""
    without(monkeypatch, "tensorboard")
    (tmp_path / METRICS).unlink(missing_ok=True)
    lines = write_run(tmp_path, 6)
    text = (tmp_path / METRICS).read_text()
    kept = [line for line in lines if line["step"] <= keep]
    least = len("".join(json.dumps(line) + "\n" for line in kept))
    (tmp_path / METRICS).write_text(text[: max(least, len(text) - cut)])
    journal = opened(tmp_path, keep)
    assert read_metrics(journal.path) == kept
    for line in lines[len(kept) :]:
        journal.step(line)
    journal.close()
    assert (tmp_path / METRICS).read_text() == text


@pytest.mark.parametrize(
    "damage", [b"{", b"3", b'{"loss": 1}', b'{"step": true}', b"\0\0\0", b"\xff", b'{"step": 1, "val": {}}']
)
def test_damage_is_said_and_nothing_of_the_file_is_lost(tmp_path: Path, damage: bytes) -> None:
    """A line in the middle that no run has written: those after it would be lost with it. A torn last line is none."""
    good = [json.dumps(step_line(step)).encode() + b"\n" for step in (1, 2, 3)]
    whole = good[0] + damage + b"\n" + good[2]
    (tmp_path / METRICS).write_bytes(whole)
    with pytest.raises(OutputError, match=r"metrics\.jsonl, line 2 is no line of this run"):
        opened(tmp_path, 9)
    assert (tmp_path / METRICS).read_bytes() == whole
    (tmp_path / METRICS).write_bytes(good[0] + damage)
    assert read_metrics(tmp_path / METRICS) == [step_line(1)]


def test_a_step_that_does_not_follow_the_one_before_is_refused(tmp_path: Path) -> None:
    """A digit that was changed: the line would else be lost, or there twice, in a run that goes on."""
    path = tmp_path / METRICS
    path.write_text("".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 7, 4)))
    with pytest.raises(
        OutputError, match=r"metrics\.jsonl, line 3 is no line of this run, or its step does not follow"
    ):
        read_metrics(path)


def test_plots_and_events_are_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    write_run(tmp_path, 4)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == {step: pytest.approx(1 / (step + 1)) for step in range(1, 5)}
    plot_progress(tmp_path, "a title", "Dice")
    assert (tmp_path / "progress.png").read_bytes().startswith(b"\x89PNG")
    for extra in ("matplotlib", "tensorboard"):
        without(monkeypatch, extra)
        (tmp_path / extra).mkdir()
        write_run(tmp_path / extra, 1)
        plot_progress(tmp_path / extra, "a title", "Dice")
    assert not (tmp_path / "matplotlib" / "progress.png").exists()
    assert not (tmp_path / "tensorboard" / "events").exists()
