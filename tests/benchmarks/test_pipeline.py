"""The side-by-side run of pipelines at a tiny size: everyone's gradients are held against the serial ones first."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks.pipeline import contestants, turns
from tests.comm.launching import MPIRUN, clean_environment, run_job
from tiledseg.errors import TiledsegError

TINY = ("--levels", "2", "--base-channels", "4", "--size", "16", "--micro-batches", "4", "--dtype", "float64")
ONCE = ("--turns", "1", "--steps", "1", "--ceiling-pairs", "1", "--ceiling-micro-batches", "1")


@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed")
def test_contestants_take_turns_on_one_balance(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    who = ("--who", "torch.distributed.pipelining, 1f1b", "torchgpipe, as it is", "--torchgpipe-path", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.pipeline", *TINY, *ONCE, *who, "--json", str(report)]
    done = run_job(command, environ=clean_environment())
    assert done.code == 0, done.err
    found = json.loads(report.read_text())
    assert found["ceiling"]["speed_up_at_most"]["median"] > 0
    rows = {row["who"]: row for row in found["contest"]["rows"]}
    serial, ours = rows["one process, channels last"], rows["tiledseg, 1f1b"]
    torchs, absent = rows["torch.distributed.pipelining, 1f1b"], rows["torchgpipe, as it is"]
    assert absent["reason"].startswith("not runnable: ")
    for row in (ours, torchs):
        assert row["balances"] == [found["contest"]["balance"]]
        assert row["gradients_differ_by"] <= row["bound"] == 1e-12
        assert len(row["busy_seconds"]) == 2
    assert serial["bytes_sent"] == [0]
    assert ours["bytes_sent"] == torchs["bytes_sent"]
    assert ours["messages"] == torchs["messages"]
    product = 2 * math.prod(ours["account"][part]["median"] for part in ("work", "balance", "filled"))
    assert product == pytest.approx(ours["speed_up"]["median"], rel=0.01)


@pytest.mark.parametrize("differs", [2.1e-5, math.nan])
def test_times_of_other_gradients_are_refused(differs: float) -> None:
    serial = turns.Entry(contestants.one_process("contiguous"), [{"dtype": "float32", "gradients_differ_by": 1e-5}])
    peer, ours = contestants.contestants(2, None)[5], contestants.ours("1f1b", 2)
    wrong = [{"dtype": "float32", "gradients_differ_by": differs}]
    found = {entry.contestant.name: entry for entry in (serial, turns.Entry(peer, wrong), turns.Entry(ours, wrong))}
    turns.check(serial, found)
    assert serial.reason is None
    turns.check(found[peer.name], found)
    assert "more than 2.0e-05" in found[peer.name].reason
    with pytest.raises(TiledsegError, match=r"tiledseg, 1f1b: gradients differ .* more than 1.0e-06"):
        turns.check(found[ours.name], found)


def test_turns_go_forth_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = contestants.contestants(2, None)[:3]
    asked: list[str] = []
    line = {"dtype": "float32", "gradients_differ_by": 0.0}
    monkeypatch.setattr(
        turns, "_take_turn", lambda entry, _: (asked.append(entry.contestant.name), entry.lines.append(line))
    )
    turns.take_turns(everyone, turns.Turns((), (), 2, 1.0, Path()))
    names = [contestant.name for contestant in everyone]
    assert asked == [*names, *reversed(names)]
