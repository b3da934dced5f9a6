"""Progress: bars with the time left on a terminal, a line now and then elsewhere, nothing where nobody wants it."""

from __future__ import annotations

import io
import re
import sys

import pytest

from tiledseg.execution import progress
from tiledseg.execution.progress import StepProgress, unseen


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def shown(text: str) -> str:
    """Without the control sequences."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)


def test_a_terminal_has_bars_of_the_whole_and_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    bar = StepProgress(7, 2, 1)
    bar.advance(3, "epoch 0")
    seen = []
    for item in bar.part("abcd", 4, "validation"):
        seen.append(item)
        bar._bar.refresh()  # type: ignore[union-attr]
    bar.say("a line")
    bar.advance(7, "epoch 1")
    bar.close()
    assert seen == list("abcd")
    words = shown(terminal.getvalue())
    assert "3/7" in words
    assert "7/7" in words
    assert re.search(r"validation .* 3/4 ", words)
    assert re.search(r"\d:\d\d:\d\d|-:--:--", words), "the time left"
    assert "a line\n" in words
    assert "validation" not in words[words.rindex("epoch 1") :], "a part that is over is shown no more"


def test_elsewhere_lines_come_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    bar = StepProgress(50, 10, 1)
    for done in range(11, 51):
        now += 4.0
        bar.advance(done, "words")
    assert list(bar.part(range(5), 5, "looking")) == list(unseen(range(5), 5, "")) == [0, 1, 2, 3, 4]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "13/50 words, 2 min left"
    assert len(lines) == 13, "every third: ten seconds and more, and none of a part"
