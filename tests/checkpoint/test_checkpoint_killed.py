"""Checkpoints: whole or not there, wherever a save is killed between two file operations."""

import functools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.saved import make_network, save, state_of, train
from tiledseg.checkpoint import folder as module
from tiledseg.checkpoint.folder import contents_of, find_checkpoint, newest_checkpoint, rewind, save_checkpoint
from tiledseg.checkpoint.loading import load_network
from tiledseg.config.run import OptimizerConfig
from tiledseg.training.optimizer import build_optimizer


@pytest.mark.parametrize(("keep", "before"), [(1, (1,)), (2, (1, 2))], ids=["a-new-step", "a-step-that-is-there"])
def test_killed_at_any_moment_of_a_save(tmp_path: Path, keep: int, before: tuple[int, ...]) -> None:
    """The law: what a resume finds is the old checkpoint or the new one, whole; and saving again leaves no trace.

    A child process is killed (SIGKILL) before its first, second, third ... file operation, until one gets through. A
    step is saved over one of the same number only where that one was damaged.
    """
    template = tmp_path / "template"
    for step in before:
        save(template, step, keep=9)
    if 2 in before:
        (template / "step-000002" / "model.safetensors").write_bytes(b"damaged")
    network = make_network()
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    train(network, optimizer, 2)
    contents = contents_of(network, optimizer)
    outcomes = []
    for count in range(1, 200):
        folder = Path(shutil.copytree(template, tmp_path / "run"))
        again = functools.partial(save_checkpoint, folder, contents, state_of(2), keep)
        got_through = survives(count, folder, again)
        found = newest_checkpoint(folder)
        assert found is not None, f"operation {count} left no whole checkpoint"
        load_network(found, make_network())
        outcomes.append(found.saved.step)
        for path in folder.glob("step-*"):  # what has a checkpoint's name is whole
            if (path / "model.safetensors").read_bytes() != b"damaged":
                assert find_checkpoint(path).path == path
        assert find_checkpoint(folder).saved.step == 1 if outcomes[-1] == 1 and 2 not in before else True
        rewind(folder, found.saved.step, None)
        again()
        assert find_checkpoint(folder).saved.step == 2
        wanted = ["latest", "step-000002"] if keep == 1 else ["latest", "step-000001", "step-000002"]
        assert sorted(path.name for path in folder.iterdir()) == wanted
        shutil.rmtree(folder)
        if got_through:
            break
    assert got_through
    assert outcomes == sorted(outcomes), "once the new one was there, it stayed"
    assert set(outcomes) == {1, 2}
    assert len(outcomes) > 12, "the operations were not seen"


def survives(count: int, folder: Path, work: Callable[[], Any]) -> bool:
    """Runs `work` in a child, killed before its `count`-th file operation in `folder`. Whether it got through."""
    child = os.fork()
    if child == 0:
        try:
            kill_before(count, folder)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def kill_before(count: int, folder: Path) -> None:
    """Arms this process until it ends. safetensors writes outside Python: its files are cut in the middle by hand."""
    left = [count]

    def meet() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (changes or writes) and str(arguments[0]).startswith(str(folder)):
            meet()

    write = module.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        meet()
        write(tensors, path)
        whole = path.read_bytes()
        os.truncate(path, len(whole) // 2)  # met by `watch`, then dead before or after the cut
        meet()
        path.write_bytes(whole)
        meet()

    flush = module.flush
    module.flush = lambda path: (meet(), flush(path))[1]  # type: ignore[assignment]
    module.save_file = save_file  # type: ignore[assignment]
    sys.addaudithook(watch)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A forked child has no other threads than the one that forked it."""
    torch.set_num_threads(1)
