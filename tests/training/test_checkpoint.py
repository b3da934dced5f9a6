"""Checkpoints: whole or not there, found damaged where they are, nothing in them can run, and back bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tiledseg
from tiledseg.config import OptimizerConfig
from tiledseg.errors import CheckpointError
from tiledseg.training import checkpoint as module
from tiledseg.training.checkpoint import (
    clean_leftovers,
    contents_of,
    drop_later,
    find_checkpoint,
    load_network,
    load_optimizer,
    newest_checkpoint,
    newest_step,
    save_checkpoint,
)
from tiledseg.training.optimizer import build_optimizer

FILES = ("model.safetensors", "optimizer.safetensors", "manifest.json")


def make_network(seed: int = 0, channels: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(2, channels, 3), nn.BatchNorm2d(channels), nn.Conv2d(channels, 2, 1))
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        network(torch.randn(1, 2, 6, 6, generator=generator)).square().sum().backward()
        optimizer.step()


def state_of(step: int) -> dict[str, Any]:
    return {
        "config": {"data": {"classes": {10: 0, 9: 1, "8": None}}},  # keys that JSON turns into text, in another order
        "network": {},
        "normalization": {"mean": [0.1, 1e-300]},
        "position": {"epoch": 0, "step": step},
        "sampling": {},
        "step": step,
    }


def save(folder: Path, step: int, keep: int = 9, seed: int = 0) -> Path:
    """A checkpoint whose weights tell its step."""
    network = make_network(seed)
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    train(network, optimizer, step)
    return save_checkpoint(folder, step, contents_of(network, optimizer), state_of(step), keep)


# --- back bit for bit


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.1),
        OptimizerConfig(name="sgd", lr=0.01, momentum=0.9, weight_decay=0.1),
        OptimizerConfig(name="sgd", lr=0.01, momentum=0.0),
    ],
    ids=["adamw", "sgd-with-momentum", "sgd-without"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_round_trip(tmp_path: Path, config: OptimizerConfig, dtype: torch.dtype) -> None:
    """What comes back has the same bits and the same strides, and so has every step that follows."""
    torch.set_default_dtype(dtype)
    try:
        network = make_network(1)
        optimizer = build_optimizer(network.parameters(), config)
        train(network, optimizer, 3)
        save_checkpoint(tmp_path, 3, contents_of(network, optimizer), state_of(3), keep=1)
        other = make_network(2)
        other_optimizer = build_optimizer(other.parameters(), config)
        found = find_checkpoint(tmp_path)
        load_network(found, other)
        load_optimizer(found, other_optimizer)
        check_equal(network, optimizer, other, other_optimizer)
        train(network, optimizer, 5)
        train(other, other_optimizer, 5)
        check_equal(network, optimizer, other, other_optimizer)
    finally:
        torch.set_default_dtype(torch.float32)


def check_equal(
    network: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, other_optimizer: torch.optim.Optimizer
) -> None:
    for (name, here), there in zip(network.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(here, there), name
        assert strides(here) == strides(there), name
    for mine, theirs in zip(network.parameters(), other.parameters(), strict=True):
        states, other_states = optimizer.state[mine], other_optimizer.state[theirs]
        assert states.keys() == other_states.keys()
        for name, value in states.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other_states[name].dtype
                assert torch.equal(value, other_states[name])
                assert strides(value) == strides(other_states[name]), name


def strides(tensor: torch.Tensor) -> list[int]:
    """Of the dims that have more than one entry: the others' say nothing."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def test_state_comes_back_as_json_has_it(tmp_path: Path) -> None:
    save(tmp_path, 2)
    assert find_checkpoint(tmp_path).state == json.loads(json.dumps(state_of(2)))


def test_a_network_of_another_shape_or_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"of another model: '0.bias' is \(3,\) there and \(4,\) in this"):
        load_network(found, make_network(channels=4))
    with pytest.raises(CheckpointError, match=r"of another model: '0.bias' is \(3,\) there and absent in this"):
        load_network(found, nn.Conv2d(2, 3, 3))


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    network = make_network()
    with pytest.raises(CheckpointError, match="another optimizer"):
        load_optimizer(find_checkpoint(tmp_path), build_optimizer(network.parameters(), OptimizerConfig(name="sgd")))
    fewer = build_optimizer(list(network.parameters())[1:], OptimizerConfig())
    with pytest.raises(CheckpointError, match=r"6 parameters .* 5 parameters"):
        load_optimizer(find_checkpoint(tmp_path), fewer)


def test_hyperparameters_are_those_of_the_run_that_goes_on(tmp_path: Path) -> None:
    save(tmp_path, 1)
    network = make_network()
    optimizer = build_optimizer(network.parameters(), OptimizerConfig(lr=0.5, weight_decay=0.25))
    load_optimizer(find_checkpoint(tmp_path), optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.25)


# --- which checkpoint


def test_run_folder_checkpoints_folder_and_checkpoint_lead_to_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    newest = save(folder, 2)
    assert (folder / "latest").read_text() == "step-000002\n"
    assert {find_checkpoint(path).path for path in (tmp_path, folder, newest)} == {newest}
    assert find_checkpoint(folder / "step-000001").state["step"] == 1


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    """Also where a name has grown a digit; what is no checkpoint stays."""
    others = {"step-notes", "step-000001.bak", "latest"}
    for name in others - {"latest"}:
        (tmp_path / name).mkdir()
    steps = (1, 2, 999999, 1000000, 1000001)
    for step in steps:
        save_checkpoint(tmp_path, step, contents_of(*network_and_optimizer()), state_of(step), keep)
    assert {path.name for path in tmp_path.iterdir()} == others | {f"step-{step:06d}" for step in steps[-keep:]}
    assert find_checkpoint(tmp_path).state["step"] == 1000001


def network_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    network = make_network()
    return network, build_optimizer(network.parameters(), OptimizerConfig())


def test_resuming_takes_the_newest_whole_one(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_step(tmp_path) is None
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert newest_step(tmp_path) == 3
    (tmp_path / "step-000003" / "model.safetensors").write_bytes(b"")
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.state["step"] == 2
    for step in (1, 2):
        (tmp_path / f"step-00000{step}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        newest_checkpoint(tmp_path)


def test_going_back_drops_what_came_later(tmp_path: Path) -> None:
    """A damaged newest one neither takes the place of those made anew nor is pointed at."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-000003" / "optimizer.safetensors").unlink()
    drop_later(tmp_path, 2)
    assert find_checkpoint(tmp_path).state["step"] == 2
    assert newest_step(tmp_path) == 2
    save(tmp_path, 3, keep=1)
    assert find_checkpoint(tmp_path).state["step"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003"]


def test_leftovers_of_a_crash_are_neither_found_nor_kept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".partial-step-000002")
    assert newest_step(tmp_path) == 1
    clean_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]


# --- damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("whole"), 2)


@settings(
    derandomize=True, max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from(FILES), at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_a_changed_byte_or_a_cut_is_found(
    whole: Path, tmp_path: Path, name: str, at: float, flip: int, cut: bool
) -> None:
    """Only the manifest's white space may change: its content is then still the same."""
    path = tmp_path / "step-000002"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    data = bytearray((path / name).read_bytes())
    place = int(at * len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= flip
    (path / name).write_bytes(data)
    error, state = attempt(path)
    assert "\n" not in error
    assert error or (name == "manifest.json" and state == find_checkpoint(whole).state)


def attempt(path: Path) -> tuple[str, dict[str, Any]]:
    """What is wrong with a checkpoint, or its state."""
    try:
        return "", find_checkpoint(path).state
    except CheckpointError as error:
        return str(error), {}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    path = shutil.copytree(whole, tmp_path / "step-000002")
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        find_checkpoint(path)
    with pytest.raises(CheckpointError):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", ["null", "[]", "3", '"text"', "{}", '{"format": 1}', '{"format": 1, "state": null}']
)
def test_a_manifest_of_another_kind_is_refused(whole: Path, tmp_path: Path, content: str) -> None:
    path = shutil.copytree(whole, tmp_path / "step-000002")
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        find_checkpoint(path)


def test_latest_cannot_lead_elsewhere(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(f"{whole}\n")
    with pytest.raises(CheckpointError, match="no checkpoint's name"):
        find_checkpoint(tmp_path)


# --- nothing can run


class Bomb:
    """Leaves a file where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT)


@pytest.mark.parametrize("name", FILES[:2])
def test_a_pickle_with_the_right_checksum_is_not_run(whole: Path, tmp_path: Path, name: str) -> None:
    path, trace = shutil.copytree(whole, tmp_path / "step-000002"), tmp_path / "trace"
    (path / name).write_bytes(pickle.dumps(Bomb(trace)))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("own_checksum")
    manifest["checksums"][name] = module._sha256(path / name)
    manifest["own_checksum"] = module._own_checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=name):
        find_checkpoint(path)
    assert not trace.exists()
    os.close(pickle.loads(pickle.dumps(Bomb(trace))))
    assert trace.exists(), "the bomb of this test is none"


def test_no_module_reads_pickles() -> None:
    """Objects travel between the ranks of one job only, through torch.distributed and mpi4py."""
    sources = sorted(Path(next(iter(tiledseg.__path__))).rglob("*.py"))
    assert len(sources) > 50
    for path in sources:
        found = re.findall(r"torch\.load\b|\bpickle\b|\bmarshal\b|\beval\(|\bexec\(|allow_pickle", path.read_text())
        found = [word for word in found if word != "eval("] + re.findall(r"(?<![.\w])eval\(", path.read_text())
        assert not found, f"{path}: {found}"


# --- killed between any two file operations


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("before", [(1,), (1, 2)], ids=["a-new-step", "a-step-that-is-there"])
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
    outcomes = []
    for count in range(1, 200):
        folder = Path(shutil.copytree(template, tmp_path / "run"))
        got_through = survives(count, folder, lambda folder=folder: save(folder, 2, keep))
        found = newest_checkpoint(folder)
        assert found is not None, f"operation {count} left no whole checkpoint"
        load_network(found, make_network())
        outcomes.append(found.state["step"])
        check_nothing_half_named(folder, damaged=2 in before)
        assert find_checkpoint(folder).state["step"] == 1 if outcomes[-1] == 1 and 2 not in before else True
        clean_leftovers(folder)
        save(folder, 2, keep)
        assert find_checkpoint(folder).state["step"] == 2
        wanted = ["latest", "step-000002"] if keep == 1 else ["latest", "step-000001", "step-000002"]
        assert sorted(path.name for path in folder.iterdir()) == wanted
        shutil.rmtree(folder)
        if got_through:
            break
    assert got_through
    assert outcomes == sorted(outcomes), "once the new one was there, it stayed"
    assert set(outcomes) == {1, 2}
    assert len(outcomes) > 12, "the operations were not seen"


def check_nothing_half_named(folder: Path, damaged: bool) -> None:
    """Every folder of a checkpoint's name is whole (but for the one that was damaged before)."""
    for path in folder.glob("step-*"):
        if not (damaged and (path / "model.safetensors").read_bytes() == b"damaged"):
            assert find_checkpoint(path).path == path


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
    """Arms this process for ever. safetensors writes outside Python: its files are cut in the middle by hand."""
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

    flush = module._flush
    module._flush = lambda path: (meet(), flush(path))[1]  # type: ignore[assignment]
    module.save_file = save_file  # type: ignore[assignment]
    sys.addaudithook(watch)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child has no other threads than the one that forked it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
