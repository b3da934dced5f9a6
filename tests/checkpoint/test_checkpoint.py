"""Checkpoints: back bit for bit, and which of them a resume finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.saved import make_network, save, state_of, train
from tiledseg.checkpoint.folder import (
    MODEL,
    OPTIMIZER,
    contents_of,
    find_checkpoint,
    newest_checkpoint,
    newest_step,
    rewind,
    save_checkpoint,
)
from tiledseg.checkpoint.loading import load_network, load_optimizer
from tiledseg.comm.doing import changes
from tiledseg.config.run import OptimizerConfig
from tiledseg.errors import CheckpointError
from tiledseg.training.optimizer import build_optimizer


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
        save_checkpoint(tmp_path, contents_of(network, optimizer), state_of(3, config), keep=1)
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


def test_weights_of_two_names_are_written_under_both(tmp_path: Path) -> None:
    """Without a copy they lie in one piece of memory, which safetensors refuses."""
    one = torch.arange(6.0)
    contents = {MODEL: {"a.bias": one, "b.bias": one, "c.bias": one[2:4]}, OPTIMIZER: {}}
    path = save_checkpoint(tmp_path, contents, state_of(1, OptimizerConfig()), keep=1)
    found = load_file(path / "model.safetensors")
    assert {k: v.tolist() for k, v in found.items()} == {k: v.tolist() for k, v in contents[MODEL].items()}


def test_a_network_of_another_shape_or_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = find_checkpoint(tmp_path)
    name = "layers.bottom-conv0.weight"
    with pytest.raises(CheckpointError, match=rf"of another model: '{name}' is \(3, .*\) there and \(4, .*\) in this"):
        load_network(found, make_network(channels=4))
    with pytest.raises(CheckpointError, match=r"of another model: 'bias' is absent there and \(3,\) in this"):
        load_network(found, nn.Conv2d(2, 3, 3))


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    network = make_network()
    with pytest.raises(CheckpointError, match="another optimizer"):
        load_optimizer(find_checkpoint(tmp_path), build_optimizer(network.parameters(), OptimizerConfig(name="sgd")))
    fewer = build_optimizer(list(network.parameters())[1:], OptimizerConfig())
    with pytest.raises(CheckpointError, match=r"adamw of 5 parameters there, adamw of 4 param"):
        load_optimizer(find_checkpoint(tmp_path), fewer)


# --- which checkpoint


def test_run_folder_checkpoints_folder_and_checkpoint_lead_to_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    newest = save(folder, 2)
    assert (folder / "latest").read_text() == "step-000002\n"
    assert {find_checkpoint(path).path for path in (tmp_path, folder, newest)} == {newest}
    assert find_checkpoint(folder / "step-000001").saved.step == 1


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    """Also where a name has grown a digit; what is no checkpoint stays."""
    others = {"step-notes", "step-000001.bak", "latest"}
    for name in others - {"latest"}:
        (tmp_path / name).mkdir()
    steps = (1, 2, 999999, 1000000, 1000001)
    for step in steps:
        save_checkpoint(tmp_path, {MODEL: {"a": torch.ones(1)}, OPTIMIZER: {}}, state_of(step), keep)
    assert {path.name for path in tmp_path.iterdir()} == others | {f"step-{step:06d}" for step in steps[-keep:]}
    assert find_checkpoint(tmp_path).saved.step == 1000001


def test_a_save_counts_as_progress_at_each_sync_and_each_mebibyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("tiledseg.checkpoint.folder.flush", lambda path: seen.append(changes()))
    before = changes()
    save_checkpoint(tmp_path, {MODEL: {"a": torch.ones(1 << 20)}, OPTIMIZER: {}}, state_of(1), 1)
    assert seen[0] - before > 4, "the sums of 4 MiB"
    assert len(set(seen)) == len(seen) == 5


def test_resuming_takes_the_newest_whole_one(tmp_path: Path) -> None:
    """The tests of damage find the one before."""
    assert (newest_checkpoint(tmp_path), newest_step(tmp_path)) == (None, None)
    for step in (1, 2):
        (save(tmp_path, step) / "manifest.json").unlink()
    assert newest_step(tmp_path) == 2
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        newest_checkpoint(tmp_path)


def test_going_back_drops_what_came_later(tmp_path: Path) -> None:
    """A damaged newest one neither takes the place of those made anew nor is pointed at."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / ".partial-step-000004").mkdir()
    rewind(tmp_path, 2, None)
    assert find_checkpoint(tmp_path).saved.step == newest_step(tmp_path) == 2
    save(tmp_path, 3, keep=1)
    assert find_checkpoint(tmp_path).saved.step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003"]
