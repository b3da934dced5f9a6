"""What is written in the background: the same bits, one at a time, and no failure unheard."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saved import FILES, make_network, state_of, train
from tiledseg.checkpoint.folder import contents_of, save_checkpoint
from tiledseg.config.run import OptimizerConfig
from tiledseg.errors import WriteError
from tiledseg.training.saving import Background, Snapshot
from tiledseg.training.steps.optimizer import build_optimizer


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / "step-000002" / name).read_bytes() for name in FILES}


def test_a_copy_has_the_bits_of_its_moment(tmp_path: Path) -> None:
    """Written after three more steps, it is byte for byte what a save at once writes; the next copy is the next state,
    in the same memory."""
    network = make_network()
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    average = {"mean": torch.randn(3, 4).t()}
    train(network, optimizer, 2)
    save_checkpoint(tmp_path / "at-once", 2, contents_of(network, optimizer, average), state_of(2), 9)
    snapshot = Snapshot()
    copied = contents_of(network, optimizer, average, snapshot.copy)
    train(network, optimizer, 3)
    average["mean"].zero_()
    save_checkpoint(tmp_path / "later", 2, copied, state_of(2), 9)
    assert files(tmp_path / "later") == files(tmp_path / "at-once")

    again = contents_of(network, optimizer, average, snapshot.copy)
    now = contents_of(network, optimizer, average)
    for held, fresh in zip((again.weights, again.optimizer), (now.weights, now.optimizer), strict=True):
        assert held.keys() == fresh.keys()
        assert all(torch.equal(held[name], fresh[name]) and held[name].is_contiguous() for name in held)
    assert all(again.weights[name].data_ptr() == copied.weights[name].data_ptr() for name in again.weights)


def test_never_two_at_once_and_in_their_order() -> None:
    background, gate, done = Background("test"), threading.Event(), []
    background.begin(lambda: (gate.wait(100), done.append(1)))
    assert background.is_busy(0.01)
    background.check()  # nothing has failed, and nobody is waited for
    assert done == []
    threading.Timer(0.05, gate.set).start()
    background.begin(lambda: done.append(len(done) + 1))
    background.wait()
    assert done == [1, 2]
    assert not background.is_busy(0.0)


@pytest.mark.parametrize("asked", ["check", "wait", "begin"])
def test_what_stops_it_is_raised_once_by_who_asks_next(asked: str) -> None:
    def fail() -> None:
        raise WriteError("the disk is full")

    background, begun = Background("test"), []
    background.begin(fail)
    while background.is_busy(0.1):
        pass
    with pytest.raises(WriteError, match="the disk is full"):
        background.begin(lambda: begun.append(1)) if asked == "begin" else getattr(background, asked)()
    background.wait()
    assert begun == []
